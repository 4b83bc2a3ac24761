"""A call that waits is told of a peer's death when it happens, not at the end of a slice.

A wait in slices of 0.1 s and more needs 50 ms on average. Of a reader that sleeps 0.7 s at a time,
or a watched end, which is looked at twice a second, it takes longer still.
"""

import asyncio
import errno
import os
import resource
import select
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from memlane import Gather, MessageQueue, PeerDied, TimedOut, first_ready
from tests.support import (
    PATIENCE,
    Aside,
    Link,
    Remote,
    assert_in_time,
    late_since,
    serve,
    start,
    until,
)
from tests.support.queues import BOUND, fill, start_reader, start_writer, sweep
from tests.support.seccomp import refuse

Waiting = tuple[Remote, Callable[[], object]]


@contextmanager
def reader_of(doomed: Remote) -> Iterator[MessageQueue]:
    with MessageQueue.create_from_handle(doomed.greeting, 0) as reader:
        yield reader


def writing_to_a_gather(link: Link, handle: Any) -> None:
    serve(link, Gather.create_from_handle(handle, handle.rank))


def gathering(link: Link) -> None:
    gather = Gather(1, 4096, 2)
    serve(link, gather, gather.export_handle(0))


@contextmanager
def dequeue() -> Iterator[Waiting]:
    doomed = start_writer()
    with reader_of(doomed) as reader:
        yield doomed, lambda: reader.dequeue(PATIENCE)


@contextmanager
def ready() -> Iterator[Waiting]:
    with MessageQueue(2, 2, None, 4096, 2) as writer:
        yield start_reader(writer.export_handle()), lambda: writer.wait_until_ready(PATIENCE)


@contextmanager
def enqueue() -> Iterator[Waiting]:
    with MessageQueue(1, 1, None, 4096, 2) as writer:
        doomed = start_reader(writer.export_handle())
        fill(writer)
        yield doomed, lambda: writer.enqueue("never", PATIENCE)


@contextmanager
def aenqueue() -> Iterator[Waiting]:
    with MessageQueue(1, 1, None, 4096, 2) as writer:
        doomed = start_reader(writer.export_handle())
        fill(writer)
        yield doomed, lambda: asyncio.run(writer.aenqueue("never", PATIENCE))


@contextmanager
def fileno() -> Iterator[Waiting]:
    doomed = start_writer()
    with reader_of(doomed) as reader:
        poller = select.poll()
        poller.register(reader.fileno(), select.POLLIN)
        yield doomed, lambda: poller.poll(1000 * PATIENCE)


@contextmanager
def first() -> Iterator[Waiting]:
    doomed = start_writer()
    with reader_of(doomed) as reader:
        yield doomed, lambda: first_ready([reader], PATIENCE)


@contextmanager
def gather_of_two() -> Iterator[tuple[Remote, Gather]]:
    with Gather(2, 4096, 2) as reader:
        writers = [
            Remote(start(writing_to_a_gather, reader.export_handle(rank))) for rank in range(2)
        ]
        reader.wait_until_ready(PATIENCE)
        yield writers[1], reader
        writers[0].peer.kill()


@contextmanager
def gather_dequeue() -> Iterator[Waiting]:
    with gather_of_two() as (doomed, reader):
        yield doomed, lambda: reader.dequeue(PATIENCE)


@contextmanager
def gather_adequeue() -> Iterator[Waiting]:
    with gather_of_two() as (doomed, reader):
        yield doomed, lambda: asyncio.run(reader.adequeue(PATIENCE))


@contextmanager
def gather_ready() -> Iterator[Waiting]:
    with Gather(2, 4096, 2) as reader:
        doomed = Remote(start(writing_to_a_gather, reader.export_handle(1)))
        yield doomed, lambda: reader.wait_until_ready(PATIENCE)


@contextmanager
def gather_enqueue() -> Iterator[Waiting]:
    doomed = Remote(start(gathering))
    with Gather.create_from_handle(doomed.greeting, 0) as writer:
        fill(writer)
        yield doomed, lambda: writer.enqueue("never", PATIENCE)


CALLS = (
    *(dequeue, enqueue, ready, aenqueue, fileno, first),
    *(gather_dequeue, gather_adequeue, gather_ready, gather_enqueue),
)


def told(call: Callable[[], object]) -> None:
    with suppress(PeerDied):
        call()


def delay_of(waits: Any) -> float:
    """Seconds from a death to the end of the call, but for what the control was late."""
    with waits() as (doomed, call):
        waiting = Aside(told, call).until_blocked()
        killed = doomed.peer.kill()
        waiting.result()
        return waiting.ended - killed - late_since(killed, waiting.ended)


AT_ONCE = 0.1
"""Seconds, as a median of five deaths. On a busy machine a wait in slices of 0.1 s cannot be told
from one that is woken; the longer ones, of half a second and more, can."""


def is_at_once(waits: Any) -> bool:
    """Other load makes it later, never earlier: the best of some counts."""
    return any(statistics.median(delay_of(waits) for _ in range(5)) < AT_ONCE for _ in range(4))


