"""`memlane doctor` on made-up machines, and on this one."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memlane.cli import doctor
from memlane.cli.doctor import Machine, exit_code, judge, lines, look, report
from tests.support import PATIENCE

pytestmark = pytest.mark.unit

GIB = 1 << 30
GOOD = Machine(
    shm_total=8 * GIB,
    shm_free=8 * GIB,
    shm_type="tmpfs",
    shm_read_only=False,
    shm_writable=True,
    shm_listed=True,
    tmpfile=True,
    memory_limit=None,
    memlock=None,
    file_size=None,
    files=65536,
    populate_write=True,
    futex_waitv=True,
    io_uring=True,
    pidfd_open=True,
    pagemap=True,
    shmem_huge="advise",
    huge_free=0,
    nodes=1,
    can_trace=True,
    yama=0,
    proc=True,
    proc_hidden=False,
    own_pids=False,
    cuda=False,
    versions={"typer": "1", "rich": "1", "py-spy": "1"},
    releases={"vllm": ("0.33.0", True)},
)


def test_nothing_hurts_on_a_good_machine() -> None:
    findings = judge(GOOD)
    assert {finding.level for finding in findings} == {"ok"}
    assert not any(finding.cure for finding in findings)
    assert exit_code(findings) == 0


@pytest.mark.parametrize(
    ("change", "topic", "level", "words"),
    [
        ({"shm_total": None}, "/dev/shm", "hurts", "missing"),
        ({"shm_total": 64 << 20, "shm_free": 64 << 20}, "/dev/shm", "hurts", "64 MiB"),
        ({"shm_free": 1 << 20}, "/dev/shm", "hurts", "nearly full"),
        ({"shm_type": "ext2/ext3/ext4"}, "/dev/shm", "hurts", "on a disk"),
        ({"shm_type": "0x1234"}, "/dev/shm", "hurts", "0x1234"),
        ({"shm_type": None}, "/dev/shm", "ok", "8.0 GiB"),
        ({"file_size": 1 << 20}, "file size", "hurts", "1 MiB"),
        ({"file_size": 100 * GIB}, "file size", "note", "100.0 GiB"),
        ({"pidfd_open": False}, "pidfd_open", "note", "--ends-with"),
        ({"shm_listed": False}, "leftovers", "hurts", "cannot be listed"),
        ({"tmpfile": False}, "O_TMPFILE", "hurts", "no segment"),
        ({"memory_limit": 4 * GIB}, "memory limit", "note", "before /dev/shm is full"),
        ({"memory_limit": 16 * GIB}, "memory limit", "ok", "16.0 GiB"),
        ({"memlock": 8 << 20, "cuda": True}, "memlock", "note", "8 MiB"),
        ({"files": 1024}, "nofile", "note", "1024"),
        ({"populate_write": False}, "MADV_POPULATE_WRITE", "note", "5.14"),
        ({"pagemap": False}, "pagemap", "note", "copied"),
        ({"io_uring": False}, "system calls", "note", "io_uring"),
        ({"shmem_huge": "deny"}, "huge pages", "note", "deny"),
        ({"nodes": 2}, "NUMA", "note", "2 nodes"),
        ({"can_trace": False, "yama": 1}, "ptrace", "note", "ptrace_scope is 1"),
        ({"proc": False}, "/proc", "hurts", "is not mounted"),
        ({"proc_hidden": True}, "/proc", "note", "hides"),
        ({"own_pids": True}, "/proc", "note", "container"),
        ({"releases": {"vllm": ("0.40.0", False)}}, "vllm", "note", "MEMLANE_VLLM"),
        ({"versions": {}}, "command line", "note", "not installed"),
    ],
)
def test_each_finding_follows_from_one_fact(
    change: dict[str, Any], topic: str, level: str, words: str
) -> None:
    """One fact differs, and one finding does; what hurts comes first, with its cure."""
    findings = judge(replace(GOOD, **change))
    (finding,) = [one for one in findings if one.topic == topic]
    assert finding.level == level
    assert words in finding.text
    assert [one for one in findings if one.level != "ok"] == ([] if level == "ok" else [finding])
    assert exit_code(findings) == int(level == "hurts")
    if level == "hurts":
        assert finding.cure
        assert lines(findings)[:2] == [f"hurts {topic}: {finding.text}", f"      {finding.cure}"]


@pytest.mark.parametrize(
    ("change", "words", "cure"),
    [
        ({"shm_total": None}, "missing", "mount -t tmpfs"),
        ({"shm_read_only": True}, "read-only", "remount,rw"),
        ({"shm_writable": False}, "this user may not create files", "chmod 1777"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_finding(
    change: dict[str, Any], words: str, cure: str
) -> None:
    """Its consequences are not findings of their own: nothing is mounted over a folder that is
    there."""
    findings = judge(replace(GOOD, tmpfile=False, shm_listed=False, **change))
    (finding,) = [one for one in findings if one.level != "ok"]
    assert finding.topic == "/dev/shm"
    assert words in finding.text
    assert cure in finding.cure


def test_a_folder_on_a_disk_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_FOLDER", "/proc")  # on any machine, and no tmpfs
    assert look().shm_type == "proc"
    monkeypatch.setattr(doctor, "_FOLDER", str(tmp_path / "none"))
    assert (look().shm_type, look().shm_total) == (None, None)


def test_limits_of_this_process_are_seen() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        "from memlane.cli.doctor import look; print(look().file_size)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{1 << 20}\n", "")


def test_this_machine_has_no_surprising_findings() -> None:
    """Facts that every machine which runs these tests has."""
    machine = look()
    assert machine.shm_total is not None
    assert machine.shm_type == "tmpfs"
    assert machine.shm_usable
    assert machine.proc
    assert machine.file_size is None
    assert machine.tmpfile
    assert machine.files > 0
    assert {"python", "kernel", "memlane", "layout", "numpy"} <= set(report().versions)


def test_it_runs_on_the_standard_library() -> None:
    """Also where the extra of the command line is missing."""
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('typer', 'rich', 'py_spy')));"
        "sys.argv[1:] = ['doctor']; from memlane.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode in (0, 1), done.stderr
    assert "/dev/shm" in done.stdout
