"""The API reference is complete: every public name is in it, with a docstring that suffices."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import memlane
from memlane import errors, testing, tiers
from memlane import inspect as looking
from memlane.groups import TcpGroup
from tests.docs.manual import ROOT
from tests.support import PATIENCE

API = sorted((ROOT / "docs/reference/api").glob("*.md"))
NAMED = [getattr(memlane, name) for name in memlane.__all__ if name != "__version__"]
HELPERS = [getattr(testing, name) for name in testing.__all__]
HELPERS += [getattr(looking, name) for name in looking.__all__]
HELPERS += [getattr(tiers, name) for name in tiers.__all__]

# What a parameter's name says of its unit, and the words by which a docstring says it.
UNITS = {
    r"timeout|liveness|^after$": r"\bseconds?\b|\bs\b",
    r"bytes|_size$|^size$": r"\bbytes?\b|\bMiB\b|\bsize\b",
}
# Nobody but memlane makes these: errors, named tuples, and tickets.
DATA = [
    thing for thing in NAMED if inspect.isclass(thing) and issubclass(thing, (Exception, tuple))
]
DATA.append(tiers.Ticket)
# Methods that raise nothing of their own: `Closed` and `WrongProcess` at most, as any call.
SILENT = {"Handle.to_json", "Ticket"}


def test_every_public_name_has_a_place() -> None:
    """The pages of the API reference name everything that can be imported; docs/conf.py adds the
    errors."""
    shown = set(re.findall(r"auto\w+:: ([\w.]+)", "".join(page.read_text() for page in API)))
    wanted = {f"memlane.{name}" for name in memlane.__all__ if name != "__version__"}
    wanted |= {f"memlane.testing.{name}" for name in set(testing.__all__) - set(looking.__all__)}
    wanted |= {f"memlane.inspect.{name}" for name in looking.__all__}
    wanted |= {f"memlane.tiers.{name}" for name in tiers.__all__}
    assert not wanted - shown - {f"memlane.{name}" for name in vars(errors)}


def _documented() -> Iterator[tuple[str, Any]]:
    for thing in [*NAMED, *HELPERS, TcpGroup]:
        yield thing.__qualname__, thing
        if inspect.isclass(thing) and not issubclass(thing, BaseException):
            for name, member in inspect.getmembers(thing):
                is_call = callable(member) or isinstance(member, property)
                is_own = not hasattr(tuple, name) and not inspect.isclass(member)
                if is_call and is_own and not name.startswith("_"):
                    yield f"{thing.__qualname__}.{name}", member


DOCUMENTED = dict(_documented())


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_public_docstring_names_errors_and_units(name: str) -> None:
    """It exists, says which errors a call raises, and in which units its arguments are."""
    thing = DOCUMENTED[name]
    text = inspect.getdoc(thing) or ""
    assert text.split(), f"{name} has no docstring"
    if not callable(thing) or thing in DATA:
        return
    parameters = list(inspect.signature(thing).parameters)
    for pattern, unit in UNITS.items():
        for parameter in parameters:
            if re.search(pattern, parameter):
                assert re.search(unit, text), f"{name} does not say the unit of {parameter}"


def _raises(name: str) -> bool:
    """Returns whether a call of this can raise an error of its own, judging by its source."""
    thing = DOCUMENTED[name]
    return name not in SILENT and callable(thing) and not inspect.isclass(thing)


@pytest.mark.parametrize("name", [name for name in DOCUMENTED if _raises(name)])
def test_docstring_names_errors(name: str) -> None:
    """Every call says what it raises, or that it raises as another one does."""
    text = inspect.getdoc(DOCUMENTED[name]) or ""
    assert re.search(r"\b[Rr]aise|\bIdempotent|\bNever\b", text), f"{name}: which errors?"


# The classes that programs make; all others come from a call of one of these.
MADE = ("MessageQueue", "Gather", "ShmRingBuffer", "WorkerGroup", "SingleWriterShmObjectStorage")
MADE += ("SingleWriterShmRingBuffer", "MsgpackSerde", "SharedOffloadRegion", "TcpGroup")
PRELUDE = """
import secrets
from dataclasses import dataclass

from memlane import *
from memlane.groups import TcpGroup

"""


@pytest.mark.parametrize("name", MADE)
def test_the_example_of_a_class_runs(name: str, tmp_path: Path) -> None:
    """A class that programs make shows how, in lines that run after its imports."""
    text = inspect.getdoc(DOCUMENTED[name]) or ""
    (example,) = re.findall(r"^Example::\n\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    program = tmp_path / "example.py"
    program.write_text(PRELUDE + dedent(example))
    subprocess.run([sys.executable, program], check=True, timeout=PATIENCE)
