"""Messages that do not fit a chunk: the same promises at any size."""

import numpy as np
import pytest

from memlane import MessageQueue, TimedOut
from tests.support.queues import file_of, queue_of

pytestmark = [pytest.mark.wheel, pytest.mark.unit]

CHUNK = 4096
KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("readers", [1, 3, 8])
def test_messages_around_a_chunk_and_far_beyond_arrive(readers: int) -> None:
    """Every size arrives whole, in order with small messages, at every reader."""
    sizes = [*range(CHUNK - 80, CHUNK + 80, 7), 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, MIB, 5 * MIB]
    with queue_of(readers, max_chunk_bytes=CHUNK, max_chunks=3) as (writer, ends):
        for number, size in enumerate(sizes):
            writer.enqueue((number, b"x" * size))
            writer.enqueue(number)
            for reader in ends:
                assert reader.dequeue(timeout=0) == (number, b"x" * size)
                assert reader.dequeue(timeout=0) == number
        assert writer.statistics().spills >= len([size for size in sizes if size > CHUNK])


def test_bytes_are_of_their_type() -> None:
    """bytes stay bytes and bytearrays bytearrays, large or small."""
    with queue_of(max_chunk_bytes=CHUNK) as (writer, (reader,)):
        for value in (bytes(10), bytes(300 * KIB), bytearray(10), bytearray(300 * KIB)):
            writer.enqueue([value, "x" * 100_000])
            got, text = reader.dequeue()
            assert type(got) is type(value)
            assert (got, text) == (value, "x" * 100_000)


def test_change_after_enqueue_never_shows() -> None:
    """M20: what readers see is the value of the time of enqueue."""
    array = np.zeros(3 * MIB, np.uint8)
    small = np.zeros(8 * KIB, np.uint8)
    with queue_of(max_chunk_bytes=64 * KIB) as (writer, (reader,)):
        for number in range(3):
            array[:] = small[:] = number
            writer.enqueue((array, small))
            array[:] = small[:] = 99
            large_got, small_got = reader.dequeue()
            assert (large_got == number).all()
            assert (small_got == number).all()


def test_space_is_used_again() -> None:
    """However many large messages are sent, the file is only as long as those in flight need."""
    with queue_of(max_chunk_bytes=CHUNK, max_chunks=4) as (writer, (reader,)):
        for round_ in range(30):
            for number in range(3):
                writer.enqueue(bytes((round_ % 7 + 1) * 200 * KIB + number))
            for number in range(3):
                assert len(reader.dequeue()) == (round_ % 7 + 1) * 200 * KIB + number
        assert file_of(writer).st_size < 16 * MIB


@pytest.mark.parametrize(
    ("keep", "least", "most"),
    [(0, 0, MIB), (4 * MIB, 0, MIB), (64 * MIB, 8 * MIB, 9 * MIB)],
)
def test_what_stays_allocated(keep: int, least: int, most: int) -> None:
    """Up to max_extent_bytes are kept; other space is freed once everybody has read."""
    with (
        MessageQueue(1, 1, max_chunk_bytes=CHUNK, max_extent_bytes=keep) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
    ):
        writer.enqueue(bytes(8 * MIB))
        reader.dequeue()
        writer.enqueue(bytes(2 * CHUNK))  # looks for what can be given back
        reader.dequeue()
        writer.enqueue(bytes(2 * CHUNK))
        assert least <= file_of(writer).st_blocks * 512 <= most


def test_space_does_not_go_back_too_early() -> None:
    """A call that finds the ring full does not affect the messages in it."""
    with (
        MessageQueue(1, 1, max_chunk_bytes=CHUNK, max_chunks=2, max_extent_bytes=0) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
    ):
        for lap in range(3):
            for number in range(2):
                writer.enqueue(np.full(MIB, lap + number, np.uint8))
            for message in ("small", bytes(MIB)):
                with pytest.raises(TimedOut):
                    writer.enqueue(message, timeout=0)
            for number in range(2):
                assert (reader.dequeue() == lap + number).all()


def test_what_is_kept_is_used_again() -> None:
    """Messages of any size in any order reuse warm space."""
    with queue_of(max_chunk_bytes=CHUNK, max_chunks=4) as (writer, (reader,)):
        sizes = [9 * MIB + 1, 8 * KIB, 3 * MIB - 1, 70 * KIB, 9 * MIB + 3000]
        allocated = set()
        for lap in range(4):
            for number, size in enumerate(sizes):
                sent = [np.full(size, lap + number, np.uint8), bytes([lap]) * (size // 2)]
                writer.enqueue(sent)
                got = reader.dequeue()
                assert (got[0] == lap + number).all()
                assert got[1] == sent[1]
                del got
            allocated.add(file_of(writer).st_blocks)
        assert len(allocated) == 1


@pytest.mark.parametrize("call", ["enqueue", "acquire_write"])
def test_space_goes_back_without_another_large_message(call: str) -> None:
    """The next message of any size frees it: there may never be another large one."""
    with (
        MessageQueue(1, 1, max_chunk_bytes=CHUNK, max_extent_bytes=0) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
    ):
        writer.enqueue(bytes(8 * MIB))
        assert file_of(writer).st_blocks * 512 > 8 * MIB
        reader.dequeue()
        if call == "enqueue":
            writer.enqueue("small")
        else:
            with writer.acquire_write():
                pass
        assert file_of(writer).st_blocks * 512 < MIB


def test_a_poison_message_of_each_size_raises_once() -> None:
    """M3: a message that cannot be decoded raises once, and the next one arrives."""
    with queue_of(max_chunk_bytes=64 * KIB) as (writer, (reader,)):
        for size in (1, 30 * KIB, 100 * KIB, 3 * MIB):
            writer.enqueue([Poison(), bytes(size), np.zeros(size, np.uint8)])
            writer.enqueue("next")
            with pytest.raises(ZeroDivisionError):
                reader.dequeue()
            assert reader.dequeue(timeout=0) == "next"


class Poison:
    def __reduce__(self) -> tuple[object, tuple[int, int]]:
        return divmod, (1, 0)
