"""Random kills, stops, timeouts, cancellations and interrupts on everything that carries messages.

``MEMLANE_SOAK_TORTURE`` is the number of seconds for each kind (default 0.7), and
``MEMLANE_SOAK_SEED`` the first seed, for a round that has failed; else it is new each time.
"""

import os
import random
import time
from pathlib import Path

import pytest

from tests.crash.torture import KINDS, STANDS, Round, play

SECONDS = float(os.environ.get("MEMLANE_SOAK_TORTURE", "0.7"))


@pytest.mark.soak(seconds=SECONDS + 4 * STANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_torture_loses_and_repeats_nothing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No message is lost, doubled, torn or out of order; each ends by the right error; nobody
    stands, and nothing is left."""
    seed = int(os.environ.get("MEMLANE_SOAK_SEED", random.randrange(1 << 32)))
    end, rounds = time.monotonic() + SECONDS, 0
    with capsys.disabled():
        print(f"\n{kind}: MEMLANE_SOAK_SEED={seed}", flush=True)
    while rounds == 0 or time.monotonic() < end:
        play(kind, seed + rounds, tmp_path)
        rounds += 1
    print(f"{kind}: {rounds} rounds")


def test_who_stands_is_shown(tmp_path: Path) -> None:
    """With its state, and the stacks of it and of all others."""
    standing = Round("plain", 1, tmp_path)
    standing.one.stop()
    shown = standing.report()
    assert f"the one, pid {standing.one.pid}: T" in shown
    assert shown.count("in reading") == len(standing.many)
    assert "in writing" in shown
    for peer in [standing.one, *standing.many.values()]:
        peer.kill()
