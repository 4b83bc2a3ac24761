"""Scenarios that start, use and close something while one system call after the other fails.

Each is a scenario of `tests.support.failing_calls`; a new system adds its own to `SCENARIOS`.
"""

import os
import socket
import tempfile
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np

from memlane import MessageQueue, SharedOffloadRegion, ShmRingBuffer
from memlane._native import read_replies, sweep_dead_segments
from memlane.errors import system_fault
from memlane.groups import TcpGroup
from memlane.tiers import DiskTier, disk
from tests.support import PATIENCE, Failing
from tests.support.stores import BytesSerde, Ring, Storage

NAME = "memlane-chosen-by-the-caller"


def ring(failing: Failing) -> None:
    """Creates a ring, and closes it."""
    with failing("create"):
        made = ShmRingBuffer(1, 64, 2)
    with made.get_data(1) as data:
        data[:] = bytes(64)
    with failing("close"):
        made.close()


def attached_ring(failing: Failing) -> None:
    """Attaches to a ring, and closes it."""
    with ShmRingBuffer(1, 64, 2) as made:
        with failing("attach"):
            joined = ShmRingBuffer(*made.handle())
        with made.get_data(0) as ours, joined.get_data(0) as theirs:
            ours[:4] = b"seen"
            assert bytes(theirs[:4]) == b"seen"
        with failing("close"):
            joined.close()


def queue(failing: Failing) -> None:
    """A writer makes a queue; all readers attach; it closes."""
    with failing("create"):
        writer = MessageQueue(1, 1, None, 64, 2)
    with writer, MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
        with failing("ready"):
            writer.wait_until_ready(30)
        writer.enqueue("word")
        assert reader.dequeue(timeout=PATIENCE) == "word"
        with failing("close"):
            writer.close()


def attached_queue(failing: Failing) -> None:
    """A reader attaches to a queue, and closes."""
    with MessageQueue(1, 1, None, 64, 2) as writer:
        with failing("attach"):
            reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        with reader:
            writer.enqueue("word")
            assert reader.dequeue(timeout=PATIENCE) == "word"
            with failing("close"):
                reader.close()


LARGE = np.arange(100_000)


def large_messages(failing: Failing) -> None:
    """Sends messages that do not fit their chunk, reads them, and views them."""
    with (
        MessageQueue(1, 1, None, 64, 2, max_extent_bytes=0) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
    ):
        with failing("send"):
            writer.enqueue(LARGE, timeout=PATIENCE)
        try:
            with failing("receive"):
                received = reader.dequeue(timeout=PATIENCE)
        except Exception:
            np.testing.assert_array_equal(reader.dequeue(timeout=PATIENCE), LARGE)  # not consumed
            raise
        np.testing.assert_array_equal(received, LARGE)
        with failing("send when one is read"):
            writer.enqueue(LARGE, timeout=PATIENCE)
        with failing("view"):
            block = reader.dequeue_view(timeout=PATIENCE)
            view = block.__enter__()
        np.testing.assert_array_equal(view, LARGE)
        del view
        with failing("end of view"):
            block.__exit__(None, None, None)


LENT = np.arange(300_000)


def lent_messages(failing: Failing) -> None:
    """Messages that are lent are sent to new and to warm space, read, written to, dropped."""
    with (
        MessageQueue(1, 1, None, 64, 2) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
    ):
        for lap in ("first", "second"):
            with failing(f"{lap} send"):
                writer.enqueue(LENT, timeout=PATIENCE)
            try:
                with failing(f"{lap} receive"):
                    received = reader.dequeue(timeout=PATIENCE)
            except Exception:
                again = reader.dequeue(timeout=PATIENCE)  # not consumed
                np.testing.assert_array_equal(again, LENT)
                raise
            np.testing.assert_array_equal(received, LENT)
            received[:] = 1
            with failing(f"{lap} end of the lease"):
                del received


def late_space(failing: Failing) -> None:
    """Fills a chunk of which only the beginning is reserved, and reads it."""
    with (
        MessageQueue(1, 1, None, 1 << 17, 2) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
    ):
        with failing("fill"):
            writer.enqueue(bytes(100_000), timeout=PATIENCE)
        with failing("read"), reader.acquire_read(timeout=PATIENCE) as chunk:
            assert len(chunk) == 1 << 17


