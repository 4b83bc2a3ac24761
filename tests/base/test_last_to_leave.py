"""The last process to leave a segment whose creator was killed removes its name.

Fails without the guard: SIGTERM, SIGHUP and SIGQUIT end Python without finalizers, so the name of
a ring or store stays until somebody creates another segment.
"""

import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest

from memlane import MessageQueue, ShmRingBuffer, WriterDied
from tests.support import Aside, Link, Peer, start
from tests.support.queues import SHM, segments, start_writer
from tests.support.stores import BytesSerde, Ring, Storage

SURVIVORS = 2
DEADLY = [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL]
Open = Callable[[], tuple[object, list[object]]]
Attach = Callable[[Any], Any]


def open_ring() -> tuple[object, list[object]]:
    ring = ShmRingBuffer(1, 64, 2)
    return ring, [ring.handle()] * SURVIVORS


def attach_ring(handle: tuple[int, int, int, str]) -> ShmRingBuffer:
    return ShmRingBuffer(*handle)


def open_store() -> tuple[object, list[object]]:
    store = Storage(1024, SURVIVORS, Ring(1 << 14, create=True), BytesSerde)
    return store, [store.handle()] * SURVIVORS


def open_queue() -> tuple[object, list[object]]:
    """A queue that keeps its name, because one more reader is expected."""
    queue = MessageQueue(SURVIVORS + 1, SURVIVORS + 1, None, 64, 2)
    return queue, [(queue.export_handle(rank), rank) for rank in range(SURVIVORS)]


def attach_queue(place: tuple[Any, int]) -> MessageQueue:
    return MessageQueue.create_from_handle(*place)


KINDS: dict[str, tuple[Open, Attach]] = {
    "ring": (open_ring, attach_ring),
    "store": (open_store, Storage.create_from_handle),
    "queue that waits for a reader": (open_queue, attach_queue),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def creating(link: Link, kind: str) -> None:
    creator, places = KINDS[kind][0]()
    link.tell(places)
    link.hear()
    del creator


def surviving(link: Link, kind: str, place: object, how: str) -> None:
    end = KINDS[kind][1](place)
    link.tell()
    link.hear()
    if how == "close":
        end.close()
    link.tell()
    link.hear()  # "exit": the finalizer does it


def start_all(kind: str, how: str) -> tuple[Peer, list[Peer], str]:
    """A creator, the attached processes, and the segment's name."""
    before = segments()
    creator = start(creating, kind)
    survivors = [start(surviving, kind, place, how) for place in creator.hear()]
    for peer in survivors:
        peer.hear()
    (name,) = segments() - before
    return creator, survivors, name


def end(peer: Peer, by: signal.Signals) -> None:
    os.kill(peer.pid, by)
    peer.join()


def leave(*survivors: Peer) -> None:
    """Ends all of them at once."""
    for _ in range(2):
        for peer in survivors:
            peer.tell()
    for peer in survivors:
        peer.hear()
        peer.result()


@kinds
@pytest.mark.parametrize("by", DEADLY, ids=lambda by: by.name)
@pytest.mark.parametrize("how", ["close", "exit"])
def test_last_survivor_removes_the_name(kind: str, by: signal.Signals, how: str) -> None:
    """The name stays while a process is left, and goes with the last one."""
    creator, (first, last), name = start_all(kind, how)
    end(creator, by)
    leave(first)
    assert (SHM / name).exists()
    leave(last)
    assert not (SHM / name).exists()


def creating_named(link: Link) -> None:
    """A ring with a name of the caller's, and its storage."""
    ring = Ring(1 << 14, "chosen", create=True)
    storage = Storage(1024, 1, ring, BytesSerde)
    link.tell()
    link.hear()
    del storage


def test_last_reader_removes_both_names_of_a_ring() -> None:
    """The caller's, and memlane's own beside it, though the ring was closed before the storage."""
    before = segments()
    creator = start(creating_named)
    creator.hear()
    ring = Ring(1 << 14, "chosen")
    storage = Storage(1024, 1, ring, BytesSerde)
    end(creator, signal.SIGKILL)
    ring.close()
    storage.close()
    assert segments() == before
    assert not (SHM / "chosen").exists()


@kinds
def test_survivors_who_leave_at_once(kind: str) -> None:
    """Whatever the order of their steps, one of them is the last."""
    for _ in range(20):
        creator, survivors, name = start_all(kind, "close")
        end(creator, signal.SIGTERM)
        leave(*survivors)
        assert not (SHM / name).exists()


@kinds
def test_a_living_creator_keeps_its_name(kind: str) -> None:
    """Stopped or not: whichever process leaves, others may still attach."""
    creator, survivors, name = start_all(kind, "close")
    creator.stop()
    leave(*survivors)
    assert (SHM / name).exists()
    creator.resume()
    creator.tell()
    creator.result()
    assert not (SHM / name).exists()


def closing_by_handler(link: Link, kind: str) -> None:
    """With the signal handler shown in the guide.

    It waits in select for what a signal writes: one just before `signal.pause` would not end it.
    """
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(one, lambda number, _frame: sys.exit(128 + number))
    creator, _ = KINDS[kind][0]()
    link.tell()
    select.select([woken], [], [])
    del creator


@kinds
@pytest.mark.parametrize("by", DEADLY[:3], ids=lambda by: by.name)
def test_a_handler_that_raises_leaves_nothing(kind: str, by: signal.Signals) -> None:
    """Even if no other process is there."""
    before = segments()
    creator = start(closing_by_handler, kind)
    creator.hear()
    assert len(segments() - before) == 1
    end(creator, by)
    assert segments() == before


def test_who_notices_the_death_of_a_writer_removes_the_name() -> None:
    """Not all had attached; no process has to leave or create anything first."""
    before = segments()
    writer = start_writer(n_readers=2)
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        assert segments() != before
        writer.peer.kill()
        with pytest.raises(WriterDied):
            reader.dequeue()
        assert segments() == before


def test_who_waits_until_ready_removes_the_name_of_a_dead_writer() -> None:
    """The same in wait_until_ready."""
    before = segments()
    writer = start_writer(n_readers=2)
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        waiting = Aside(reader.wait_until_ready).until_blocked()
        writer.peer.kill()
        with pytest.raises(WriterDied):
            waiting.result()
        assert segments() == before
