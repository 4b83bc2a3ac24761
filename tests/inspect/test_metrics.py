"""Metrics: what a look says of each, in Prometheus's format, and the files that name them."""

import json
import re
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from memlane._base.blame import Facts
from memlane.inspect.looks import Look
from memlane.inspect.segment import Deliveries, Participant, Segment
from memlane.inspect.waits import Wait
from memlane.metrics import Collector, exposition
from memlane.metrics.catalogue import BOUNDS, METRICS, cumulative, measure
from memlane.metrics.tally import Tally
from tests.support.queues import queue_of

pytestmark = pytest.mark.unit

SHM = {"total": 1000, "used": 400, "free": 600}
COUNTS = (3, 0, 2, *[0] * 21, 5, *[0] * 5, 7)
WRITER = Participant("writer", None, 7, 0.0, "running", 20, activity="waiting", activity_since=98.0)
READER = Participant(
    "reader", 2, 9, 0.0, "stopped", 10, 10, lent=5, deliveries=Deliveries(1.5, COUNTS)
)
ABSENT = Participant("reader", 3, None, None, "absent")
QUEUE = Segment(
    'a "queue"\\',
    "queue",
    False,
    False,
    (7, 9),
    (),
    100,
    50,
    0.0,
    {"n_reader": 2, "max_chunk_bytes": 10, "max_chunks": 10},
    participants=(WRITER, READER, ABSENT),
)
STORE = Segment(
    *("s", "store", True, True, (), (), 10, 5, 0.0),
    counters={"objects": 1, "object_bytes": 2, "puts": 3, "hits": 4, "evictions": 5},
    participants=(WRITER, replace(READER, pinned=3, owed=4)),
)
BROKEN = Segment("b", "unknown", True, False, (), (), 1, 1, 0.0, problem="damaged")
FACTS = Facts("reader 2", "stopped", 9, behind=10)
WAIT = Wait(QUEUE.name, WRITER, 2.0, "no free chunk", (READER,), 0, "", (FACTS,))
LOOK = Look(100.0, [QUEUE, STORE, BROKEN], [WAIT])


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(name: str, **labels: str) -> float:
    return samples(exposition.text(measure(LOOK, SHM, Tally())))[name, frozenset(labels.items())]


def test_what_is_measured() -> None:
    writer = {"queue": QUEUE.name, "role": "writer", "rank": "", "pid": "7"}
    reader = {"queue": QUEUE.name, "role": "reader", "rank": "2", "pid": "9"}
    assert value("memlane_queue_messages_total", **writer) == 20
    assert value("memlane_queue_lag_messages", **reader) == 10
    assert value("memlane_queue_lent_bytes", **reader) == 5
    assert value("memlane_queue_waiting_seconds", **writer) == 2
    assert value("memlane_queue_waiting_seconds", **reader) == 0
    awaited = {"reason": "no free chunk", "awaited": "reader 2 (pid 9, stopped)"}
    assert value("memlane_stuck_seconds", **writer, **awaited) == 2
    states = {"queue": QUEUE.name, "role": "reader"}
    assert value("memlane_queue_participants", **states, state="stopped") == 1
    assert value("memlane_queue_participants", **states, state="absent") == 1
    assert value("memlane_store_puts_total", store="s") == 3
    assert value("memlane_store_owed_objects", store="s", role="reader", rank="2", pid="9") == 4
    assert value("memlane_leftover_bytes") == 5
    assert value("memlane_unreadable_segments") == 1
    assert value("memlane_shm_free_bytes") == 600


def test_delivery_times_are_counted() -> None:
    """Buckets are cumulative, and bounds are in seconds."""
    own = {"queue": QUEUE.name, "rank": "2", "pid": "9"}
    bucket = "memlane_queue_delivery_seconds_bucket"
    assert value(bucket, **own, le="4e-06") == 5
    assert value(bucket, **own, le="16.777216") == 10
    assert value(bucket, **own, le="+Inf") == 17
    assert value("memlane_queue_delivery_seconds_count", **own) == 17
    assert value("memlane_queue_delivery_seconds_sum", **own) == 1.5
    assert cumulative(Deliveries(0.0, COUNTS))[-1] == sum(COUNTS)
    assert [bound for _, bound in BOUNDS] == sorted(bound for _, bound in BOUNDS)


def test_the_same_labels_make_one_sample() -> None:
    """Though a segment has the name of one that is still held, and slots say the same."""
    twice = replace(QUEUE, participants=(WRITER, READER, READER))
    text = exposition.text(measure(Look(100.0, [twice, QUEUE], []), SHM, Tally()))
    lines = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))


def test_a_collector_agrees_with_the_text() -> None:
    """Says the same as the text, and describes all of it."""
    registry = CollectorRegistry()
    with queue_of(max_chunks=16) as (writer, (reader,)):
        registry.register(Collector())  # type: ignore[arg-type]
        for number in range(10):
            writer.enqueue(number)
        reader.dequeue()
        text = generate_latest(registry).decode()
        labels = {"queue": writer.handle.buffer_handle[3], "role": "reader", "rank": "0"}  # type: ignore[index]
        own = [
            value
            for (name, found), value in samples(text).items()
            if name == "memlane_queue_lag_messages" and labels.items() <= dict(found).items()
        ]
        assert own == [9]
    described = {family.name for family in Collector().describe()}
    assert {family.name for family in text_string_to_metric_families(text)} <= described
    assert described == {metric.name.removesuffix("_total") for metric in METRICS}


def test_names_are_told_apart() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert re.fullmatch(r"memlane_[a-z_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert metric.help.endswith(".")


def known() -> set[str]:
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {
        metric.name + suffix for metric in METRICS for suffix in suffixes.get(metric.kind, ("",))
    }


@pytest.mark.parametrize("name", ["alerts.yml", "dashboard.json"])
def test_files_name_what_exists(name: str) -> None:
    text = (files("memlane.metrics") / name).read_text()
    named = set(re.findall(r"memlane_[a-z_]+", text))
    assert named
    assert named <= known()


def test_the_dashboard_is_what_grafana_imports() -> None:
    """Is what Grafana imports: panels with ids and places of their own, and expressions."""
    board: Any = json.loads((files("memlane.metrics") / "dashboard.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    for panel in panels:
        assert all(
            target["expr"].count("(") == target["expr"].count(")") for target in panel["targets"]
        )
