"""`memlane clean`: what dead processes left, shown first and removed only with --yes.

Memlane's own segments are dead if nobody holds a lock on them, whatever their age and pids. Files
of other programs have no such lock: `inspect.foreign.files` decides when those count as unused.
"""

from __future__ import annotations

from dataclasses import asdict

from memlane import _native
from memlane.cli import show
from memlane.inspect import leftovers
from memlane.inspect.foreign import files

_COLUMNS = [("LEFTOVER", "left"), ("KIND", "left"), ("BYTES", "right")]


def run(removes: bool, with_foreign: bool, as_json: bool) -> None:
    own = leftovers()
    unused, kept = files.unused() if with_foreign else ([], [])
    removed: list[str] = []
    if removes:
        gone, more = files.remove(unused)
        removed = [*_native.sweep_dead_segments(), *(one.name for one in gone)]
        kept += more
    if as_json:
        show.print_json(
            {
                "leftovers": [{"name": one.name, "bytes": one.used} for one in own],
                "foreign": [asdict(one) for one in unused],
                "kept": [asdict(one) for one in kept],
                "removed": removed,
            }
        )
        return
    console = show.console()
    rows = [
        *([show.short_name(one.name), one.kind, show.nbytes(one.used)] for one in own),
        *([one.name, "foreign", show.nbytes(one.used)] for one in unused),
    ]
    if rows:
        console.print(show.table(_COLUMNS, rows, console.width))
    else:
        console.print("nothing was left by dead processes")
    for one in kept:
        console.print(f"kept {one.name}: {one.reason}")
    if removes:
        console.print(f"removed {len(removed)}")
    elif rows:
        console.print("`memlane clean --yes` removes these")
