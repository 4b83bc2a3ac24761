"""The blame for a wait: the error, the log line, `memlane stuck`, the metric and the page use the
same words in the same order. Real processes, each scene seen through all five."""

import ctypes
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from memlane import Handle, MessageQueue, TimedOut
from tests.support import (
    PATIENCE,
    Link,
    Peer,
    dismiss,
    own_pid_namespace,
    run_memlane,
    start,
    unshare_refusal,
    until,
    until_asleep,
)
from tests.support.exporters import Exporter, exporter
from tests.support.queues import fill, name_in, segments, start_reader, start_writer, sweep

AFTER = "0.2"
SIZES: dict[str, Any] = {"max_chunk_bytes": 1 << 16, "max_chunks": 2}
OF_HOSTS = "hosts"  # the name of a queue that goes over the network
CGROUPS = [
    Path(root, f"memlane-test-{os.getpid()}")
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
]


pytestmark = pytest.mark.usefixtures("commands")


@pytest.fixture(autouse=True)
def _short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLANE_RINGBUFFER_WARNING_INTERVAL", "0.3")


@pytest.fixture
def served() -> Iterator[Exporter]:
    before = segments()
    with exporter(_SEARCH_EVERY=0.5, AFTER=float(AFTER)) as made:
        yield made
    dismiss()
    until(lambda: swept() <= before, "nothing is left", pause=0.05)
    for group in CGROUPS:
        with suppress(FileNotFoundError):
            group.rmdir()


def swept() -> set[str]:
    sweep()
    return segments()


class Cue:
    """Everything is set up: wait."""


# The process that waits ------------------------------------------------------------------------