def queue_statistics(failing: Failing) -> None:
    """Takes the statistics of a queue."""
    with (
        MessageQueue(1, 1, None, 64, 2) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0),
        failing("statistics"),
    ):
        assert writer.statistics().readers[0].state in ("running", "unknown")


def leave_dead(make: Any) -> None:
    """A process creates something and dies."""
    child = os.fork()
    if child == 0:
        try:
            _kept = make()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def sweep(failing: Failing) -> None:
    """Creates something after a process has died and left something."""
    leave_dead(lambda: ShmRingBuffer(1, 64, 2))
    with failing("sweep and create"):
        made = ShmRingBuffer(1, 64, 2)
    made.close()


def byte_ring(failing: Failing) -> None:
    """Creates a byte ring, and closes it."""
    with failing("create"):
        made = Ring(1000, create=True)
    assert made.allocate_buf(100) == (0, 0)
    with failing("close"):
        made.close()


def named_byte_ring(failing: Failing) -> None:
    """Creates a byte ring under a name that a dead process left."""
    leave_dead(lambda: Ring(1000, NAME, create=True))
    try:
        with failing("create"):
            made = Ring(1000, NAME, create=True)
        made.close()
    finally:
        sweep_dead_segments()  # what the dead have left has a second name


def attached_byte_ring(failing: Failing) -> None:
    """Attaches to a byte ring, and closes it."""
    with Ring(1000, create=True) as made:
        place = made.allocate_buf(100)
        with failing("attach"):
            joined = Ring(*made.handle())
        with joined.access_buf(place[0]) as (data, _):
            assert len(data) == 100
        with failing("close"):
            joined.close()


def storage(failing: Failing) -> None:
    """Makes a storage on a ring; whatever failed, the same ring can get one later."""
    with Ring(4096, create=True) as made:
        try:
            with failing("create"):
                writer = Storage(1000, 1, made, BytesSerde)
        except Exception:
            Storage(1000, 1, made, BytesSerde).close()
            raise
        assert writer.get(*writer.put("k", b"value")) == b"value"
        with failing("close"):
            writer.close()


def attached_storage(failing: Failing) -> None:
    """A reader attaches to a storage, and closes; whatever failed, its place is free again."""
    with Storage(1000, 1, Ring(4096, create=True), BytesSerde) as writer:
        place = writer.put("k", b"value")
        try:
            with failing("attach"):
                reader = Storage.create_from_handle(writer.handle())
        except Exception:
            Storage.create_from_handle(writer.handle()).close()
            raise
        assert reader.get(*place) == b"value"
        with failing("close"):
            reader.close()


def successor(failing: Failing) -> None:
    """A reader takes the place of an earlier one."""
    with Storage(1000, 1, Ring(4096, create=True), BytesSerde) as writer:
        Storage.create_from_handle(writer.handle()).close()
        place = writer.put("k", b"value")
        with failing("attach"):
            reader = Storage.create_from_handle(writer.handle())
        with reader:
            assert reader.get(*place) == b"value"


def eviction(failing: Failing) -> None:
    """A full storage checks which readers in the way are alive; takes statistics, too."""
    with ExitStack() as ends:
        writer = ends.enter_context(Storage(64, 2, Ring(128, create=True), BytesSerde))
        reader = ends.enter_context(Storage.create_from_handle(writer.handle()))
        first, _ = writer.put("a", bytes(52)), writer.put("b", bytes(52))
        with failing("put, full"):
            try:
                writer.put("c", bytes(52))
            except MemoryError as error:
                assert "c" in str(error)  # noqa: PT017
        with failing("statistics"):
            assert writer.statistics().readers[0].state in ("running", "unknown")
        assert list(writer.key_index) == ["a", "b"]
        assert reader.get(*first) == bytes(52)


def region_of(rank: int | None) -> SharedOffloadRegion:
    """8 blocks of two workers, a page each. One thread, so that its calls come in one order."""
    page = os.sysconf("SC_PAGE_SIZE")
    return SharedOffloadRegion(
        "faults", 16 * page, 8, rank, 2, page, prefix="memlane-", threads=1, timeout=PATIENCE
    )


def region(failing: Failing) -> None:
    """Creates a region, populates it, and cleans up as its only holder."""
    with failing("create"):
        made = region_of(None)
    made.create_kv_memoryview()[3][:4] = b"seen"
    with failing("close"):
        made.cleanup()


