"""`memlane tier` on the folder of a disk tier: stopped, open in this process, and open in one that
does not answer."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from memlane import InvalidArgument, TimedOut
from memlane.cli import tier as command
from memlane.tiers import DiskTier
from memlane.tiers.conformance import content, key, wait_for
from memlane.tiers.tier import Namespace
from tests.cli.test_command_line import found, run
from tests.support import PATIENCE, until
from tests.support.disk_tiers import tier_on

ROW = 4096
pytestmark = pytest.mark.usefixtures("commands")


def stored(tier: DiskTier, rows: Any, *numbers: int) -> DiskTier:
    for number in numbers:
        rows[0] = content(number, ROW)
        assert wait_for(tier, tier.store([key(number)], [0])).ok.all()
    return tier


def there(tier: DiskTier) -> list[int]:
    has = tier.has([key(number) for number in range(20)])
    return [number for number in range(20) if has[number]]


def blocks(folder: Path) -> dict[str, int]:
    """The blocks of each namespace."""
    (pair,) = command.pairs_in(folder)
    return {each.namespace: each.blocks for each in pair.namespaces}


def purge(folder: Path, namespace: str) -> None:
    command.run([folder], namespace, False, True)


def clear(folder: Path) -> None:
    command.run([folder], None, True, True)


def locked(file: IO[bytes]) -> None:
    """As a process does that has the tier open."""
    whole = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, whole)


def name(namespace: str) -> str:
    return Namespace(namespace).id.hex()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's threads wait for their turn on a busy machine."""
    monkeypatch.setattr(command, "_PATIENCE", PATIENCE)


@pytest.fixture
def rows() -> Any:
    return np.zeros((2, ROW), np.uint8)


@pytest.fixture
def folder(tmp_path: Path, rows: Any) -> Path:
    """The folder of a tier with blocks 0 to 2 of model a, and 3 of model b."""
    for namespace, numbers in (("a", range(3)), ("b", [3])):
        with tier_on(tmp_path / "kv", rows, capacity=10, namespace=namespace) as tier:
            stored(tier, rows, *numbers)
    return tmp_path / "kv"


@pytest.fixture
def opened(folder: Path, rows: Any) -> Iterator[DiskTier]:
    """Opens the tier of model a."""
    with tier_on(folder, rows, capacity=10, namespace="a") as tier:
        yield tier


def test_a_stopped_tier_is_shown(folder: Path) -> None:
    seen = found("tier", str(folder))
    ((path, (pair,)),) = [each.values() for each in seen["folders"]]
    assert (path, seen["removed"]) == (str(folder), 0)
    (a, b) = sorted(pair.pop("namespaces"), key=lambda each: -each["blocks"])
    assert pair == {"opener": "0", "pid": None, "slots": 10, "slot_bytes": ROW}
    assert (a["namespace"], a["blocks"], a["bytes"]) == (name("a"), 3, 3 * ROW)
    assert (b["namespace"], b["blocks"], b["bytes"]) == (name("b"), 1, ROW)
    assert a["oldest"] >= a["newest"] >= 0
    shown = run("tier", str(folder)).stdout
    assert "0: 4 of 10 blocks of 4.0K, 40K in all, not open" in shown
    assert name("a") in shown


def test_an_open_tier_can_be_shown(folder: Path, opened: DiskTier, rows: Any) -> None:
    stored(opened, rows, 7)
    assert blocks(folder) == {name("a"): 4, name("b"): 1}
    assert [pair.pid for pair in command.pairs_in(folder)] == [os.getpid()]


@pytest.mark.parametrize("purged", ["a", name("a")])
def test_a_namespace_is_purged_offline(folder: Path, rows: Any, purged: str) -> None:
    purge(folder, purged)
    assert blocks(folder) == {name("b"): 1}
    with tier_on(folder, rows, capacity=10, namespace="b") as tier:
        assert there(tier) == [3]


def test_what_a_tier_has_added_meanwhile_is_removed_too(folder: Path, rows: Any) -> None:
    """The files had fewer slots when they were looked at first."""
    pair = command.PairOutside(os.fspath(folder / "0"))
    with tier_on(folder, rows, capacity=40, namespace="a") as tier:
        stored(tier, rows, *range(30))
    assert pair.remove(bytes.fromhex(name("a")))
    assert name("a") not in blocks(folder)


def test_all_is_cleared_offline(folder: Path, rows: Any) -> None:
    assert found("tier", str(folder), "--clear")["removed"] == 4
    assert blocks(folder) == {}
    with tier_on(folder, rows, capacity=10, namespace="a") as tier:
        assert there(tier) == []
        assert blocks(folder) == {}
        stored(tier, rows, 5)
        assert blocks(folder) == {name("a"): 1}


