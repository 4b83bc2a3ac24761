"""Kill -9 at random moments around the latest message: what is read, and kept, stays whole.

``MEMLANE_SOAK_LATEST`` is the number of seconds of each test (default 2).
"""

import os
import random
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from memlane import Handle, MessageQueue, ReaderDied, ViewInUse, WriterDied
from tests.support import PATIENCE, Link, Peer, start
from tests.support.queues import refuses
from tests.support.traffic import leaving_nothing

SECONDS = float(os.environ.get("MEMLANE_SOAK_LATEST", "2"))
pytestmark = pytest.mark.soak(seconds=60 + 3 * SECONDS)

SIZES = (10, 5000, 20_000, 1 << 20)
KEPT = 4
OPTIONS: dict[str, Any] = {"max_chunk_bytes": 8192, "mode": "latest", "max_extent_bytes": 64 << 20}


def frame(number: int) -> tuple[int, np.ndarray[Any, Any]]:
    return number, np.full(SIZES[number % len(SIZES)], number % 251, np.uint8)


def read(reader: MessageQueue, dice: random.Random, link: Link | None = None) -> None:
    """Reads until the queue ends, keeps some of it, and checks it all."""
    kept: list[tuple[int, np.ndarray[Any, Any]]] = []
    last = -1
    while True:
        if dice.random() < 0.5:
            number, array = reader.dequeue(PATIENCE, lend=dice.random() < 0.8)
        else:
            with suppress(ViewInUse), reader.dequeue_view(PATIENCE) as view:
                number, array = view
            del view
        if last < 0 and link is not None:
            link.tell()
        assert number > last
        last = number
        kept.append((number, array))
        for before, old in kept:
            assert (old == before % 251).all(), (before, number)
        while len(kept) > KEPT:
            del kept[dice.randrange(len(kept))]
        del array


def pid_of_the_dead(reader: MessageQueue, dice: random.Random) -> int:
    """Reads until the writer has died; keeps nothing, not even by a traceback."""
    try:
        read(reader, dice)
    except WriterDied as error:
        return error.pid
    raise AssertionError


def reading(link: Link, handle: Handle, rank: int, seed: int) -> None:
    """Role: reads, until it is killed."""
    read(MessageQueue.create_from_handle(handle, rank), random.Random(seed), link)


def writing(link: Link, readers: int) -> None:
    """Role: sends without a pause, until it is killed."""
    queue = MessageQueue(readers, readers, **OPTIONS)
    link.tell(queue.export_handle())
    for number in range(1 << 40):
        queue.enqueue(frame(number), timeout=0)


def attached(handle: Handle, rank: int, seed: int) -> Peer:
    return start(reading, handle, rank, seed)


def test_killed_readers_never_make_the_writer_wait() -> None:
    """The writer never waits, tells of each death, and each replacement reads on."""
    dice = random.Random(1)
    with leaving_nothing(), MessageQueue(3, 3, **OPTIONS) as writer:
        peers = [attached(writer.export_handle(rank), rank, rank) for rank in range(3)]
        writer.wait_until_ready(PATIENCE)
        number, end = 0, time.monotonic() + SECONDS
        while time.monotonic() < end:
            doomed = dice.randrange(3)
            until = time.monotonic() + dice.uniform(0, 0.05)
            while time.monotonic() < until or not peers[doomed].has_spoken():
                writer.enqueue(frame(number), timeout=0)
                number += 1
            peers[doomed].hear()
            peers[doomed].kill()
            with refuses(ReaderDied) as caught:
                while True:
                    writer.enqueue(frame(number), timeout=0)
                    number += 1
            assert (caught.value.rank, caught.value.pid) == (doomed, peers[doomed].pid)
            writer.release_reader(doomed)
            peers[doomed] = attached(writer.readmit(doomed), doomed, number)
        assert writer.statistics().waits == 0
        for peer in peers:
            peer.kill()


def test_readers_of_a_killed_writer_have_read_nothing_torn() -> None:
    """Readers end with WriterDied, and have read nothing that is torn."""
    dice, end = random.Random(2), time.monotonic() + SECONDS
    while time.monotonic() < end:
        with leaving_nothing():
            writer = start(writing, 1)
            with MessageQueue.create_from_handle(writer.hear(), 0) as reader:
                reader.dequeue(PATIENCE)
                time.sleep(dice.uniform(0, 0.05))  # it dies at any moment
                writer.kill()
                assert pid_of_the_dead(reader, dice) == writer.pid