def joined_region(failing: Failing) -> None:
    """A worker joins an existing region, and leaves it."""
    with region_of(None) as made:
        with failing("attach"):
            joined = region_of(1)
        joined.create_next_array(8)[3, :4] = 7
        assert bytes(made.create_kv_memoryview()[3][made.page_size :][:4]) == bytes([7] * 4)
        with failing("close"):
            joined.cleanup()


def remote_writer(failing: Failing) -> None:
    """A writer listens, with a ring beside the network, and closes."""
    with failing("create"):
        writer = MessageQueue(2, 1, None, 64, 2, connect_ip="127.0.0.1")
    with failing("close"):
        writer.close()


def remote_reader(failing: Failing) -> None:
    """A reader attaches over the network, and closes."""
    with MessageQueue(1, 0, None, 64, 2, connect_ip="127.0.0.1") as writer:
        handle = writer.export_handle()
        with failing("attach"):
            reader = MessageQueue.create_from_handle(handle, 0)
        writer.enqueue("word")
        assert reader.dequeue(timeout=PATIENCE) == "word"
        with failing("close"):
            reader.close()


def tcp_group(failing: Failing) -> None:
    """The first rank of a group joins, and leaves."""
    with failing("create"):
        group = TcpGroup("127.0.0.1", 0, 0, 1, secret="of the tests: 0123456789abcdef")
    with failing("close"):
        group.close()


NETWORK = {one.__name__.replace("_", " "): one for one in (remote_writer, remote_reader, tcp_group)}
"""These call libzmq, which ends the process if it finds too little memory."""

ROWS = np.random.default_rng(3).integers(0, 256, (4, 4096), np.uint8)
KEYS = [bytes([number]) * 32 for number in range(4)]


def disk_tier(failing: Failing) -> None:
    """Opens a tier on a disk, stores, loads, forgets, clears, and opens it again."""
    with mock.patch.object(disk, "_MAY_RING", False):
        use_disk_tier(failing, 4)


def disk_ring(failing: Failing) -> None:
    """The same by io_uring, a block at a time, so that its calls are always as many."""
    use_disk_tier(failing, 1)


def use_disk_tier(failing: Failing, blocks: int) -> None:
    """Does what the two scenarios share."""
    keys, wanted = KEYS[:blocks], ROWS[:blocks]
    with tempfile.TemporaryDirectory() as folder:
        rows = wanted.copy()
        with failing("open"):
            tier = DiskTier(f"{folder}/kv", rows, 1 << 20, policy="lru")
        with tier:
            with failing("store"):
                tier.store(keys, range(blocks))
                assert tier.drain(30)
            stored = [done.ok.all() for done in tier.poll()] == [True]
            rows[:] = 0
            with failing("load"):
                tier.load(keys, range(blocks))
                assert tier.drain(30)
            loaded = np.flatnonzero(tier.poll()[0].ok)
            np.testing.assert_array_equal(rows[loaded], wanted[loaded])
            with failing("close tier"):
                tier.close()
        with failing("open again"):
            tier = DiskTier(f"{folder}/kv", rows, 1 << 20, policy="lru")
        with tier:
            there = [key for key, has in zip(keys, tier.has(keys), strict=True) if has]
            assert not stored or len(there) >= len(loaded)
            with failing("forget"):
                tier.forget(keys[:1])
            with failing("clear"):
                tier.clear()
            assert not any(tier.has(keys))


def values_of_a_server(failing: Failing) -> None:
    """Reads what a Redis server would answer."""
    ours, theirs = socket.socketpair()
    with ours, theirs, failing("read"):
        theirs.sendall(b"$4\r\n1234\r\n")
        memory = bytearray(4)
        _, fault, number, _ = read_replies(ours.fileno(), 5.0, "$", [memory])
        if fault == "system":
            raise system_fault(number, "cannot read a value")
        assert memory == b"1234"


SCENARIOS = {
    one.__name__.replace("_", " "): one
    for one in (
        ring,
        attached_ring,
        queue,
        attached_queue,
        large_messages,
        lent_messages,
        late_space,
        disk_tier,
        disk_ring,
        values_of_a_server,
        queue_statistics,
        sweep,
        byte_ring,
        named_byte_ring,
        attached_byte_ring,
        storage,
        attached_storage,
        successor,
        eviction,
        region,
        joined_region,
    )
}
