"""Kill -9 of any holder at random moments of start, use and cleanup.

``MEMLANE_SOAK_REGIONS`` is the number of rounds (default 40). The next start always works, at once,
and never sees old bytes. With ``participants=`` nothing is left once all have mapped the region.
"""

import os
import random
import signal
import time

import pytest

from tests.support import PATIENCE, Link, Peer, PeerGone, start
from tests.support.regions import PAGE, new_id, path_of, region_of

ROUNDS = int(os.environ.get("MEMLANE_SOAK_REGIONS", "40"))
BLOCKS = 64
pytestmark = pytest.mark.soak(seconds=60 + ROUNDS)


def living(link: Link, instance: str, rank: int, participants: int | None) -> None:
    """Role: start, use, cleanup, over and over; reports its first start."""
    link.tell("begins")
    while True:
        with region_of(instance, rank, blocks=BLOCKS, participants=participants) as region:
            link.tell("started")
            cell = region.create_next_array(PAGE)
            cell[:] = rank + 1
            if participants is not None:  # one generation: the others would not find the next
                link.hear()


def said_started(peer: Peer) -> bool:
    try:
        return bool(peer.hear() == "started")
    except PeerGone:
        return False


@pytest.mark.parametrize("participants", [None, 2])
def test_everybody_is_killed(participants: int | None) -> None:
    dice = random.Random(participants)
    instance = new_id()
    left = 0
    for _ in range(ROUNDS // 2):
        peers = [start(living, instance, rank, participants) for rank in range(2)]
        for peer in peers:
            assert peer.hear() == "begins"
        said = [False, False]
        if dice.random() < 0.5:  # in use, or in cleanup; else while they start
            said = [bool(peer.hear() == "started") for peer in peers]
        time.sleep(dice.random() * 0.02)  # they die at any moment
        started = []
        for peer in peers:  # or the second could start alone, once the first is dead
            peer.stop()
        for peer in peers:
            os.kill(peer.pid, signal.SIGKILL)
        for peer in peers:
            started.append(said.pop(0) or said_started(peer))
            peer.join()
        if participants is not None and all(started):
            assert not path_of(instance).exists()
        left += path_of(instance).exists()

        # The dead are not waited for.
        shape = {"blocks": BLOCKS, "participants": participants, "timeout": PATIENCE}
        with region_of(instance, 0, **shape) as one, region_of(instance, 1, **shape) as other:
            assert (one._creator, other._creator) == (True, False)
            assert path_of(instance).exists() == (participants is None)
            assert bytes(one.mmap_obj[:]) == bytes(one.total_size_bytes)
        assert not path_of(instance).exists()
    print(f"{left} of {ROUNDS // 2} kills left a file for the next start")
