"""The promises, each checked against figures of the same run."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.bars import Bar, against, missing
from benchmarks.broadcast.peers import PEERS
from benchmarks.results import Results
from memlane.cli.bench.measure import CellResult

COPY = "memlane"
VIEW = "memlane view"
KNOWN = "polling ring"
OTHERS = [peer.name for peer in PEERS if not peer.is_memlane]
SLEEPERS = [peer.name for peer in PEERS if not peer.is_memlane and peer.sleeps]
COPIERS = [peer.name for peer in PEERS if not peer.is_memlane and not peer.is_view]

# The throughput promise was written on a machine that copied 1 MiB at this speed.
REFERENCE_COPY_GB_S = 28.0


def _above_floor(cell: CellResult | None, readers: int, factor: float) -> Bar:
    promise = f"dict, N={readers}: p50 <= {factor} x (futex + encode + decode)"
    mine = cell.peers[COPY].median("p50_us") if cell and COPY in cell.peers else None
    if cell is None or mine is None:
        return missing(promise)
    parts = [cell.floor.median(part) or 0.0 for part in ("futex_us", "encode_us", "decode_us")]
    shown = " + ".join(f"{part:.1f}" for part in parts)
    ratio = mine / sum(parts)
    rested = [cell.floor.median(part) or 0.0 for part in ("rested_encode_us", "rested_decode_us")]
    figures = (
        f"{ratio:.2f} x ({mine:.1f} us against {shown}; "
        f"{mine / (parts[0] + sum(rested)):.2f} x with pickling after a rest)"
    )
    return Bar(promise, figures, ratio <= factor)


def _copy_speed(cell: CellResult | None) -> Bar:
    promise = f"1 MiB array, N=1: >= 12 GB/s where memcpy has {REFERENCE_COPY_GB_S:.0f}"
    memcpy = cell.floor.median("memcpy_gb_s") if cell else None
    mine = cell.peers[COPY].median("gb_s") if cell and COPY in cell.peers else None
    if memcpy is None or mine is None:
        return missing(promise)
    needed = 12.0 * memcpy / REFERENCE_COPY_GB_S
    return Bar(promise, f"{mine:.2f} GB/s of {needed:.2f} (memcpy {memcpy:.1f})", mine >= needed)


def _idle(cell: CellResult | None) -> Bar:
    promise = "4 readers on an idle queue: < 0.5 % of one core"
    mine = cell.peers[COPY].median("idle_percent") if cell and COPY in cell.peers else None
    return missing(promise) if mine is None else Bar(promise, f"{mine:.3f} %", mine < 0.5)


def bars(results: Results) -> Iterator[Bar]:
    """All promises, in the order of the payloads."""
    one, four = results.cell("dict", 1), results.cell("dict", 4)
    yield against("dict, N=1: p50 below every peer that sleeps", one, "p50_us", COPY, SLEEPERS, 1)
    yield _above_floor(one, 1, 1.5)
    yield _above_floor(four, 4, 2.0)
    rate = "messages_s"
    yield against("dict, N=1: >= 2 x messages/s of the polling ring", one, rate, COPY, [KNOWN], 2)
    rest = [name for name in OTHERS if name != KNOWN]
    yield against("dict, N=1: >= 1.5 x messages/s of the best other", one, rate, COPY, rest, 1.5)
    yield against("dict, N=4: >= 1.3 x messages/s of the best", four, rate, COPY, OTHERS, 1.3)
    one, four = results.cell("array-1m", 1), results.cell("array-1m", 4)
    yield against(
        "1 MiB array, N=1: p50 by copy <= 0.55 x best", one, "p50_us", COPY, COPIERS, 0.55
    )
    yield against("1 MiB array, N=1: p50 by view <= 0.4 x best", one, "p50_us", VIEW, OTHERS, 0.4)
    yield _copy_speed(one)
    yield against("1 MiB array, N=4: >= 2 x GB/s of the best", four, "gb_s", COPY, COPIERS, 2)
    large = results.cell("array-64m", 4)
    for name, factor in ((COPY, 2.5), (VIEW, 5)):
        promise = f"64 MiB array, N=4: slowest reader of {name} {factor} x faster than pyzmq"
        yield against(promise, large, "slowest_us", name, ["pyzmq"], 1 / factor)
    engine = ["vLLM", "vLLM arena"]
    for readers in (1, 4):
        large, middle = results.cell("tensor-64m", readers), results.cell("tensor-16m", readers)
        title = f"64 MiB tensor, N={readers}: >= 1.1 x messages/s of vLLM"
        yield against(title, large, rate, COPY, engine, 1.1)
        title = f"16 MiB tensor, N={readers}: p50 <= 0.9 x vLLM"
        yield against(title, middle, "p50_us", COPY, engine, 0.9)
    yield _idle(results.cell("dict", 4))
