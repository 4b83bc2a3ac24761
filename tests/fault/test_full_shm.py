"""A full /dev/shm raises in the call that needs space, and never causes a SIGBUS later.

Fails without the guard: ftruncate instead of fallocate gives a segment without memory behind it.
"""

import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from memlane import MessageQueue, ReaderDied, ShmExhausted, ShmRingBuffer, ViewInUse
from tests.harness import Alarm, Aside, Link, alarm_after, private_shm, start, unshare_refusal
from tests.queues import BOUND, drain, queue_of, refuses, ring_in, segments, start_reader

pytestmark = pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())

MIB = 1 << 20
FILLER = "/dev/shm/filler"


def used() -> int:
    facts = os.statvfs("/dev/shm")
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize


def free() -> int:
    facts = os.statvfs("/dev/shm")
    return facts.f_bavail * facts.f_frsize


@contextmanager
def full(leaving: int = 0) -> Any:
    """Takes all space of this /dev/shm except ``leaving`` bytes."""
    descriptor = os.open(FILLER, os.O_CREAT | os.O_RDWR)
    try:
        os.posix_fallocate(descriptor, 0, free() - leaving)
        yield
    finally:
        os.close(descriptor)
        os.unlink(FILLER)


def exhausted(call: Callable[[], object]) -> ShmExhausted:
    """The ShmExhausted that the call raises, with numbers that make sense."""
    with refuses(MemoryError) as caught:
        call()
    error = caught.value
    assert isinstance(error, ShmExhausted)
    assert 0 <= error.free < error.need
    assert error.hint
    assert str(error.need) in str(error)
    return error


def ring_that_does_not_fit(_link: Link) -> None:
    before = used()
    for _ in range(3):
        error = exhausted(lambda: ShmRingBuffer(1, 100 * MIB, 1))
        assert error.need >= 100 * MIB
        assert error.free <= 64 * MIB
        assert (segments(), used()) == (set(), before)
    with full():
        exhausted(lambda: ShmRingBuffer(1, 4096, 1))
        exhausted(lambda: MessageQueue(1, 1, None, 4096, 1))
        exhausted(lambda: MessageQueue(1, 1))
        assert segments() == set()
    assert used() == before
    ShmRingBuffer(1, 50 * MIB, 1).close()
    assert used() == before


def default_queue(_link: Link) -> None:
    with queue_of(4, max_chunk_bytes=10 * MIB, max_chunks=10) as (writer, readers):
        assert used() < 4 * MIB
        for number in range(100):
            writer.enqueue({"step": number, "tokens": list(range(1000))})
            for reader in readers:
                assert reader.dequeue()["step"] == number
        writer.enqueue(np.ones(9 * MIB, np.uint8))
        assert all(reader.dequeue().all() for reader in readers)
    assert used() == 0


def ring_buffer_alone(_link: Link) -> None:
    """Reserved at creation: every byte can be touched when no other space is left."""
    ring = ShmRingBuffer(1, 4 * MIB, 3)
    other = ShmRingBuffer(*ring.handle())
    with full():
        for chunk in range(3):
            with ring.get_data(chunk) as data:
                data[:] = b"\1" * len(data)
            with other.get_data(chunk) as data:
                assert data[-1] == 1
    other.close()
    ring.close()


def large_messages(_link: Link) -> None:
    """Only some of the chunks of 4 MiB fit in sixteen MiB."""
    with queue_of(1, max_chunk_bytes=4 * MIB, max_chunks=8) as (writer, (reader,)):
        sent: list[int] = []
        received: list[int] = []

        def send(number: int, size: int) -> None:
            writer.enqueue(bytes([number % 251]) * size, timeout=0)
            sent.append(number)

        def receive() -> None:
            for text in drain(reader):
                assert isinstance(text, bytes)
                assert text == text[:1] * len(text)
                received.append(text[0])

        refusals = 0
        for number in range(1, 40):
            index = writer.current_idx
            try:
                send(number, 3 * MIB)
            except ShmExhausted:
                refusals += 1
                assert writer.current_idx == index
                exhausted(lambda: writer.enqueue(bytes(3 * MIB + 1), timeout=0))
                send(number, 100)
            receive()
        assert received == sent == list(range(1, 40))
        assert refusals > 4


