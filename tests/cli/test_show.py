"""`memlane show`: what it finds by which name, and what it says of each participant."""

import json
import os
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from memlane import Gather, InvalidArgument
from memlane.cli import ls, show
from memlane.cli.rates import Rates
from memlane.inspect import segments as looked
from memlane.inspect.segment import Deliveries
from tests.support.queues import fill, queue_of


def shown(capsys: pytest.CaptureFixture[str], what: str) -> list[str]:
    show.run(what, False)
    return capsys.readouterr().out.splitlines()


def test_each_participant_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    with queue_of(2, name="steps", max_chunks=4) as (writer, [_, second]):
        fill(writer)
        second.dequeue()
        facts, titles, *rows = shown(capsys, "steps")
        assert facts.startswith(f"queue steps (memlane-{writer.handle.queue_id}), n reader 2, max")
        assert [row.split()[0] for row in rows] == ["writer", "reader", "reader"]
        assert all(f"{os.getpid()} python" in row for row in rows)
        assert "KEEPS" not in titles  # nobody keeps a view
        [queue] = looked()
        cells = [
            dict(zip([title for title, _ in show.COLUMNS], row, strict=True))
            for row in (show.row(who, None, time.monotonic()) for who in queue.participants)
        ]
        assert [each["LAG"] for each in cells] == ["", "4", "3"]
        assert [each["MESSAGES"] for each in cells] == ["4", "0", "1"]


def test_what_a_reader_keeps_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The chunk of a view, and it goes with the view."""
    with queue_of(name="steps", max_chunk_bytes=2 << 20) as (writer, [reader]):
        writer.enqueue(np.zeros(1 << 20, np.uint8))
        with reader.dequeue_view():
            _, titles, _, row = shown(capsys, "steps")
        assert "KEEPS" in titles
        assert "2.0M" in row.split()
        assert "KEEPS" not in shown(capsys, "steps")[1]


def test_a_segment_is_found_by_what_people_and_ls_call_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with queue_of(name="steps") as (writer, _), Gather(2, 64, 2, name="replies"):
        name = f"memlane-{writer.handle.queue_id}"
        for what in ("steps", name, name[:18]):
            assert len([line for line in shown(capsys, what) if line.startswith("queue ")]) == 1
        for what, count in (("replies", 2), ("replies[1]", 1), (str(os.getpid()), 3)):
            found = [line for line in shown(capsys, what) if line.startswith("queue ")]
            assert len(found) == count, what
        for what in ("step", "memlane-0123456789", "2147483648"):
            with pytest.raises(InvalidArgument, match="`memlane ls` lists them"):
                show.run(what, False)


def test_json_has_the_rate_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    with queue_of(name="steps"):
        show.run("steps", True)
        made: dict[str, Any] = json.loads(capsys.readouterr().out)
        [segment] = made["segments"]
        assert segment["label"] == "steps"
        assert [who["messages_per_second"] for who in segment["participants"]] == [0.0, 0.0]


def test_latencies_are_bounds_of_the_measured() -> None:
    assert show.within(None, 0.5) is None
    assert show.within(Deliveries(0.0, (0,) * 31), 0.5) is None
    counts = (50, 0, 49, *[0] * 7, 1, *[0] * 20)
    assert show.within(Deliveries(1.0, counts), 0.5) == 1e-6
    assert show.within(Deliveries(1.0, counts), 0.99) == 4e-6
    assert show.within(Deliveries(1.0, counts), 1.0) == 1024e-6


def test_a_name_that_is_nobodys_is_bad_input() -> None:
    with pytest.raises(InvalidArgument, match="none is called 'ghost'"):
        show.asked_for(looked(), "ghost")


def test_a_name_of_digits_goes_before_a_pid() -> None:
    with queue_of(name="2024"), queue_of():
        seen = looked()
        assert [each.label for each in show.asked_for(seen, "2024")] == ["2024"]
        assert len(show.asked_for(seen, str(os.getpid()))) == 2
        for what in ("", "9" * 5000):
            with pytest.raises(InvalidArgument):
                show.asked_for(seen, what)


def test_gathers_of_one_name_have_a_row_for_each_ring() -> None:
    with Gather(1, 64, 2, name="replies"), Gather(1, 64, 2, name="replies"):
        assert [each.label for each, _ in ls.folded(looked(), {})] == ["replies[0]"] * 2


def test_ls_has_one_row_for_a_gather_and_show_unfolds_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with queue_of(name="steps"), Gather(3, 64, 2, name="replies") as gather:
        with Gather.create_from_handle(gather.export_handle(1), 1) as sender:
            fill(sender)
            seen = looked()
            rates = {each.name: 2.0 for each in seen}
            rows = {row[0]: row for row in (ls.row(*one, 0.0) for one in ls.folded(seen, rates))}
        assert sorted(rows) == ["replies[0..2]", "steps"]
        assert rows["replies[0..2]"][5:7] == ["3/3", "6"]
        assert rows["steps"][6] == "2"
        one = next(each for each in seen if each.label == "replies[0]")
        assert ls.folded([one], rates) == [(one, 2.0)]
        writer, reader = one.participants
        elsewhere = replace(one, name="b", participants=(writer, replace(reader, pid=1)))
        assert len(ls.folded([one, elsewhere], rates)) == 2  # of another gather with that name
        ls.run(Rates(), False)
        assert "replies[0..2]" in capsys.readouterr().out
        show.run("replies", False)
        text = capsys.readouterr().out
    assert [f"replies[{rank}]" in text for rank in range(3)] == [True] * 3
