"""CPU time of four waiting readers, over time; a message comes every four seconds."""

from __future__ import annotations

from typing import Any

from benchmarks.figures.peers import by_peer

READERS = 4
SECONDS = 16.0
EVERY = 4.0
STEP = 0.25


def measure() -> dict[str, Any]:
    return {
        "readers": READERS,
        "every": EVERY,
        "peers": by_peer(
            READERS,
            lambda session: session.ask("trickle", SECONDS, EVERY, STEP, timeout=SECONDS + 30),
        ),
    }