def complain(link: Link, call: Callable[[float], object]) -> None:
    """Waits in vain and tells the error and the log's line; then waits until it is killed."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("memlane").addHandler(handler)
    error = ""
    try:
        call(1.0)
    except TimedOut as problem:
        error = str(problem)
    link.tell((error, lines[0] if lines else ""))
    call(10 * PATIENCE)


def write(link: Link, n_readers: int) -> None:
    """Role: a writer whose ring is full."""
    queue = MessageQueue(n_readers, n_readers, **SIZES)
    link.tell(queue.export_handle())
    while not isinstance(word := link.hear(), Cue):
        queue.enqueue(word)
    fill(queue)
    complain(link, lambda timeout: queue.enqueue("one more", timeout=timeout))


def write_to_hosts(link: Link, n_local: int) -> None:
    """Role: a writer whose reader on another host does not read."""
    queue = MessageQueue(
        1 + n_local,
        n_local,
        local_reader_ranks=list(range(n_local)),
        connect_ip="127.0.0.1",
        remote_window=2,
        name=OF_HOSTS,
        **SIZES | {"max_chunks": 8},
    )
    link.tell(queue.export_handle())
    link.hear()
    fill(queue)
    complain(link, lambda timeout: queue.enqueue("one more", timeout=timeout))


def read(link: Link, handle: Handle, rank: int) -> None:
    """Role: a reader for which there is no message."""
    queue = MessageQueue.create_from_handle(handle, rank)
    link.tell("attached")
    link.hear()
    complain(link, queue.dequeue)


def ask(link: Link, answers: Handle) -> None:
    """Role: has sent a request, and waits for the answer."""
    work = MessageQueue(1, 1, **SIZES)
    queue = MessageQueue.create_from_handle(answers, 0)
    queue.answers(work)
    link.tell(work.export_handle())
    link.hear()
    work.enqueue("request")
    complain(link, queue.dequeue)


# What the others do ------------------------------------------------------------------------------


def sleep(link: Link, handle: Handle, rank: int) -> None:
    queue = MessageQueue.create_from_handle(handle, rank)
    link.tell("attached")
    time.sleep(3600)
    queue.close()


def answer_nothing(link: Link) -> None:
    """Role: has taken a request, and does something else."""
    answers = MessageQueue(1, 1, **SIZES)
    link.tell(answers.export_handle())
    work = MessageQueue.create_from_handle(link.hear(), 0)
    work.dequeue()
    time.sleep(3600)
    for queue in (work, answers):
        queue.close()


def hold(link: Link, handle: Handle, rank: int) -> None:
    """Role: a reader that keeps a view of a chunk, and has left its block."""
    queue = MessageQueue.create_from_handle(handle, rank)
    link.tell("attached")
    kept = []
    with suppress(BufferError), queue.acquire_read() as chunk:
        kept.append(chunk[:4])
    link.tell("holding")
    time.sleep(3600)


def stay(link: Link, handle: Handle, rank: int) -> None:
    """Role: a reader that does not leave its block."""
    queue = MessageQueue.create_from_handle(handle, rank)
    link.tell("attached")
    with queue.acquire_read():
        link.tell("holding")
        time.sleep(3600)


def started(role: Callable[..., Any], handle: Handle, rank: int) -> Peer:
    peer = start(role, handle, rank)
    assert peer.hear() == "attached"
    return peer


@dataclass
class Scene:
    """The process that waits, set up as far as its cue, and how its segment is called; whether it
    logs the wait, which a reader of a writer that looks idle does not do."""

    waiter: Peer
    segment: str
    is_logged: bool = True


def writer(n_readers: int) -> tuple[Peer, Handle]:
    peer = start(write, n_readers)
    return peer, peer.hear()


def stopped() -> Scene:
    waiter, handle = writer(1)
    start_reader(handle).peer.stop()
    return Scene(waiter, name_in(handle))


def stopped_and_absent() -> Scene:
    waiter, handle = writer(2)
    start_reader(handle).peer.stop()
    return Scene(waiter, name_in(handle))


def absent_and_stopped() -> Scene:
    waiter, handle = writer(2)
    start_reader(handle, 1).peer.stop()
    return Scene(waiter, name_in(handle))


def asleep() -> Scene:
    waiter, handle = writer(1)
    started(sleep, handle, 0).until_asleep()
    return Scene(waiter, name_in(handle))


def in_a_block() -> Scene:
    waiter, handle = writer(1)
    reader = started(stay, handle, 0)
    waiter.tell(1)
    assert reader.hear() == "holding"
    reader.until_asleep()
    return Scene(waiter, name_in(handle))


def views() -> Scene:
    """Another reader has read all that it got."""
    waiter, handle = writer(2)
    reader = started(hold, handle, 1)
    other = start_reader(handle)
    waiter.tell("taken")
    assert reader.hear() == "holding"
    other.call("dequeue", timeout=PATIENCE)
    reader.until_asleep()
    until_asleep(other.pid)
    return Scene(waiter, name_in(handle))


def silent_for_longest() -> Scene:
    """No reader is stopped: the last to take a message is the least suspect."""
    waiter, handle = writer(3)
    readers = [start_reader(handle, rank) for rank in range(3)]
    waiter.tell("taken")
    for rank in (1, 2, 0):
        readers[rank].call("dequeue", timeout=PATIENCE)
        time.sleep(0.05)
    for reader in readers:
        until_asleep(reader.pid)
    return Scene(waiter, name_in(handle))


def of_all_kinds() -> Scene:
    waiter, handle = writer(4)
    inside = started(stay, handle, 1)
    start_reader(handle, 2).peer.stop()
    waiter.tell(1)
    assert inside.hear() == "holding"
    started(sleep, handle, 3).until_asleep()
    inside.until_asleep()
    return Scene(waiter, name_in(handle))


def more_than_are_named() -> Scene:
    waiter, handle = writer(11)
    start_reader(handle, 10).peer.stop()
    return Scene(waiter, name_in(handle))


def in_another_pid_namespace() -> Scene:
    if refusal := unshare_refusal():
        pytest.skip(refusal)
    waiter, handle = writer(1)
    start_reader(handle, 0, "spawn", own_pid_namespace())
    return Scene(waiter, name_in(handle))


def traced() -> Scene:
    waiter, handle = writer(1)
    reader = started(sleep, handle, 0)
    start(trace, reader.pid).hear()
    return Scene(waiter, name_in(handle))


def trace(link: Link, pid: int) -> None:
    """Role: a debugger that has stopped its process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(16, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(pid, 0x40000000)  # __WALL
    link.tell()
    os.waitpid(pid, 0x40000000)  # until it is killed: its parent could not reap it before


def frozen() -> Scene:
    """By its cgroup, as a paused container: SIGCONT does not help."""
    group = next((path for path in CGROUPS if is_writable(path.parent)), None)
    if group is None:
        pytest.skip("no cgroup can be made here")
    waiter, handle = writer(1)
    reader = started(sleep, handle, 0)
    group.mkdir()
    (group / "cgroup.procs").write_text(str(reader.pid))
    (group / "cgroup.freeze").write_text("1")
    until(lambda: "frozen 1" in (group / "cgroup.events").read_text(), "it is frozen")
    return Scene(waiter, name_in(handle))


def is_writable(cgroup: Path) -> bool:
    return (cgroup / "cgroup.procs").exists() and os.access(cgroup, os.W_OK)


def stopped_writer() -> Scene:
    source = start_writer()
    waiter = started(read, source.greeting, 0)
    source.peer.stop()
    return Scene(waiter, name_in(source.greeting))


def on_another_host() -> Scene:
    """The readers here have room."""
    waiter = start(write_to_hosts, 1)
    handle = waiter.hear()
    started(sleep, handle, 0).until_asleep()
    started(sleep, handle, 1).until_asleep()
    return Scene(waiter, OF_HOSTS)


def only_on_another_host() -> Scene:
    """So there is no ring."""
    waiter = start(write_to_hosts, 0)
    started(sleep, waiter.hear(), 0).until_asleep()
    return Scene(waiter, OF_HOSTS)


def owes_an_answer() -> Scene:
    """Its writer looks idle; the request says that it is not."""
    worker = start(answer_nothing)
    answers = worker.hear()
    waiter = start(ask, answers)
    worker.tell(waiter.hear())
    return Scene(waiter, name_in(answers), is_logged=False)


SCENES: list[Callable[[], Scene]] = [
    *(stopped, stopped_and_absent, absent_and_stopped, asleep, in_a_block, views),
    *(silent_for_longest, of_all_kinds, more_than_are_named, in_another_pid_namespace),
    *(traced, frozen, stopped_writer, on_another_host, only_on_another_host, owes_an_answer),
]


# The five ----------------------------------------------------------------------------------------


def sentences(text: str) -> list[str]:
    """Those about participants in a list, with all durations alike."""
    even = re.sub(r"\d+\.\d s", "N s", text)
    return re.findall(r"(?:the )?(?:reader|writer)(?: \d+)? \((?:[^()]|\([^()]*\))*\)", even)


def stuck_says(segment: str) -> tuple[list[str], str]:
    """The sentences of `memlane stuck`, and the line of who waits."""
    done = run_memlane("stuck", "--after", AFTER, "--no-stacks")
    found: list[str] = []
    head = ""
    for line in done.stdout.splitlines():
        if not line.startswith(" "):
            head = line if segment[:18] in line else ""
        elif head and line.startswith("  waits for "):
            found.append(line.removeprefix("  waits for "))
            headline = head
    return (sentences("\n".join(found)), headline) if found else ([], "")


def page_says(served: Exporter, segment: str) -> list[str]:
    for wait in served.json()["stuck"]:
        if f" of {segment[:18]} " in wait["sentence"]:
            return sentences(wait["sentence"].partition("; waiting for ")[2])
    return []


def metric_says(served: Exporter, segment: str) -> list[str]:
    for family in text_string_to_metric_families(served.metrics()):
        for sample in family.samples:
            if sample.name == "memlane_stuck_seconds" and sample.labels["queue"] == segment:
                return sentences(sample.labels["awaited"])
    return []


def is_beginning(part: str, whole: str) -> bool:
    """`reader 2 (pid 9, stopped)` of `reader 2 (pid 9, stopped, 10 behind)`."""
    return whole.startswith(part.removesuffix(")"))


@pytest.mark.parametrize("scene", SCENES)
def test_all_five_use_the_same_words(scene: Callable[[], Scene], served: Exporter) -> None:
    made = scene()
    made.waiter.tell(Cue())
    error, line = made.waiter.hear()
    in_error = sentences(error.partition("waiting for ")[2])
    in_log = sentences(line.partition("; waiting for ")[2])
    assert in_error
    assert in_log == (in_error if made.is_logged else [])
    until(lambda: bool(stuck_says(made.segment)[0]), "somebody is stuck", pause=0.1)
    in_stuck, head = stuck_says(made.segment)
    assert in_stuck[: len(in_error)] == in_error
    until(lambda: bool(page_says(served, made.segment)), "the page says so", pause=0.1)
    assert page_says(served, made.segment) == in_error
    in_metric = metric_says(served, made.segment)
    assert len(in_metric) == len(in_error)
    assert all(map(is_beginning, in_metric, in_error)), (in_metric, in_error)
    if not made.is_logged:
        return
    who, _, reason = line.partition(" blocked for ")
    reason = reason.partition(" s: ")[2].partition("; ")[0]
    assert head.startswith(f"{who.removesuffix(')')}")
    assert head.endswith(reason)
