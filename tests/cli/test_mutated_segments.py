"""Segments whose bytes are not what memlane wrote: every command reads them, and none fails.

``MEMLANE_SOAK_MUTATED`` is the number of rounds (default 8); each changes all segments once.
"""

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memlane import MessageQueue, SingleWriterShmObjectStorage, SingleWriterShmRingBuffer
from memlane.cli import export
from memlane.cli.app import app
from memlane.cli.top import View
from memlane.tiers import BlockPool
from tests.support import until
from tests.support.queues import path_of

ROUNDS = int(os.environ.get("MEMLANE_SOAK_MUTATED", "8"))
QUEUES = 6
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


def test_every_command_reads_them(paths: list[Path], tmp_path: Path) -> None:
    seed = int(os.environ.get("MEMLANE_SOAK_SEED", random.randrange(1 << 32)))
    print(f"MEMLANE_SOAK_SEED={seed}")
    choice, runner = random.Random(seed), CliRunner()
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
