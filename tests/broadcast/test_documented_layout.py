"""A process that knows only the documented layout can take part fully."""

import statistics
import time

import pytest

from memlane import CorruptMessage, Handle, MessageQueue, ShmRingBuffer
from tests.support import PATIENCE, Aside, assert_in_time, late_since, plain_layout, start
from tests.support.queues import drain, fill, flags, queue_of, refuses, ring_in, ring_of

NOTICED = 0.1
"""Seconds within which flags are noticed that were set without waking anybody."""
ROUNDS = 9


def byte_of(reader: MessageQueue) -> tuple[int, float]:
    with reader.acquire_read() as chunk:
        return int(chunk[0]), time.monotonic()


def median_delay(moments: list[float], ends: list[float]) -> float:
    """But for what the control was late."""
    windows = list(zip(moments, ends, strict=True))
    assert all(end >= moment for moment, end in windows)
    return statistics.median(end - moment - late_since(moment, end) for moment, end in windows)


def test_a_foreign_reader_gets_every_chunk_of_our_writer() -> None:
    """It gets every chunk in order over many laps, beside one of memlane's readers."""
    parts = [bytes([number]) * 50 for number in range(40)]
    with MessageQueue(2, 2, None, 50, 3) as writer:
        ours = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        plain = start(
            plain_layout.read_everything, ring_in(writer).handle(), 1, len(parts), method="spawn"
        )
        plain.hear()
        received = []
        for part in parts:
            with writer.acquire_write() as chunk:
                chunk[:] = part
            with ours.acquire_read() as chunk:
                received.append(bytes(chunk))
        assert received == parts
        assert plain.result() == parts
        # It holds no lock, so it is absent and not dead, and the writer has no complaint.
        assert [entry.state for entry in writer.statistics().readers] == ["running", "absent"]
        ours.close()


def test_a_foreign_reader_finds_the_pickled_bytes() -> None:
    """It releases what was enqueued, and finds the pickled bytes in the chunk."""
    with MessageQueue(1, 1, None, 200, 2) as writer:
        plain = start(plain_layout.read_everything, ring_in(writer).handle(), 0, 10, method="spawn")
        plain.hear()
        for number in range(10):
            writer.enqueue(f"needle {number}")
        received = plain.result()
        assert all(f"needle {number}".encode() in received[number] for number in range(10))
        writer.enqueue("there is room again", timeout=0)


def test_foreign_release_is_noticed() -> None:
    """A blocked writer notices within 100 ms a flag whose writer wakes nobody."""
    with MessageQueue(1, 1, None, 64, 2) as writer:
        plain = start(
            plain_layout.release_on_cue, ring_in(writer).handle(), 0, ROUNDS, method="spawn"
        )
        plain.hear()
        fill(writer)
        ends = []
        for number in range(ROUNDS):
            blocked = Aside(writer.enqueue, number).until_blocked()
            plain.tell("release")
            blocked.result()
            ends.append(blocked.ended)
        assert median_delay(plain.result(), ends) <= NOTICED


def test_our_reader_gets_every_chunk_of_a_foreign_writer() -> None:
    """acquire_read yields its bytes, over many laps, in order."""
    parts = [bytes([number]) * 40 for number in range(40)]
    with queue_of(2, max_chunk_bytes=40, max_chunks=3, ready=False) as (writer, (reader, other)):
        plain = start(
            plain_layout.write_everything, ring_in(writer).handle(), parts, method="spawn"
        )
        plain.hear()
        for part in parts:
            for end in (reader, other):
                with end.acquire_read(timeout=PATIENCE) as chunk:
                    assert bytes(chunk) == part
        plain.result()
        assert drain(reader) == []


def test_foreign_chunks_are_no_messages() -> None:
    """dequeue of what a foreign process wrote is CorruptMessage, and releases the chunk."""
    with queue_of(max_chunk_bytes=64, max_chunks=2, ready=False) as (writer, (reader,)):
        parts = [b"\x80\x05N.", b"", b"\xff" * 64, b"x"] * 3
        plain = start(
            plain_layout.write_everything, ring_in(writer).handle(), parts, method="spawn"
        )
        plain.hear()
        for number in range(len(parts)):
            with refuses(ValueError) as caught:
                reader.dequeue(timeout=PATIENCE)
            assert isinstance(caught.value, CorruptMessage)
            assert reader.current_idx == (number + 1) % 2
        plain.result()
        assert flags(ring_in(writer), 0) == flags(ring_in(writer), 1) == [1, 1]


def test_foreign_write_is_noticed() -> None:
    """A blocked reader notices within 100 ms a flag whose writer wakes nobody."""
    with queue_of(max_chunk_bytes=64, max_chunks=2, ready=False) as (writer, (reader,)):
        plain = start(plain_layout.write_on_cue, ring_in(writer).handle(), ROUNDS, method="spawn")
        plain.hear()
        ends = []
        for number in range(ROUNDS):
            blocked = Aside(byte_of, reader).until_blocked()
            plain.tell("write")
            value, moment = blocked.result()
            assert value == number
            ends.append(moment)
        assert median_delay(plain.result(), ends) <= NOTICED


@pytest.mark.parametrize("silence", [0.95, 1.3, 1.7])  # longer slices would have begun by then
@pytest.mark.parametrize("is_first", [True, False])
def test_foreign_write_after_a_silence_is_noticed(silence: float, is_first: bool) -> None:
    """However long the reader waits: while no writer of memlane's was there, and from the first
    foreign message on."""
    with ring_of(1, 64, 2) as ring:
        handle = Handle([0], ring.handle(), queue_id=ring.handle()[3].removeprefix("memlane-"))
        with MessageQueue.create_from_handle(handle, 0) as reader:
            count = 1 if is_first else 2
            plain = start(plain_layout.write_on_cue, ring.handle(), count, method="spawn")
            plain.hear()
            if not is_first:
                plain.tell("write")
                byte_of(reader)
            blocked = Aside(byte_of, reader)
            time.sleep(silence)  # the time is what is tested
            plain.tell("write")
            _, moment = blocked.result()
            assert_in_time(NOTICED * 1.5, plain.result()[-1], moment)  # and what waking up takes


@pytest.mark.parametrize("geometry", [(1, 10, 1), (3, 33, 5)])
def test_a_foreign_process_and_a_ring_see_the_same_bytes(geometry: tuple[int, int, int]) -> None:
    """get_data and get_metadata show the bytes that a plain mapping wrote."""
    with ring_of(*geometry) as ring:
        parts = [bytes([number + 1]) * geometry[1] for number in range(geometry[2])]
        start(plain_layout.write_everything, ring.handle(), parts, method="spawn").join()
        other = ShmRingBuffer(*ring.handle())
        for number, part in enumerate(parts):
            assert flags(other, number) == [1] + [0] * geometry[0]
            with other.get_data(number) as data:
                assert bytes(data) == part
        other.close()
