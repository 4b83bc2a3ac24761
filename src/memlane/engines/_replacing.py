"""Replaces names of an engine in every loaded module that has copied them: all or none.

Independent of any particular engine.
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
    """Replaces all and returns a log line for each; if one fails, undoes the others.

    Modules that are imported later find the new object in place of the original.
    """
    lines = []
    with ExitStack() as undo:
        for module, path, by in replacements:
            *classes, name = path.split(".")
            owner = reduce(getattr, classes, import_module(module))
            original = getattr(owner, name)
            copies = set()
            for where, holder in ((module, owner), *sys.modules.items()):
                # Not getattr: a lazy module would import what it is asked for.
                for copy, value in list(getattr(holder, "__dict__", {}).items()):
                    if value is original:
                        setattr(holder, copy, by)
                        undo.callback(setattr, holder, copy, original)
                        copies.add(where)
            others = ", ".join(sorted(copies - {module}))
            lines.append(f"{module}.{path} is memlane's" + (others and f", also in {others}"))
        undo.pop_all()
    return lines
