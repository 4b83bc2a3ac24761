"""Core dumps: what users have sent is in none, unless they ask for it."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from memlane import MessageQueue
from tests.support import Link, start

MIB = 1 << 20
SIZE = 64 * MIB


def abort(link: Link, folder: str, wanted: bool) -> None:
    """Role: fills a ring, lends an array that it writes to, and dies with a core dump there."""
    os.environ["MEMLANE_CORE_DUMPS"] = str(int(wanted))
    os.chdir(folder)
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    with MessageQueue(1, 1, max_chunk_bytes=SIZE, max_chunks=1) as queue:
        reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
        queue.wait_until_ready()
        queue.enqueue(np.full(SIZE - MIB, 7, np.uint8))
        lent = reader.dequeue()
        lent[:] = 8
        link.tell()
        os.abort()


@pytest.mark.parametrize("wanted", [False, True])
def test_core_dumps_hold_no_messages(tmp_path: Path, wanted: bool) -> None:
    """Neither the ring nor a lent array; with MEMLANE_CORE_DUMPS=1 both."""
    if Path("/proc/sys/kernel/core_pattern").read_text()[0] in "|/":
        pytest.skip("the kernel gives core dumps to a program, or another folder")
    if resource.getrlimit(resource.RLIMIT_CORE)[1] != resource.RLIM_INFINITY:
        pytest.skip("core dumps are limited here")
    process = start(abort, str(tmp_path), wanted, method="spawn")
    process.hear()
    assert process.join() == -6
    (core,) = tmp_path.iterdir()
    used = core.stat().st_blocks * 512
    assert (used > SIZE) == wanted, f"{used / MIB:.0f} MiB"
