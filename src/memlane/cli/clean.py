"""`memlane clean`: what dead processes left, shown first and removed only with --yes.

Memlane's own segments are dead if nobody holds a lock on them, whatever their age and pids. Files
of other programs, and regions, whose files have no header, show no lock when nobody has them:
`inspect.foreign.files` decides when those count as unused. A name is dead if nobody answers at its
socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from memlane import _native
from memlane._doors.folder import Folder
from memlane.cli import writing
from memlane.errors import InvalidArgument
from memlane.inspect import leftovers
from memlane.inspect.foreign import files
from memlane.inspect.segment import FOLDER

_COLUMNS = [("LEFTOVER", "left"), ("KIND", "left"), ("BYTES", "right")]
_REGIONS = [kind for kind in files.KINDS if kind.is_region]


def run(names: Sequence[str], removes: bool, with_foreign: bool, as_json: bool) -> None:
    """`names`: only these files, of engines.

    Raises:
        InvalidArgument: they are none.
    """
    if names and not with_foreign:
        raise InvalidArgument("names are those of engines' files: add --foreign")
    own = [] if names else [one for one in leftovers() if one.kind != "region"]
    asked = [name.removeprefix(f"{FOLDER}/") for name in names] or None
    unused, kept = files.unused(asked, kinds=files.KINDS if with_foreign else _REGIONS)
    if not with_foreign:
        kept = []  # regions of living engines
    folder = None if names else Folder.existing()
    dead = [name for name, pid in folder.names().items() if pid is None] if folder else []
    removed: list[str] = []
    if removes:
        if folder is not None:
            removed += folder.remove_dead()
        gone, more = files.remove(unused)
        swept = [] if names else _native.sweep_dead_segments()
        removed += [*swept, *(one.name for one in gone)]
        kept += more
    regions = [one for one in unused if one.kind.is_region]
    foreign = [one for one in unused if not one.kind.is_region]
    if as_json:
        writing.print_json(
            {
                "leftovers": [
                    *({"name": one.name, "bytes": one.used} for one in own),
                    *({"name": one.name, "bytes": one.used} for one in regions),
                ],
                "foreign": [_as_json(one) for one in foreign],
                "names": dead,
                "kept": [asdict(one) for one in kept],
                "removed": removed,
            }
        )
        return
    console = writing.console()
    rows = [
        *([writing.short_name(one.name), one.kind, writing.nbytes(one.used)] for one in own),
        *([one.name, "region", writing.nbytes(one.used)] for one in regions),
        *([one.name, "foreign", writing.nbytes(one.used)] for one in foreign),
        *([name, "name", ""] for name in dead),
    ]
    if rows:
        console.print(writing.table(_COLUMNS, rows, console.width))
    else:
        console.print("nothing was left by dead processes")
    writing.print_lines(console, (f"kept {one.name}: {one.reason}" for one in kept))
    if removes:
        console.print(f"removed {len(removed)}")
    elif rows:
        console.print("`memlane clean --yes` removes these")


def _as_json(file: files.Unused) -> dict[str, Any]:
    made = asdict(file)
    del made["kind"], made["is_named"]
    return made