@pytest.mark.parametrize("waits", CALLS)
def test_a_death_is_seen_at_once(waits: Any) -> None:
    assert is_at_once(waits)


def test_a_process_that_never_attaches() -> None:
    """Also its end is told at once."""

    @contextmanager
    def starting() -> Iterator[tuple[Any, Callable[[], object]]]:
        with MessageQueue(1, 1, None, 64, 2) as writer:
            doomed = start(Link.hear)
            yield (
                type("Doomed", (), {"peer": doomed}),
                lambda: writer.wait_until_ready(PATIENCE, processes=[doomed]),
            )

    assert is_at_once(starting)


def waited(_link: Link, refused: int | None) -> None:
    """Role: is told of a death, by each of its ends, within a second."""
    doomed = start_writer(2)
    if refused is not None:
        refuse("pidfd_open", refused)
    reader, watched = (MessageQueue.create_from_handle(doomed.greeting, rank) for rank in range(2))
    poller = select.poll()
    poller.register(watched.fileno(), select.POLLIN)
    waiting = Aside(told, lambda: reader.dequeue(PATIENCE)).until_blocked()
    killed = doomed.peer.kill()
    waiting.result()
    assert_in_time(BOUND, killed, waiting.ended)
    assert poller.poll(1000 * PATIENCE)
    assert_in_time(BOUND, killed)
    reader.close()
    watched.close()


@pytest.mark.parametrize(
    "refused", [errno.EPERM, errno.ENOSYS, errno.EMFILE], ids=errno.errorcode.get
)
def test_where_pidfd_open_is_refused(refused: int) -> None:
    """Within a second, as in a container that forbids it, or without a descriptor left."""
    start(waited, refused).result()


def test_in_a_child_of_a_process_that_has_waited() -> None:
    """It has a thread of its own, and leaves its parent's ends alone."""
    with gather_of_two() as (doomed, reader):
        waiting = Aside(told, lambda: reader.dequeue(PATIENCE)).until_blocked()
        start(waited, None).result()
        killed = doomed.peer.kill()
        waiting.result()
        assert_in_time(BOUND, killed, waiting.ended)


def fork() -> None:
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


def threads_at_a_fork(_link: Link, handle: Any) -> list[int]:
    """Role: how many threads it has beside its own: before a wait, after it, and after a fork."""
    before = len(os.listdir("/proc/self/task"))
    counts = []
    with MessageQueue.create_from_handle(handle, 0) as reader:
        for act in (lambda: reader.dequeue(0.3), fork) * 2:
            with suppress(TimedOut):
                act()
            counts.append(len(os.listdir("/proc/self/task")) - before)
    return counts


def test_no_fork_finds_the_thread() -> None:
    """Python 3.12 warns those who fork beside one, be it no thread of Python's."""
    writer = start_writer()
    assert start(threads_at_a_fork, writer.greeting).result() == [1, 0, 1, 0]
    writer.peer.kill()
    sweep()


def watched_processes() -> int:
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.path.islink(file) and "[pidfd]" in os.readlink(file) for file in files)


def waits_for_a_death_after_a_fork(link: Link, handle: Any) -> None:
    before = watched_processes()
    with MessageQueue.create_from_handle(handle, 0) as reader:
        for act in (lambda: reader.dequeue(0.01), fork, lambda: reader.dequeue(0.01)):
            with suppress(TimedOut):
                act()
        assert watched_processes() == before + 1
        link.tell("waited")
        until(lambda: watched_processes() == before)


def test_a_death_after_a_fork_is_seen() -> None:
    """The thread that the first sleep after the fork starts sees it, and closes what it watched."""
    writer = start_writer()
    reader = start(waits_for_a_death_after_a_fork, writer.greeting)
    assert reader.hear() == "waited"
    writer.peer.kill()
    reader.result()


def closed_from_outside(_link: Link, handle: Any) -> None:
    """Role: somebody closes all descriptors while an end has a peer; then the end is closed."""
    reader = MessageQueue.create_from_handle(handle, 0)
    with suppress(TimedOut):
        reader.dequeue(0.3)
    os.closerange(3, 256)
    with open("/dev/zero", "rb") as file:  # has the number of one of them
        reader.close()
        assert file.read(1) == b"\0"
    os._exit(7)


def test_when_somebody_has_closed_the_descriptors() -> None:
    """As a daemon does. Closing neither hangs nor touches what has their numbers now."""
    writer = start_writer()
    assert start(closed_from_outside, writer.greeting).join() == 7
    writer.peer.kill()
    sweep()


def descriptors_of_a_wait(_link: Link, handle: Any) -> int:
    """Role: how many descriptors a wait takes where more than half of those allowed are in use."""
    with MessageQueue.create_from_handle(handle, 0) as reader:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, used + 8))
        with suppress(TimedOut):
            reader.dequeue(0.3)
        return len(os.listdir("/proc/self/fd")) - used


def test_the_last_descriptors_are_the_applications() -> None:
    writer = start_writer()
    assert start(descriptors_of_a_wait, writer.greeting).result() == 0
    writer.peer.kill()
    sweep()
