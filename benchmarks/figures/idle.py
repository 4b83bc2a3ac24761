"""CPU time of four waiting readers, over time; a message comes every four seconds."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.figures.peers import by_peer
from memlane.cli.bench.worker import SETTLE, Writer

READERS = 4
SECONDS = 16.0
EVERY = 4.0
STEP = 0.25


class Trickling(Writer):
    def trickle(self) -> list[tuple[float, float]]:
        """Sends a message every `EVERY` seconds. Returns, for every `STEP` seconds, the time since
        the start and the cores that all readers together have used since the last sample."""
        answers = self.all("take", int(SECONDS / EVERY))
        time.sleep(SETTLE)
        begun = last = time.monotonic()
        used, due = self.used_ns(), begun + EVERY
        samples: list[tuple[float, float]] = []
        while last < begun + SECONDS:
            time.sleep(max(0.0, begun + (len(samples) + 1) * STEP - time.monotonic()))
            now, total = time.monotonic(), self.used_ns()
            samples.append((now - begun, (total - used) / 1e9 / (now - last)))
            last, used = now, total
            if now >= due - STEP / 2:
                due += EVERY
                self.channel.send(self.obj)
        answers()
        return samples


def measure() -> dict[str, Any]:
    return {
        "readers": READERS,
        "every": EVERY,
        "peers": by_peer(
            READERS, lambda session: session.ask("trickle", timeout=SECONDS + 30), Trickling
        ),
    }
