"""close() at any moment from another thread: other calls end with an error, never a crash.

Fails without the guard: a close that unmaps or frees what a blocked call still uses.
"""

import os
import random
import threading
import time

import pytest

from memlane import Closed, ConcurrentUse, MessageQueue, WriterDied
from tests.support import Aside, Link, start
from tests.support.queues import refuses
from tests.support.stores import BytesSerde, Ring, Storage


def use(end: MessageQueue, go: threading.Barrier) -> str:
    """Uses an end until a call raises; returns the name of the error."""
    go.wait()
    try:
        while True:
            if end._is_writer:
                end.enqueue(b"." * 100)
            else:
                end.dequeue()
    except (Closed, WriterDied, ConcurrentUse) as error:
        return type(error).__name__


def look(end: MessageQueue, go: threading.Barrier) -> str:
    """Reads an end's attributes until it is closed."""
    go.wait()
    try:
        while "closed" not in repr(end):
            end.statistics()
    except Closed:
        pass
    return "Closed"


def race(_link: Link, seed: int) -> int:
    dice = random.Random(seed)
    for _ in range(100):
        writer = MessageQueue(2, 2, None, 256, 2)
        readers = [MessageQueue.create_from_handle(writer.export_handle(), r) for r in range(2)]
        ends = [writer, *readers]
        go = threading.Barrier(len(ends) + 2)
        uses = [Aside(use, end, go) for end in ends] + [Aside(look, dice.choice(ends), go)]
        dice.shuffle(ends)
        go.wait()
        for end in ends:
            time.sleep(dice.choice([0, 0.0005]))
            end.close()
        for call in uses:
            assert call.result() in ("Closed", "WriterClosed")
    return os.getpid()


def test_a_call_gets_closed_when_its_end_closes_at_any_moment() -> None:
    """A thread in a call of an end, or reading its attributes, gets Closed when it closes."""
    peers = [start(race, seed) for seed in range(2)]
    assert [peer.result() for peer in peers] == [peer.pid for peer in peers]


@pytest.mark.parametrize("blocked", [True, False])
def test_several_closes_at_once_act_as_one(blocked: bool) -> None:
    """Three closes of one end at the same time act as one, and all of them return."""
    for _ in range(20):
        with MessageQueue(1, 1, None, 64, 2) as writer:
            reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
            call = Aside(reader.dequeue).until_blocked() if blocked else None
            closes = [Aside(reader.close) for _ in range(3)]
            for close in closes:
                close.result()
            if call is not None:
                with refuses(Closed):
                    call.result()
            writer.enqueue(1, timeout=0)


class Closing:
    """An address that closes the storage when it is looked at, as a signal handler may then."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __index__(self) -> int:
        self._storage.close()
        return 0


def get_and_close(_link: Link, is_reader: bool) -> None:
    ring = Ring(1 << 14, create=True)
    writer = Storage(1024, 1, ring, BytesSerde)
    storage = Storage.create_from_handle(writer.handle()) if is_reader else writer
    writer.put("key", b"value")
    with refuses(Closed):
        storage.get(Closing(storage), 0)  # type: ignore[arg-type]
    writer.close()
    ring.close()


@pytest.mark.parametrize("is_reader", [False, True], ids=["writer", "reader"])
def test_closing_while_numbers_are_read(is_reader: bool) -> None:
    """Fails without the guard: the process ended by SIGSEGV."""
    start(get_and_close, is_reader).result()
