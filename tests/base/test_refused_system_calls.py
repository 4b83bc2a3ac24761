"""System calls that an older kernel lacks, or a container forbids, through every part.

In short, all that newer kernels brought are refused at once. With ``MEMLANE_SOAK_CALLS=1`` each of
the others is refused too, one by one: the part works, or raises an error of memlane's. Calls that
Python or libzmq cannot do without are not among them (docs/reference/systems.md).
"""

import asyncio
import errno
import itertools
import os
import select
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from memlane import (
    Gather,
    MemlaneError,
    MessageQueue,
    SharedOffloadRegion,
    SingleWriterShmObjectStorage,
    SingleWriterShmRingBuffer,
    TimedOut,
    first_ready,
)
from memlane.groups import TcpGroup
from memlane.tiers import DiskTier
from tests.support import Link, is_sanitized, start
from tests.support.missing import needs
from tests.support.remote_queues import remote_writer
from tests.support.seccomp import CALLS, refuse_all

pytestmark = pytest.mark.skipif(is_sanitized(), reason="a sanitizer makes calls of its own")
TAKES_ALL = os.environ.get("MEMLANE_SOAK_CALLS") == "1"
PATIENCE = 30.0
NEWER = (
    *("clone3", "copy_file_range", "futex_waitv", "io_uring_enter", "io_uring_register"),
    *("io_uring_setup", "membarrier", "memfd_create", "pidfd_open", "statx"),
)
"""System calls newer than Linux 3.17 that any part uses, or might."""


def of(queue: MessageQueue) -> MessageQueue:
    """Its reader."""
    return MessageQueue.create_from_handle(queue.export_handle(0), 0, timeout=PATIENCE)


def a_queue() -> None:
    with MessageQueue(1, 1, max_chunk_bytes=4096, max_chunks=4) as writer, of(writer) as reader:
        writer.wait_until_ready(PATIENCE, processes=[os.getpid()])
        for message in ("small", np.arange(100_000)):
            writer.enqueue(message)
            assert len(reader.dequeue(PATIENCE)) == len(message)
        with pytest.raises(TimedOut):
            reader.dequeue(timeout=0.01)


def a_watched_queue() -> None:
    with MessageQueue(1, 1) as writer, of(writer) as reader:
        descriptor = reader.fileno()
        assert not select.select([descriptor], [], [], 0.01)[0]
        writer.enqueue("seen")
        assert first_ready([reader], timeout=PATIENCE) is reader
        assert asyncio.run(reader.adequeue(PATIENCE)) == "seen"


def a_gather() -> None:
    with Gather(1) as gather, Gather.create_from_handle(gather.export_handle(0), 0) as writer:
        gather.wait_until_ready(PATIENCE)
        writer.enqueue("gathered")
        assert gather.dequeue(PATIENCE) == "gathered"


def a_store() -> None:
    ring = SingleWriterShmRingBuffer(1 << 16, create=True)
    with (
        SingleWriterShmObjectStorage(1 << 12, 1, ring) as writer,
        SingleWriterShmObjectStorage.create_from_handle(writer.handle()) as reader,
    ):
        assert reader.get(*writer.put("key", b"stored")) == b"stored"


def a_region() -> None:
    region = SharedOffloadRegion(f"refused-{os.getpid()}", 4096, 1, 0, 1, 4096)
    try:
        region.create_kv_memoryview()
    finally:
        region.cleanup()


def a_group() -> None:
    with TcpGroup("127.0.0.1", 0, 0, 1, secret="0123456789abcdef") as group:
        assert group.broadcast_obj("said", 0, timeout=PATIENCE) == "said"


def a_remote_queue() -> None:
    with remote_writer(1) as writer, of(writer) as reader:
        writer.wait_until_ready(PATIENCE)
        for message in ("small", b"l" * 100_000):
            writer.enqueue(message)
            assert reader.dequeue(PATIENCE) == message


def a_disk_tier(folder: Path) -> None:
    rows = np.ones((2, 4096), np.uint8)
    with DiskTier(folder, rows, 1 << 16, timeout=PATIENCE) as tier:
        for call, row in (tier.store, 0), (tier.load, 1):
            rows[1] = 0
            call([b"key"], [row])
            assert tier.drain(PATIENCE)
            assert [done.ok.tolist() for done in tier.poll()] == [[True]]
        assert rows.all()


PARTS: dict[str, Callable[[], None]] = {
    part.__name__.removeprefix("a_"): part
    for part in (a_queue, a_watched_queue, a_gather, a_store, a_region, a_group, a_remote_queue)
}


def run(_link: Link, part: Callable[[], None], calls: tuple[str, ...], error: int) -> str:
    """Role: the part where these calls are refused. Returns memlane's error; "": none."""
    refuse_all(calls, error)
    try:
        part()
    except MemlaneError as refused:
        return f"{type(refused).__name__}: {refused}"
    return ""


def parts(folder: Path) -> dict[str, Callable[[], None]]:
    return {**PARTS, "disk_tier": partial(a_disk_tier, folder)}


@pytest.mark.parametrize("name", [*PARTS, "disk_tier"])
@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM], ids=["older", "forbidden"])
def test_nothing_newer_is_needed(name: str, error: int, tmp_path: Path) -> None:
    """Each part works where all of it is refused."""
    calls = NEWER if error == errno.ENOSYS else tuple(set(NEWER) - {"clone3"})  # glibc needs ENOSYS
    assert start(run, parts(tmp_path)[name], calls, error).result() == ""


@pytest.mark.skipif(not TAKES_ALL, reason=needs("time"))
@pytest.mark.parametrize("name", [*PARTS, "disk_tier"])
def test_each_call_is_refused(name: str, tmp_path: Path) -> None:
    """The part works, or an error of memlane's says what is missing. `pytest -s` prints which."""
    for call, error in itertools.product(CALLS, (errno.ENOSYS, errno.EPERM)):
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            said = start(run, parts(Path(folder))[name], (call,), error).result()
        print(f"{name}, {call}, {errno.errorcode[error]}: {said or 'works'}")