@pytest.mark.parametrize("is_purge", [True, False])
def test_an_engine_that_calls_nothing_removes_them(
    folder: Path, opened: DiskTier, rows: Any, is_purge: bool
) -> None:
    """Its own thread does, before the command ends; the tier goes on."""
    before = {each.name for each in folder.iterdir()}
    purge(folder, "a") if is_purge else clear(folder)
    until(lambda: blocks(folder) == ({name("b"): 1} if is_purge else {}))
    assert {each.name for each in folder.iterdir()} == before
    assert there(opened) == []
    assert not wait_for(opened, opened.load([key(0)], [1])).ok.any()
    stored(opened, rows, 1, 8)
    assert there(opened) == [1, 8]
    opened.close()
    with tier_on(folder, rows, capacity=10, namespace="a") as tier:
        assert there(tier) == [1, 8]


def test_another_namespace_of_an_open_tier_can_be_shown(folder: Path, opened: DiskTier) -> None:
    purge(folder, "b")
    until(lambda: blocks(folder) == {name("a"): 3})
    assert there(opened) == [0, 1, 2]


@pytest.mark.parametrize("begun", [b"", bytes(4096)])
def test_a_tier_that_is_being_made_beside_it(folder: Path, begun: bytes) -> None:
    """Has nothing yet, and stops nothing."""
    (folder / "1.headers").write_bytes(begun)
    assert [pair.opener for pair in command.pairs_in(folder)] == ["0"]
    clear(folder)
    assert blocks(folder) == {}


def test_what_is_removed_later_is_not_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The owner's disk does not answer in time."""
    monkeypatch.setattr(command, "ask_owner", lambda *_: errno.ETIMEDOUT)
    with open(folder / "0.headers", "r+b") as file:
        locked(file)
        clear(folder)
    assert json.loads(capsys.readouterr().out)["removed"] == 0


def test_a_tier_that_was_moved_is_asked_there(
    folder: Path, opened: DiskTier, tmp_path: Path
) -> None:
    folder.rename(tmp_path / "other")
    purge(tmp_path / "other", "a")
    assert there(opened) == []


def test_several_folders_are_shown_together(folder: Path, rows: Any, tmp_path: Path) -> None:
    """In the folders of a `DiskArray` a namespace need not be in each, and one that is gone stops
    no other."""
    other = tmp_path / "other"
    with tier_on(other, rows, capacity=10, namespace="a") as tier:
        stored(tier, rows, 5)
    shown = run("tier", str(folder), str(other)).stdout
    assert shown.index(f"{folder}:\n") < shown.index("4 of 10 blocks") < shown.index(f"{other}:\n")
    assert shown.index(f"{other}:\n") < shown.index("1 of 10 blocks")
    done = run("tier", str(folder), str(tmp_path / "gone"), str(other), "--purge", "a", "--json")
    assert done.returncode == 2
    assert f"cannot list {tmp_path}/gone" in done.stderr
    assert json.loads(done.stdout)["removed"] == 4
    assert (blocks(folder), blocks(other)) == ({name("b"): 1}, {})
    assert found("tier", str(folder), str(other), "--purge", "b")["removed"] == 1
    done = run("tier", str(folder), str(other), "--purge", "b")
    assert f"{folder}, {other} has no blocks of the namespace 'b'" in done.stderr


def test_what_it_refuses(folder: Path, tmp_path: Path) -> None:
    done = run("tier", str(folder), "--purge", "a", "--clear")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--purge or --clear" in done.stderr
    with pytest.raises(InvalidArgument, match="No such file"):
        clear(tmp_path / "nowhere")
    with pytest.raises(InvalidArgument, match="no folder of a disk tier"):
        clear(tmp_path)
    with pytest.raises(InvalidArgument, match="no blocks of the namespace 'c'"):
        purge(folder, "c")
    (folder / "0.headers").write_bytes(b"x" * 9000)
    done = run("tier", str(folder))
    assert done.returncode == 4
    assert "is no disk tier's" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_owner_that_does_not_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is removed, and the error names what may be wrong."""
    monkeypatch.setattr(command, "_PATIENCE", 0.05)
    with open(folder / "0.headers", "r+b") as file:
        locked(file)  # and nobody watches the folder
        with pytest.raises(TimedOut, match="did not answer"):
            clear(folder)
    assert blocks(folder) == {name("a"): 3, name("b"): 1}
    assert {each.name for each in folder.iterdir()} == {"0.headers", "0.data", "0.uses"}


@pytest.mark.parametrize("how", ["a file", "the folder", "moved"])
def test_files_that_are_gone_are_noticed(
    folder: Path,
    opened: DiskTier,
    rows: Any,
    how: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line of the log; the tier goes on with what it has."""
    assert not opened.statistics().detached
    if how == "moved":
        folder.rename(tmp_path / "other")
    elif how == "a file":
        (folder / "0.data").unlink()
    else:
        shutil.rmtree(folder)
    until(lambda: opened.statistics().detached)
    stored(opened, rows, 9)
    assert wait_for(opened, opened.load([key(0)], [1])).ok.all()
    said = [each.getMessage() for each in caplog.records if "deleted or moved" in each.getMessage()]
    assert len(said) == 1
    assert str(folder) in said[0]
