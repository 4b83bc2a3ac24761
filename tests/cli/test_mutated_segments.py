"""Segments whose bytes are not what memlane wrote: every command reads them, and none fails.

``MEMLANE_SOAK_MUTATED`` is the number of rounds (default 8); each changes all segments once.
"""

import fcntl
import json
import os
import random
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from memlane import MessageQueue, SingleWriterShmObjectStorage, SingleWriterShmRingBuffer
from memlane.cli import export
from memlane.cli.app import app
from memlane.cli.top import View
from memlane.inspect import locks
from memlane.tiers import BlockPool
from memlane.tiers.conformance import content, key, wait_for
from tests.support import until
from tests.support.disk_tiers import tier_on
from tests.support.queues import path_of

ROUNDS = int(os.environ.get("MEMLANE_SOAK_MUTATED", "8"))
QUEUES, ROW = 6, 4096
REACHED = 4096  # bytes that a change may hit: the header, and what follows it
OWN = str(os.getpid())
COMMANDS = [
    *(["ls"], ["ls", "--json"], ["clean"], ["clean", "--json"], ["show", OWN, "--json"]),
    *(["stuck", "--after", "0", "--no-stacks", *more] for more in ([], ["--json"])),
]
ONCE = [["trace", OWN, "--seconds", "0.01", "-o"], ["doctor", "--json"]]


def nameless() -> dict[int, Path]:
    """The segments of this process that have no name, by inode: of pools and of network ends."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(link).startswith("/dev/shm/") and not os.stat(link).st_nlink:
                found[os.stat(link).st_ino] = Path(f"/proc/self/fd/{link.name}")
        except FileNotFoundError:  # the folder's own
            continue
    return found


@pytest.fixture
def paths() -> Iterator[list[Path]]:
    """Living segments, with their locks; their bytes are as they were at the end."""
    old = nameless()
    with ExitStack() as stack:
        found = []
        for _ in range(QUEUES):  # the name stays until the second reader comes
            writer = stack.enter_context(MessageQueue(2, 2, max_chunk_bytes=256, max_chunks=2))
            stack.enter_context(MessageQueue.create_from_handle(writer.export_handle(), 0))
            found.append(path_of(writer))
        ring = stack.enter_context(SingleWriterShmRingBuffer(1 << 12, create=True))
        stack.enter_context(SingleWriterShmObjectStorage(1 << 10, 2, ring))
        found.append(Path("/dev/shm", ring.handle()[1]))
        pool = BlockPool(4)
        remote = stack.enter_context(MessageQueue(1, 0, connect_ip="127.0.0.1"))
        until(lambda: len(nameless().keys() - old.keys()) == 2, "those of the pool and the queue")
        found += [path for inode, path in nameless().items() if inode not in old]
        before = {path: path.read_bytes() for path in found}
        yield found
        for path, data in before.items():
            write(path, data)
        del pool, remote


def write(path: Path, data: bytes) -> None:
    """In place: the file stays the one that is mapped."""
    with path.open("r+b") as file:
        file.write(data)


def changed(data: bytes, choice: random.Random) -> bytes:
    """Some bytes, words or runs are others."""
    made = bytearray(data)
    start = made.index(b"MEMLANE1")
    for _ in range(choice.choice((1, 2, 8, 64))):
        at = start + choice.randrange(8, min(REACHED, len(made) - start) - 8)
        new = choice.choice(
            (
                choice.randbytes(1),
                choice.randbytes(8),
                b"\xff" * 8,
                b"\0" * 8,
                b"\x7f" + b"\xff" * 7,
            )
        )
        made[at : at + len(new)] = new
    return bytes(made)


class Locks:
    """A region's file with locks that are nearly a region's: numbers, holders, a slot's."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def change(self, choice: random.Random) -> None:
        """Other locks than before, and another size."""
        os.close(self._file)
        self._file = os.open(self.path, os.O_RDWR)
        os.ftruncate(self._file, choice.choice((0, 1, 4096, 1 << 20, 1 << 40)))
        for field in range(4):
            start, length = locks._NUMBERS + field * locks._NUMBER_SPAN, self._number(choice)
            if choice.random() < 0.9:
                self._lock(start, min(length, locks._NUMBER_SPAN - 1))
        for place in range(choice.choice((0, 1, 100))):
            start = locks._MEMBERS + (choice.randrange(1 << 16) if place else 0) * locks._PID_SPAN
            self._lock(start, choice.choice((1, os.getpid(), locks._PID_SPAN)))
        if choice.random() < 0.5:
            self._lock(locks.LOCK_BASE + choice.randrange(4), 1)

    def _number(self, choice: random.Random) -> int:
        return choice.choice((1, 3, 4096, 1 << 40, locks._NUMBER_SPAN - 1))

    def _lock(self, start: int, length: int) -> None:
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, asked)

    def close(self) -> None:
        os.close(self._file)
        self.path.unlink()