def arrays_that_are_kept(_link: Link) -> None:
    """Lent arrays take at most a quarter of the space; the rest is copied, never refused."""
    with queue_of(1, max_chunk_bytes=64 * 1024, max_chunks=3) as (writer, (reader,)):
        kept = []
        for number in range(12):
            writer.enqueue(np.full(3 * MIB, number, np.uint8), timeout=0)
            kept.append(reader.dequeue(timeout=0))
        assert all((array == number).all() for number, array in enumerate(kept))
        with full():
            for array in kept:
                array[::4096] = 99  # copies of its own, which need no space of the file system
            del kept, array
            writer.enqueue(np.full(3 * MIB, 7, np.uint8), timeout=0)
            assert (reader.dequeue(timeout=0) == 7).all()
    assert used() == 0


def kept_array_and_a_larger_one(_link: Link) -> None:
    """A lent array leaves space for the next message, which is copied if it is large."""
    with queue_of(1, max_chunk_bytes=4096, max_chunks=3) as (writer, (reader,)):
        writer.enqueue(np.ones(24 * MIB, np.uint8))
        kept = reader.dequeue()
        writer.enqueue(np.full(40 * MIB, 2, np.uint8), timeout=0)
        assert (reader.dequeue() == 2).all()
        assert (kept == 1).all()


def chunks_by_hand(_link: Link) -> None:
    """A whole chunk is reserved before it is handed out; without space nothing is handed out."""
    with queue_of(1, max_chunk_bytes=MIB, max_chunks=4) as (writer, (reader,)):
        with full():
            exhausted(lambda: writer.acquire_write(timeout=0).__enter__())
            assert writer.current_idx == 0
            writer.enqueue("small still goes")
            assert reader.dequeue() == "small still goes"
        with writer.acquire_write() as chunk:
            chunk[:] = b"\1" * MIB
        with reader.acquire_read() as chunk:
            assert bytes(chunk) == b"\1" * MIB


def space_kept_for_large_messages(_link: Link) -> None:
    """Space kept warm for large messages is available to small ones, and to larger ones."""
    with queue_of(1, max_chunk_bytes=10 * MIB, max_chunks=10) as (writer, (reader,)):
        for size in (58 * MIB, 9 * MIB, 11 * MIB, 50 * MIB, 52 * MIB, 8 * MIB):
            writer.enqueue(bytes(size), timeout=0)
            assert len(reader.dequeue(timeout=0)) == size


def more_than_there_is(_link: Link) -> None:
    """Refused at once, before anything is written, even while older messages are in flight."""
    with queue_of(1, max_chunk_bytes=MIB) as (writer, (reader,)):
        for older in (0, 1):
            before = free()
            exhausted(lambda: writer.enqueue(bytes(100 * MIB), timeout=0))
            assert free() == before
            if older == 0:
                writer.enqueue(bytes(5 * MIB))
        assert len(reader.dequeue()) == 5 * MIB


def waiting_for_space(_link: Link) -> None:
    """The writer waits for the older message's readers, names them, and then sends."""
    with queue_of(1, max_chunk_bytes=MIB) as (writer, (reader,)):
        writer.enqueue(bytes(40 * MIB))
        with refuses(TimeoutError, match=r"reader 0 \(pid"):
            writer.enqueue(bytes(41 * MIB), timeout=0.05)
        assert len(reader.dequeue(timeout=0)) == 40 * MIB
        with refuses(TimeoutError):
            reader.dequeue(timeout=0)
        writer.enqueue(bytes(41 * MIB), timeout=0)
        assert len(reader.dequeue(timeout=0)) == 41 * MIB


