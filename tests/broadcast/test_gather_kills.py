"""Kill -9 of writers of a gather at random moments.

``MEMLANE_SOAK_GATHER`` is the number of seconds (default 2).
"""

import os
import random
import time

import pytest

from memlane import Gather, GatherHandle, WriterDied
from tests.support import PATIENCE, Link, start
from tests.support.traffic import leaving_nothing

SECONDS = float(os.environ.get("MEMLANE_SOAK_GATHER", "2"))
pytestmark = pytest.mark.soak(seconds=60 + SECONDS)
WRITERS = 3


def writing(link: Link, handle: GatherHandle, count: int) -> None:
    """Role: sends numbered messages of changing sizes, then closes."""
    with Gather.create_from_handle(handle, handle.rank) as writer:
        link.tell()
        for number in range(count):
            writer.enqueue((handle.rank, number, bytes(number % 9000)), PATIENCE)


def test_writers() -> None:
    """What each had sent comes without a gap; then its death, once until it is released."""
    dice, end = random.Random(3), time.monotonic() + SECONDS
    while time.monotonic() < end:
        with leaving_nothing(), Gather(WRITERS, 4096, 3) as reader:
            counts = [1 << 40] * (WRITERS - 1) + [dice.randrange(200)]
            peers = [
                start(writing, reader.export_handle(rank), count)
                for rank, count in enumerate(counts)
            ]
            for peer in peers:
                peer.hear()
            if dice.random() < 0.5:
                reader.wait_until_ready(PATIENCE)
            taken = [0] * WRITERS
            killed: set[int] = set()
            died: set[tuple[int | None, int]] = set()
            doomed = [time.monotonic() + dice.uniform(0, 0.03) for _ in peers[:-1]]
            while len(died) < len(doomed):
                for rank, moment in enumerate(doomed):
                    if rank not in killed and time.monotonic() > moment:
                        peers[rank].kill()
                        killed.add(rank)
                try:
                    rank, number, body = reader.dequeue(PATIENCE)
                except WriterDied as death:
                    died.add((death.rank, death.pid))
                    reader.release_writer(death.rank or 0)
                    continue
                assert (number, len(body)) == (taken[rank], number % 9000)
                taken[rank] += 1
            assert died == {(rank, peers[rank].pid) for rank in killed}
            for rank, number, _ in reader:
                assert (rank, number) == (WRITERS - 1, taken[-1])
                taken[-1] += 1
            assert taken[-1] == counts[-1]
            assert reader.statistics().messages == sum(taken)
            peers[-1].result()