@pytest.fixture
def region() -> Iterator[Locks]:
    made = Locks(Path(f"/dev/shm/vllm_offload_{os.getpid()}.mmap"))
    yield made
    made.close()


def test_every_command_reads_a_region_of_any_locks(region: Locks) -> None:
    choice, runner, view, source = dice(), CliRunner(), View(1.0), export.Source(None)
    try:
        for _ in range(ROUNDS):
            region.change(choice)
            for command in COMMANDS:
                done = runner.invoke(app, command)
                assert done.exit_code in (0, 1, 2, 3), (command, done.output, done.exception)
                assert isinstance(done.exception, SystemExit | None), (command, done.exception)
            assert view.draw(80, 24)
            assert source.as_json()["segments"]
            source.metrics()
    finally:
        source.close()


def test_tier_reads_files_of_any_bytes(tmp_path: Path) -> None:
    """It shows no more blocks than there are slots, or says in a line what is wrong."""
    rows = np.zeros((2, ROW), np.uint8)
    with tier_on(tmp_path, rows, 8) as tier:
        for number in range(4):
            rows[0] = content(number, ROW)
            assert wait_for(tier, tier.store([key(number)], [0])).ok.all()
    files = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    choice, runner = dice(), CliRunner()
    for _ in range(8 * ROUNDS):
        for path, data in files.items():
            made = bytearray(data)
            for _ in range(choice.choice((1, 4, 64))):
                at = choice.randrange(min(len(made), choice.choice((64, REACHED, 1 << 30))))
                new = choice.choice(
                    (choice.randbytes(1), choice.randbytes(8), b"\xff" * 8, b"\0" * 8)
                )
                made[at : at + len(new)] = new
            cut = choice.choice((len(data), len(data), choice.randrange(len(data) + 1)))
            path.write_bytes(made[:cut])
        for more in ([], ["--json"]):
            done = runner.invoke(app, ["tier", str(tmp_path), *more])
            assert done.exit_code in (0, 2, 4), (done.output, done.exception)
            assert isinstance(done.exception, SystemExit | None), done.exception
        if done.exit_code == 0:
            for opener in json.loads(done.stdout)["folders"][0]["openers"]:
                assert sum(each["blocks"] for each in opener["namespaces"]) <= opener["slots"]


def dice() -> random.Random:
    seed = int(os.environ.get("MEMLANE_SOAK_SEED", random.randrange(1 << 32)))
    print(f"MEMLANE_SOAK_SEED={seed}")
    return random.Random(seed)


def test_every_command_reads_them(paths: list[Path], tmp_path: Path) -> None:
    choice, runner = dice(), CliRunner()
    before = {path: path.read_bytes() for path in paths}
    source = export.Source(None)
    view = View(1.0)
    try:
        for number in range(ROUNDS):
            for path, data in before.items():
                write(path, changed(data, choice))
            more = [[*ONCE[0], str(tmp_path / "trace.json")], ONCE[1]] if not number else []
            for command in COMMANDS + more:
                done = runner.invoke(app, command)
                codes = (0, 1, 2, 3) if command in more else (0, 1, 3)
                assert done.exit_code in codes, (command, done.output, done.exception)
                assert isinstance(done.exception, SystemExit | None), (command, done.exception)
            assert view.draw(80, 24)
            assert "memlane_unreadable_segments" in source.metrics()
            assert source.as_json()["segments"]
    finally:
        source.close()
