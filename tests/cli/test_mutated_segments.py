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

from memlane import MessageQueue
from memlane.cli import export
from memlane.cli.app import app
from tests.support.queues import path_of

ROUNDS = int(os.environ.get("MEMLANE_SOAK_MUTATED", "8"))
QUEUES = 6
REACHED = 4096  # bytes that a change may hit: the header, and what follows it
COMMANDS = [
    *(["ls"], ["ls", "--json"], ["clean"], ["clean", "--json"]),
    *(["stuck", "--after", "0", "--no-stacks", *more] for more in ([], ["--json"])),
]


@pytest.fixture
def paths() -> Iterator[list[Path]]:
    """Living segments, with their locks; their bytes are as they were at the end."""
    with ExitStack() as stack:
        found = []
        for _ in range(QUEUES):  # the name stays until the second reader comes
            writer = stack.enter_context(MessageQueue(2, 2, max_chunk_bytes=256, max_chunks=2))
            stack.enter_context(MessageQueue.create_from_handle(writer.export_handle(), 0))
            found.append(path_of(writer))
        before = {path: path.read_bytes() for path in found}
        yield found
        for path, data in before.items():
            write(path, data)


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


def test_every_command_reads_them(paths: list[Path]) -> None:
    seed = int(os.environ.get("MEMLANE_SOAK_SEED", random.randrange(1 << 32)))
    print(f"MEMLANE_SOAK_SEED={seed}")
    choice, runner = random.Random(seed), CliRunner()
    before = {path: path.read_bytes() for path in paths}
    source = export.Source(None)
    try:
        for _ in range(ROUNDS):
            for path, data in before.items():
                write(path, changed(data, choice))
            for command in COMMANDS:
                done = runner.invoke(app, command)
                assert done.exit_code in (0, 1, 3), (command, done.output, done.exception)
                assert isinstance(done.exception, SystemExit | None), (command, done.exception)
            assert "memlane_unreadable_segments" in source.metrics()
            assert source.as_json()["segments"]
    finally:
        source.close()