def an_array_that_is_kept_while_the_writer_waits(_link: Link) -> None:
    """It waits for older messages, and never for what readers keep of them."""
    with queue_of(1, max_chunk_bytes=MIB) as (writer, (reader,)):
        writer.enqueue(np.ones(14 * MIB, np.uint8))
        blocked = Aside(writer.enqueue, np.ones(55 * MIB, np.uint8)).until_blocked()
        kept = reader.dequeue()
        exhausted(blocked.result)
        assert kept.all()


def space_of_others_while_the_writer_waits(_link: Link) -> None:
    """What somebody else gives back is as good as an older message's."""
    with queue_of(1, max_chunk_bytes=MIB) as (writer, (reader,)):
        writer.enqueue(np.ones(14 * MIB, np.uint8))
        with full(leaving=20 * MIB):
            blocked = Aside(writer.enqueue, np.ones(30 * MIB, np.uint8)).until_blocked()
        blocked.result()
        assert [len(reader.dequeue()) for _ in range(2)] == [14 * MIB, 30 * MIB]


def space_of_others_little_by_little(_link: Link) -> None:
    """Somebody who gives back a page at a time does not keep a wait from ending for a signal."""
    with queue_of(1, max_chunk_bytes=MIB) as (writer, _):
        writer.enqueue(np.ones(14 * MIB, np.uint8))
        with full(leaving=MIB):
            stopped = threading.Event()

            def shrink() -> None:
                while not stopped.wait(0.02):
                    os.truncate(FILLER, os.stat(FILLER).st_size - 4096)

            shrinking = Aside(shrink)
            with pytest.raises(Alarm), alarm_after(0.5):
                writer.enqueue(np.ones(29 * MIB // 2, np.uint8), timeout=30)
            stopped.set()
            shrinking.result()


def a_chunk_that_cannot_be(_link: Link) -> None:
    """Older messages are not waited for where all of them would not do."""
    with queue_of(1, max_chunk_bytes=200 * MIB) as (writer, _):
        writer.enqueue(np.ones(14 * MIB, np.uint8))  # lent, so it lies behind the ring
        exhausted(lambda: writer.enqueue(bytes(100 * MIB)))


def a_message_that_cannot_be(_link: Link) -> None:
    """The same behind the ring."""
    with queue_of(1, max_chunk_bytes=MIB) as (writer, (reader,)):
        writer.enqueue(bytes(2 * MIB))
        with full(leaving=MIB):
            exhausted(lambda: writer.enqueue(bytes(4 * MIB)))
            assert len(reader.dequeue()) == 2 * MIB


def a_chunk_that_lacks_little(_link: Link) -> None:
    """What counts is what the chunk lacks, not the message."""
    with queue_of(1, max_chunk_bytes=12 * MIB, max_chunks=2) as (writer, (reader,)):
        for _ in range(2):  # either chunk has 8 MiB now
            writer.enqueue(bytes(8 * MIB))
            reader.dequeue()
        writer.enqueue(np.ones(3 * MIB, np.uint8))
        with full(leaving=MIB):
            blocked = Aside(writer.enqueue, bytes(10 * MIB)).until_blocked()
            os.truncate(FILLER, os.stat(FILLER).st_size - 2 * MIB)
            blocked.result()
            assert [len(reader.dequeue()) >> 20 for _ in range(2)] == [3, 10]


def waiting_for_the_space_of_a_chunk(_link: Link) -> None:
    """A message that fits its chunk waits like a larger one, if the chunk has no space yet."""
    with queue_of(1, max_chunk_bytes=10 * MIB) as (writer, (reader,)):
        writer.enqueue(bytes(57 * MIB))
        with refuses(TimeoutError, match=r"reader 0 \(pid"):
            writer.enqueue(bytes(9 * MIB), timeout=0.05)
        blocked = Aside(writer.enqueue, bytes(9 * MIB)).until_blocked()
        assert len(reader.dequeue()) == 57 * MIB
        blocked.result()
        assert len(reader.dequeue(timeout=0)) == 9 * MIB


def a_death_while_waiting_for_space(_link: Link) -> None:
    """The reader that keeps the space dies: nothing was sent; after release there is room."""
    with MessageQueue(2, 2, None, MIB) as writer:
        doomed = start_reader(writer.export_handle(0), 0)
        other = MessageQueue.create_from_handle(writer.export_handle(1), 1)
        writer.enqueue(bytes(40 * MIB))
        assert len(other.dequeue()) == 40 * MIB
        blocked = Aside(writer.enqueue, bytes(41 * MIB)).until_blocked()
        killed = doomed.peer.kill()
        with refuses(ReaderDied):
            blocked.result()
        assert blocked.ended - killed < BOUND
        with refuses(TimeoutError):
            other.dequeue(timeout=0)
        writer.release_reader(0)
        writer.enqueue(bytes(41 * MIB), timeout=0)
        assert len(other.dequeue(timeout=0)) == 41 * MIB
        other.close()


def views_keep_space(_link: Link) -> None:
    """Space that a view refers to is not reused, and is given back with the view."""
    with queue_of(1, max_chunk_bytes=MIB) as (writer, (reader,)):
        writer.enqueue(np.ones(40 * MIB, np.uint8))
        with refuses(ViewInUse), reader.dequeue_view() as view:
            kept = view[1:]
        del view
        for _ in range(3):
            with refuses(TimeoutError, match="holds views of 1 chunk"):
                writer.enqueue(bytes(41 * MIB), timeout=0.02)
        writer.enqueue(bytes(10 * MIB), timeout=0)
        assert kept.all()
        del kept
        assert len(reader.dequeue(timeout=0)) == 10 * MIB
        writer.enqueue(bytes(41 * MIB), timeout=0)
        assert len(reader.dequeue(timeout=0)) == 41 * MIB


def look_at_whole_chunk(_link: Link, how: str) -> str:
    """Reads the end of a chunk whose beginning alone is reserved, with no space left."""
    with queue_of(1, max_chunk_bytes=MIB, max_chunks=2) as (writer, (reader,)):
        writer.enqueue("small")
        with full():
            try:
                if how == "acquire_read":
                    with reader.acquire_read() as chunk:
                        return f"byte {chunk[MIB - 1]}"
                ring = ring_in(writer) if how == "get_data of the writer" else ring_in(reader)
                with ring.get_data(1) as chunk:
                    return f"byte {chunk[MIB - 1]}"
            except ShmExhausted:
                return "ShmExhausted"


@pytest.mark.parametrize(
    ("role", "size"),
    [
        (ring_that_does_not_fit, "64m"),
        (default_queue, "64m"),
        (ring_buffer_alone, "16m"),
        (large_messages, "16m"),
        (arrays_that_are_kept, "16m"),
        (kept_array_and_a_larger_one, "64m"),
        (chunks_by_hand, "8m"),
        (space_kept_for_large_messages, "64m"),
        (more_than_there_is, "64m"),
        (waiting_for_space, "64m"),
        (an_array_that_is_kept_while_the_writer_waits, "64m"),
        (space_of_others_while_the_writer_waits, "64m"),
        (space_of_others_little_by_little, "64m"),
        (a_chunk_that_cannot_be, "64m"),
        (a_message_that_cannot_be, "64m"),
        (a_chunk_that_lacks_little, "64m"),
        (waiting_for_the_space_of_a_chunk, "64m"),
        (a_death_while_waiting_for_space, "64m"),
        (views_keep_space, "64m"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_full(role: Callable[[Link], None], size: str) -> None:
    """What does not fit raises ShmExhausted with need, free and hint; the rest works."""
    start(role, method="spawn", command=private_shm(size)).result()


@pytest.mark.parametrize("how", ["acquire_read", "get_data of the writer", "get_data of a reader"])
def test_looking_never_kills(how: str) -> None:
    """Reading the whole chunk of a small message gives bytes or an error, not a SIGBUS."""
    peer = start(look_at_whole_chunk, how, method="spawn", command=private_shm("8m"))
    assert peer.result() in ("byte 0", "ShmExhausted")
