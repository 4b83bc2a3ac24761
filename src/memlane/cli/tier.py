"""`memlane tier`: what the folders of disk tiers have, whether an engine has them open or not, and
the removal of blocks: by the engine's tier if it is open, else here."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from memlane._base.diagnosis import warn
from memlane._native import PairOutside, ask_owner
from memlane.cli import writing
from memlane.errors import InvalidArgument, MemlaneError, SystemFault, TimedOut, system_fault
from memlane.tiers.tier import Namespace

_HEADERS = ".headers"
_PATIENCE = 6.0  # seconds for the owner's answer; it waits four for its disk

_COLUMNS = [
    ("OPENER", "left"),
    ("NAMESPACE", "left"),
    ("BLOCKS", "right"),
    ("BYTES", "right"),
    ("OLDEST", "right"),
    ("NEWEST", "right"),
    ("LAST USE", "right"),
    ("HITS", "right"),
]


@dataclass(frozen=True)
class Stored:
    """The blocks of one namespace. Seconds since they were stored and used; None if that is
    unknown. Uses and hits of an open tier are as of the last minute."""

    namespace: str
    blocks: int
    bytes: int
    oldest: float | None
    newest: float | None
    last_use: float | None
    hits: int


@dataclass(frozen=True)
class Pair:
    """The files of one opener. `pid`: who has them open; 0 if that is unknown, None if nobody."""

    opener: str
    pid: int | None
    slots: int
    slot_bytes: int
    namespaces: list[Stored]


def run(paths: Sequence[Path], purged: str | None, clears: bool, as_json: bool) -> None:
    """Args:
        paths: folders; what can be done with one is done, whatever another refuses.
        purged: a namespace, as text or by its id, whose blocks are removed.
        clears: all blocks are removed.

    Raises:
        InvalidArgument: a folder is no disk tier's, or none has anything of that namespace.
        TimedOut: the process that has a tier open does not answer.
        MemlaneError: files cannot be read or changed.
    """
    failed: list[MemlaneError] = []
    found = _found(paths, failed)
    removed = 0
    if purged is not None or clears:
        name_space = None if purged is None else _id_of(purged)
        which = None if name_space is None else name_space.hex()
        each = [(path, pair) for path, pairs in found.items() for pair in pairs]
        having = [(path, pair) for path, pair in each if clears or _count(pair, which)]
        if not having and not failed:
            where = ", ".join(map(str, found))
            raise InvalidArgument(f"{where} has no blocks of the namespace {purged!r}")
        for path, pair in having:
            try:
                removed += _count(pair, which) if _remove(path, pair.opener, name_space) else 0
            except MemlaneError as error:
                failed.append(error)
        found = _found([*found], failed)
    if found:
        _show(found, None if purged is None and not clears else removed, as_json)
    if failed:
        raise failed[0]


def _found(paths: Sequence[Path], failed: list[MemlaneError]) -> dict[Path, list[Pair]]:
    """Returns what each folder has, and adds the errors of those that have nothing."""
    found = {}
    for path in paths:
        try:
            found[path] = pairs_in(path)
        except MemlaneError as error:
            failed.append(error)
    return found


def _show(found: dict[Path, list[Pair]], removed: int | None, as_json: bool) -> None:
    if as_json:
        folders = [
            {"path": os.fspath(path), "openers": [asdict(pair) for pair in pairs]}
            for path, pairs in found.items()
        ]
        writing.print_json({"removed": removed or 0, "folders": folders})
        return
    console = writing.console()
    for path, pairs in found.items():
        if len(found) > 1:
            writing.print_lines(console, [f"{path}:"])
        rows = [_row(pair, of) for pair in pairs for of in pair.namespaces]
        if rows:
            console.print(writing.table(_COLUMNS, rows, console.width))
        writing.print_lines(console, map(_line, pairs))
    if removed is not None:
        console.print(f"removed {removed}")


def pairs_in(path: Path) -> list[Pair]:
    """Returns what each opener's files have; those that are being made, or are gone, have nothing.
    Raises as `run`."""
    try:
        names = sorted(each.name for each in path.iterdir() if each.name.endswith(_HEADERS))
    except OSError as error:
        raise InvalidArgument(f"cannot list {path}: {error.strerror}") from None
    if not names:
        raise InvalidArgument(f"{path} is no folder of a disk tier: it has no *{_HEADERS}")
    pairs = []
    for name in names:
        try:
            pairs.append(_pair(path, name.removesuffix(_HEADERS)))
        except SystemFault as error:
            if error.errno not in (errno.EAGAIN, errno.ENOENT):
                raise
    return pairs


def _pair(path: Path, opener: str) -> Pair:
    pair = PairOutside(os.fspath(path / opener))
    now = time.time()

    def age(stored: int) -> float | None:
        return max(0.0, now - stored) if stored else None

    stored = [
        Stored(which.hex(), n, n * pair.slot_bytes, age(oldest), age(newest), age(last), hits)
        for which, n, oldest, newest, last, hits in pair.stored()
    ]
    return Pair(opener, pair.owner(), pair.slots, pair.slot_bytes, stored)


def _id_of(namespace: str) -> bytes:
    if re.fullmatch("[0-9a-f]{32}", namespace):
        return bytes.fromhex(namespace)
    return Namespace(namespace).id


def _count(pair: Pair, namespace: str | None) -> int:
    of = [each.blocks for each in pair.namespaces if namespace in (None, each.namespace)]
    return sum(of)


def _remove(path: Path, opener: str, name_space: bytes | None) -> bool:
    """Returns whether they are removed now, and not later."""
    pair = PairOutside(os.fspath(path / opener))
    if pair.remove(name_space):
        return True
    error = ask_owner(os.fspath(path), opener, name_space, _PATIENCE)
    if error is None and pair.remove(name_space):  # its owner has ended meanwhile
        return True
    owner = pair.owner()
    who = f"process {writing.process(owner)}" if owner else "its process"
    if error is None:
        why = "it is stopped, has another memlane, or its log says that it cannot watch the folder"
        raise TimedOut(f"{who} has {path}/{opener} open and did not answer: {why}", _PATIENCE)
    if error == errno.ETIMEDOUT:
        warn("the disk of %s/%s does not answer yet: %s removes blocks later", path, opener, who)
    elif error:
        raise system_fault(error, f"{who} could not remove blocks of {path}/{opener}")
    return not error


def _row(pair: Pair, of: Stored) -> list[str]:
    times = (of.oldest, of.newest, of.last_use)
    ages = ["" if age is None else writing.duration(age) for age in times]
    return [
        pair.opener,
        of.namespace,
        str(of.blocks),
        writing.nbytes(of.bytes),
        *ages,
        str(of.hits),
    ]


def _line(pair: Pair) -> str:
    used = sum(of.blocks for of in pair.namespaces)
    size = writing.nbytes(pair.slots * pair.slot_bytes)
    if pair.pid is None:
        state = "not open"
    else:
        state = f"open in {writing.process(pair.pid) if pair.pid else 'another process'}"
    each = writing.nbytes(pair.slot_bytes)
    return f"{pair.opener}: {used} of {pair.slots} blocks of {each}, {size} in all, {state}"
