"""Names of an engine, replaced wherever a module that is loaded has copied them: all or none.

Knows nothing of any engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from functools import reduce
from importlib import import_module
from typing import NamedTuple


class Replacement(NamedTuple):
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
        for module, path, by in replacements:
            *classes, name = path.split(".")
            owner = reduce(getattr, classes, import_module(module))
            original = getattr(owner, name)
            copies = set()
            for where, holder in ((module, owner), *sys.modules.items()):
                # Only what lies there: a lazy module would import what it is asked for.
                for copy, value in list(getattr(holder, "__dict__", {}).items()):
                    if value is original:
                        setattr(holder, copy, by)
                        undo.callback(setattr, holder, copy, original)
                        copies.add(where)
            others = ", ".join(sorted(copies - {module}))
            lines.append(f"{module}.{path} is memlane's" + (others and f", also in {others}"))
        undo.pop_all()
    return lines
