"""Plans a run: what it measures, and how long each peer's turn is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.broadcast.payloads import PAYLOADS
from memlane.cli.bench.channel import Payload
from memlane.cli.bench.measure import PAUSE, Cell

IDLE_READERS = 4
IDLE_SECONDS = 3.0
READERS = (1, 2, 4, 8)
# Between two paced tensors: a step of an engine that receives images.
TENSOR_PAUSE = 0.02

# The numbers of readers in the default run; other payloads are measured with 1 and 4.
DEFAULT_READERS = {"dict": READERS, "array-1m": READERS}
QUICK = {"dict": (1, 4), "array-1m": (1, 4), "array-64m": (4,)}


@dataclass(frozen=True)
class Plan:
    rounds: int
    cells: tuple[Cell, ...]


def make(quick: bool, only: Sequence[str], readers: Sequence[int], rounds: int | None) -> Plan:
    """The run that the command line asks for; payloads that it names are measured in any mode."""
    rounds = rounds or (5 if not quick else 3)
    cells = []
    for payload in PAYLOADS:
        if only and payload.name not in only:
            continue
        counts: Sequence[int] = DEFAULT_READERS.get(payload.name, (1, 4))
        if quick:
            counts = QUICK.get(payload.name, (1,) if only else ())
        if counts and readers:
            counts = readers
        cells += [_cell(payload, count, quick, rounds) for count in counts]
    return Plan(rounds, tuple(cells))


def _cell(payload: Payload, readers: int, quick: bool, rounds: int) -> Cell:
    paced = {"dict": 80, "array-1m": 40, "array-64m": 2}.get(payload.name, 10)
    is_idle = payload.name == "dict" and readers == IDLE_READERS
    return Cell(
        payload=payload,
        readers=readers,
        paced=max(2, paced // 2) if quick else paced,
        seconds=1.0 if payload.is_tensor else 0.05 if quick else 0.2,
        pause=TENSOR_PAUSE if payload.is_tensor else PAUSE,
        idle_seconds=IDLE_SECONDS / rounds / (2 if quick else 1) if is_idle else 0.0,
    )
