"""The documented layout suffices: the manual's example attaches without memlane."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from memlane import MessageQueue, ShmRingBuffer
from tests.docs.manual import ROOT
from tests.support import PATIENCE

PLAIN_READER = ROOT / "examples/plain_reader.py"  # docs/reference/layout.md names it


def reader(folder: Path, ring: ShmRingBuffer | None, count: int) -> subprocess.Popen[bytes]:
    """`PLAIN_READER`, as reader 0 of a ring; prints to a file."""
    assert ring is not None
    arguments = [str(value) for value in (*ring.handle(), 0, count)]
    with open(folder / "printed", "w") as printed:
        return subprocess.Popen([sys.executable, "-I", PLAIN_READER, *arguments], stdout=printed)


def test_the_example_reads_messages(tmp_path: Path) -> None:
    """Bytes in chunks and in extents, and chunks that were filled by hand, over several laps."""
    large = bytes(range(256)) * 2048
    with MessageQueue(1, 1, None, 4096, 3) as writer:
        plain = reader(tmp_path, writer.buffer, 9)
        for number in range(3):
            writer.enqueue(b"message %d" % number, timeout=PATIENCE)
            with writer.acquire_write(timeout=PATIENCE) as chunk:
                chunk[:] = (b"chunk %d" % number).ljust(len(chunk), b"\0")
            writer.enqueue(large, timeout=PATIENCE)
        assert plain.wait(timeout=PATIENCE) == 0
    assert (tmp_path / "printed").read_text().splitlines() == [
        repr(part)
        for number in range(3)
        for part in (b"message %d" % number, b"chunk %d" % number, large)
    ]


def test_the_example_is_short() -> None:
    """It shows that the layout is simple."""
    text = PLAIN_READER.read_text()
    assert len(text.splitlines()) <= 60
    assert not re.search(r"^\s*(?:import|from) (?:memlane|numpy)", text, re.MULTILINE)
