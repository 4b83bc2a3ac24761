"""The promises, each checked against figures of the same run."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.bars import Bar, against, missing
from benchmarks.results import Results
from memlane.cli.bench.measure import CellResult

MINE = "memlane"
FLOOR = ["memcpy"]
LMDB = ["lmdb", "lmdb, our serde"]
RAY = ["ray"]


def _at_most(promise: str, cell: CellResult | None, measure: str, most: float) -> Bar:
    mine = cell.peers[MINE].median(measure) if cell and MINE in cell.peers else None
    return missing(promise) if mine is None else Bar(promise, f"{mine:.1f} us", mine <= most)


def bars(results: Results) -> Iterator[Bar]:
    """All promises, for each number of readers that was measured."""
    for readers in sorted({cell.readers for cell in results.cells}):
        yield from _of(results, readers)


def _of(results: Results, readers: int) -> Iterator[Bar]:
    one, eight = results.cell("array-1m", readers), results.cell("array-8m", readers)
    n = f"N={readers}"
    yield against(f"put 1 MiB, {n}: <= 1.3 x memcpy", one, "put_us", MINE, FLOOR, 1.3)
    yield against(f"put 1 MiB, {n}: below lmdb", one, "put_us", MINE, LMDB, 1)
    yield against(f"put 8 MiB, {n}: <= 1.1 x memcpy", eight, "put_us", MINE, FLOOR, 1.1)
    for size, cell in (("1 MiB", one), ("8 MiB", eight)):
        yield _at_most(f"view {size}, {n}: <= 10 us", cell, "view_us", 10)
        yield against(f"view {size}, {n}: below lmdb", cell, "view_us", MINE, LMDB, 1)
        yield against(f"view {size}, {n}: below ray", cell, "view_us", MINE, RAY, 1)
        yield against(f"get {size}, {n}: <= 1.3 x memcpy", cell, "get_us", MINE, FLOOR, 1.3)
    tensors = results.cell("tensors", readers)
    yield _at_most(f"view 5 tensors (copies), {n}: <= 60 us", tensors, "view_us", 60)
