"""What a run measures, and how long each peer's turn is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memlane.cli.bench.board import STAMPS
from memlane.cli.bench.measure import PAUSE, Cell
from memlane.cli.bench.payloads import KIB, MIB, PAYLOADS, Payload

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
    if payload.bytes <= 64 * KIB:
        paced, round_trips = 80, 200
    elif payload.bytes <= MIB:
        paced, round_trips = 40, 20
    elif payload.is_tensor:
        paced, round_trips = (4 if quick else 10), 0
    else:
        paced, round_trips = (1 if quick else 2), 0
    is_idle = payload.name == "dict" and readers == IDLE_READERS
    return Cell(
        payload=payload,
        readers=readers,
        paced=min(paced // 2 if quick and paced > 2 else paced, STAMPS),
        round_trips=round_trips if readers == 1 else 0,
        seconds=1.0 if payload.is_tensor else 0.05 if quick else 0.2,
        pause=TENSOR_PAUSE if payload.is_tensor else PAUSE,
        idle_seconds=IDLE_SECONDS / rounds / (2 if quick else 1) if is_idle else 0.0,
    )
