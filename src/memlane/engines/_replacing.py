"""Names of an engine, replaced wherever a module that is loaded has copied them: all or none.

Knows nothing of any engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Replacement:
    """`by` takes the place of `module.name`; a name with a dot is an attribute of a class."""

    module: str
    name: str
    by: object


def replace(replacements: Iterable[Replacement]) -> list[str]:
    """Replaces them all and tells each in a line; if one fails, the others are taken back.

    Modules that are imported later find the new object where the original was.
    """
    lines = []
    with ExitStack() as undo:
        for new in replacements:
            copies = []
            for where, holder, name, original in _holders(new):
                setattr(holder, name, new.by)
                undo.callback(setattr, holder, name, original)
                copies.append(where)
            others = sorted(set(copies) - {new.module})
            also = f", also in {', '.join(others)}" if others else ""
            lines.append(f"{new.module}.{new.name} is memlane's{also}")
        undo.pop_all()
    return lines


def _holders(new: Replacement) -> Iterator[tuple[str, object, str, object]]:
    """The module that has the original, under which name, and the original."""
    owner: object = import_module(new.module)
    *classes, name = new.name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    if classes:
        yield new.module, owner, name, original
        return
    for where, module in list(sys.modules.items()):
        # Only what lies there: a lazy module would import what it is asked for.
        for copy, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                yield where, module, copy, original
