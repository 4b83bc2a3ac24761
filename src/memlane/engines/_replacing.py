"""Replaces names of an engine in every loaded module that has copied them: all or none.

Independent of any particular engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import reduce
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, NamedTuple


class Unfit(Exception):
    """A name is gone, or is called with arguments that its replacement does not take."""


class Replacement(NamedTuple):
    """`by` takes the place of `module.name`; a name with a dot is an attribute of a class."""

    module: str
    name: str
    by: Any

    def found(self) -> tuple[Any, Any]:
        """Returns the module or class that has the name, and what it is there.

        Raises ImportError or AttributeError if it is gone.
        """
        *classes, name = self.name.split(".")
        owner = reduce(getattr, classes, import_module(self.module))
        return owner, getattr(owner, name)


def check(replacements: Iterable[Replacement]) -> None:
    """Raises `Unfit` if one of them would not serve the callers of what it replaces."""
    for each in replacements:
        path = f"{each.module}.{each.name}"
        try:
            _, original = each.found()
        except (ImportError, AttributeError) as error:
            raise Unfit(f"{path} is gone ({error})") from None
        for call, (theirs, ours) in _calls(original, each.by):
            taken = signature(ours).parameters
            if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in taken.values()):
                continue
            if unknown := [name for name in signature(theirs).parameters if name not in taken]:
                raise Unfit(f"{path}{call} takes {', '.join(unknown)}")


def _calls(
    original: Any, by: Any
) -> Iterator[tuple[str, tuple[Callable[..., Any], Callable[..., Any]]]]:
    """The constructor and the public methods that both classes have."""
    if isinstance(by, type):
        yield "", (original, by)
        for name in sorted(set(dir(by)) & set(dir(original))):
            both = getattr(original, name), getattr(by, name)
            if not name.startswith("_") and all(map(callable, both)):
                yield f".{name}", both


def replace(replacements: Iterable[Replacement]) -> list[str]:
    """Replaces all and returns a log line for each; if one fails, undoes the others.

    Modules that are imported later find the new object in place of the original.
    """
    lines = []
    with ExitStack() as undo:
        for each in replacements:
            module, path, by = each
            owner, original = each.found()
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
