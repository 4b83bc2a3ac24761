"""The tables of the reference say what the code says."""

from __future__ import annotations

import builtins
import inspect
import re
from typing import Any

import pytest

import memlane
from memlane import errors, tiers
from memlane.broadcast import handle
from memlane.broadcast.protocol import frames
from memlane.groups import TcpGroup
from memlane.store import _wire
from memlane.store import handle as store_handle
from tests.docs.manual import ROOT, tables
from tests.docs.promises import TESTS
from tests.support.seccomp import CALLS

ERRORS = ROOT / "docs/reference/errors.md"
OPTIONS = ROOT / "docs/reference/options.md"
GUARANTEES = ROOT / "docs/guarantees.md"
VERSIONS = ROOT / "docs/reference/versions.md"
SYSTEMS = ROOT / "docs/reference/systems.md"
# The page of guarantees: headings of its tables of calls, and their columns.
GROUPS_OF_CALLS = ("Queues", "Stores and regions", "Tiers")
ENDS = ("interrupted", "timed out", "cancelled", "death")


def test_every_error_is_in_the_table() -> None:
    """Each has one row that names its builtin exceptions, may be retried or not, and says what
    happened to the message."""
    rows = [row for group in tables(ERRORS).values() for row in group]
    assert all(len(row) == 4 and all(row) for row in rows)
    shown = {row[0].split("`")[1]: set(re.findall(r"`(\w+)`", row[0])[1:]) for row in rows}
    assert len(shown) == len(rows)
    known = {
        name: _builtins_of(kind)
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.MemlaneError)
        if kind is not errors.MemlaneError
    }
    assert shown == known


def _builtins_of(kind: type) -> set[str]:
    """The builtin exceptions by which an error can be caught, without the bases of others."""
    found = [base for base in kind.__mro__ if vars(builtins).get(base.__name__) is base]
    return {
        base.__name__
        for base in found
        if not any(other is not base and issubclass(other, base) for other in found)
        or (base is OSError and issubclass(kind, errors.SystemFault))
    }


_TIERS = {name for name in tiers.__all__ if re.search(r"\wTier$|Pool$|Array$|Chain$", name)}


def _constructors() -> dict[str, Any]:
    from memlane import MessageQueue

    return {
        "MessageQueue": MessageQueue,
        "MessageQueue.create_from_handle": MessageQueue.create_from_handle,
        "MessageQueue.open": MessageQueue.open,
        "MessageQueue.create_from_process_group": MessageQueue.create_from_process_group,
        "ShmRingBuffer": memlane.ShmRingBuffer,
        "SingleWriterShmRingBuffer": memlane.SingleWriterShmRingBuffer,
        "SingleWriterShmObjectStorage": memlane.SingleWriterShmObjectStorage,
        "SharedOffloadRegion": memlane.SharedOffloadRegion,
        "copy_blocks": memlane.copy_blocks,
        "memlane.groups.TcpGroup": TcpGroup,
        "Gather": memlane.Gather,
        "WorkerGroup": memlane.WorkerGroup,
        **{f"memlane.tiers.{name}": getattr(tiers, name) for name in sorted(_TIERS)},
    }


@pytest.mark.parametrize("name", _constructors())
def test_every_parameter_is_explained(name: str) -> None:
    """By the docstring of its class or constructor."""
    kind = _constructors()[name]
    text = f"{inspect.getdoc(kind)} {inspect.getdoc(kind.__init__)}"
    assert not [
        parameter
        for parameter in inspect.signature(kind).parameters
        if not re.search(rf"\b{parameter}\b", text)
    ]


@pytest.mark.parametrize("name", tables(OPTIONS).keys() - {"Environment variables"})
def test_options_have_the_defaults_of_the_table(name: str) -> None:
    """Those of the heading's class, or of the one that the row names."""
    for option, *of, default, _ in tables(OPTIONS)[name]:
        kind = f"memlane.tiers.{of[0].strip('`')}" if of else name
        parameter = inspect.signature(_constructors()[kind]).parameters[option.strip("`")]
        assert _default_of(parameter) == default.strip("`")


def _default_of(parameter: inspect.Parameter) -> str:
    if isinstance(parameter.default, type):
        return parameter.default.__name__
    if callable(parameter.default):
        return "no changes"
    return repr(parameter.default)


def test_versions_are_those_of_the_code() -> None:
    """The version numbers are the code's."""
    layout = (ROOT / "native/core/layout.hpp").read_text()
    major, minor = re.findall(r"kLayoutM\w+ = (\d+);", layout)
    assert [row[1] for row in tables(VERSIONS)["Versions and rolling upgrades"]][:6] == [
        f"{major}.{minor}",
        "none",
        str(handle.FORMAT_VERSION),
        str(frames.VERSION),
        str(store_handle.FORMAT_VERSION),
        str(_wire.MAGIC[-1]),
    ]


def test_every_promise_of_a_call_has_its_test() -> None:
    """The named test exists; a cell without one says why the call has no such end."""
    pages = tables(GUARANTEES)
    reasons = {"no timeout", "not awaited", "no other end"}
    promised: dict[str, set[str]] = {}
    for row in (row for name in GROUPS_OF_CALLS for row in pages[name]):
        cells = zip(ENDS, (cell.strip(" |") for cell in row[1:]), strict=True)
        promised[row[0]] = {end for end, cell in cells if cell not in reasons}
    assert promised == {call: set(ends) for call, ends in TESTS.items()}
    for shown in (test for ends in TESTS.values() for tests in ends.values() for test in tests):
        file, _, test = shown.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"there is no {shown}"


def test_every_refused_system_call_is_on_the_page() -> None:
    """Those that tests/base/test_refused_system_calls.py refuses: in the table if something
    changes, else in the sentence behind it."""
    rows = [row[0].strip("`") for row in tables(SYSTEMS)["System calls"]]
    harmless = re.search(
        r"^Everything works where .*?: (.*?)\.\n\n", SYSTEMS.read_text(), re.M | re.S
    )
    assert harmless
    assert sorted([*rows, *re.findall(r"`(\w+)`", harmless[1])]) == sorted(CALLS)
