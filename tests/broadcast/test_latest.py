"""`mode="latest"`: the writer never waits, and a reader gets the latest message that it lacks."""

import asyncio
import gc
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from memlane import (
    CorruptMessage,
    Handle,
    InvalidArgument,
    InvalidType,
    LayoutMismatch,
    MessageQueue,
    OutOfMemory,
    ReaderDied,
    ShmExhausted,
    ShmRingBuffer,
    TimedOut,
    Unsupported,
    ViewInUse,
    WriterClosed,
    WriterDied,
    WrongRole,
    inspect,
)
from tests.support import (
    PATIENCE,
    Link,
    assert_in_time,
    eventually,
    private_shm,
    start,
    unshare_refusal,
    until,
)
from tests.support.queues import (
    BOUND,
    drain,
    path_of,
    queue_of,
    refuses,
    ring_in,
    segments,
    start_reader,
    start_writer,
)

SIZES = [10, 5000, 100_000, 1 << 20, 3 << 20]
"""Bytes of arrays: in the stream, in a chunk, in an extent, and lent."""


def frame(number: int, size: int) -> np.ndarray[Any, Any]:
    return np.full(size, number % 251, np.uint8)


def is_whole(array: np.ndarray[Any, Any], number: int) -> bool:
    return bool((array == number % 251).all())


def test_the_latest_is_read() -> None:
    with queue_of(2, mode="latest") as (writer, (one, two)):
        with refuses(TimedOut):
            one.dequeue(0)
        writer.enqueue(0)
        assert drain(one) == [0]
        for number in range(1, 30):
            writer.enqueue(number, timeout=0)
        assert drain(one) == [29]
        assert drain(two) == [29]
        writer.enqueue(30)
        assert drain(two) == [30]
        assert (one.skipped, two.skipped) == (28, 29)
        seen = writer.statistics()
        assert (seen.messages, seen.waits, seen.skipped) == (31, 0, 0)
        assert [(row.skipped, row.behind) for row in seen.readers] == [(28, 1), (29, 0)]
        mine = two.statistics()
        assert (mine.messages, mine.skipped) == (2, 29)


def test_who_attaches_before_it_is_ready() -> None:
    """Gets what was sent before, as in any queue; of the latest that is one message."""
    with queue_of(1, mode="latest", ready=False) as (writer, (reader,)):
        writer.enqueue("first")
        writer.enqueue("second")
        writer.wait_until_ready(PATIENCE)
        assert drain(reader) == ["second"]


@pytest.mark.parametrize("kept", [1, 2, 5, 40])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_kept_does_not_change(size: int, kept: int) -> None:
    """Lent arrays and views, many more than there are chunks: the writer does not wait."""
    with queue_of(2, mode="latest", max_chunk_bytes=1 << 16, max_extent_bytes=64 << 20) as (
        writer,
        readers,
    ):
        lent, views = [], []
        for number in range(kept):
            writer.enqueue(frame(number, size), timeout=0)
            lent.append(readers[0].dequeue(0))
            with suppress(ViewInUse), readers[1].dequeue_view(0) as view:
                views.append(view[:])
        for number in range(100, 130):
            writer.enqueue(frame(number, size), timeout=0)
        for number in range(kept):
            assert is_whole(lent[number], number)
            assert is_whole(views[number], number)
        for reader in readers:
            assert is_whole(reader.dequeue(0), 129)
        assert writer.statistics().waits == 0
        del lent, views, view
        for number in range(30):
            writer.enqueue(frame(number, size), timeout=0)
        assert sum(row.views for row in writer.statistics().readers) == 0


def test_a_view_that_no_extent_can_keep() -> None:
    """Without a pool nothing is lent, and a view is a private copy."""
    with queue_of(mode="latest", max_extent_bytes=0) as (writer, (reader,)):
        kept = []
        for number in range(20):
            writer.enqueue(frame(number, 9000), timeout=0)
            with reader.dequeue_view(0) as view:
                kept.append(view)
        assert all(is_whole(array, number) for number, array in enumerate(kept))


def test_a_chunk_that_is_kept_stays_as_it_is() -> None:
    """A chunk that a reader keeps stays as it is; once all are kept there is none to write to."""
    with queue_of(mode="latest", max_chunk_bytes=64, max_chunks=1) as (writer, (reader,)):
        assert ring_in(writer).max_chunks == 3
        assert writer.current_idx == reader.current_idx == -1
        kept = []
        for number in range(2):
            with writer.acquire_write(0) as chunk:
                chunk[:8] = number.to_bytes(8, "little")
            with refuses(ViewInUse), reader.acquire_read(0) as chunk:
                kept.append(chunk[:8])
        with writer.acquire_write(0) as chunk:
            chunk[:8] = b"third..."
        with refuses(ViewInUse, match="views keep"), writer.acquire_write(0):
            pass
        writer.enqueue("an extent", timeout=0)
        assert [int.from_bytes(view, "little") for view in kept] == [0, 1]
        assert drain(reader) == ["an extent"]
        with writer.acquire_write(0) as third:  # one more is free
            third[:5] = b"third"
        with refuses(ViewInUse), reader.acquire_read(0) as third:
            kept.append(third[:5])
        writer.enqueue("in an extent", timeout=0)
        with refuses(CorruptMessage, match="in no chunk"), reader.acquire_read(0):
            pass
        assert bytes(kept.pop()) == b"third"
        del chunk, third
        kept.clear()
        with writer.acquire_write(0) as chunk:
            chunk[:6] = b"fourth"
        with refuses(CorruptMessage):
            reader.dequeue(0)
        with writer.acquire_write(0) as chunk:
            chunk[:5] = b"fifth"
        with reader.acquire_read(0) as chunk:
            assert bytes(chunk[:5]) == b"fifth"


def test_a_block_that_raises() -> None:
    with queue_of(mode="latest") as (writer, (reader,)):
        writer.enqueue("before")
        with pytest.raises(ZeroDivisionError), writer.acquire_write(0) as chunk:
            chunk[0] = 1 // 0
        assert drain(reader) == ["before"]
        writer.enqueue("after")
        assert drain(reader) == ["after"]


class Undecodable:
    """An object whose decoding fails as often as it says."""

    failures = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__dict__.update(state)
        if Undecodable.failures:
            Undecodable.failures -= 1
            raise MemoryError


@pytest.mark.parametrize(("size", "expected"), [(10, [1, 8]), (1 << 20, [8])])
def test_a_message_that_cannot_be_decoded(size: int, expected: list[int]) -> None:
    """A small one, of which there is a copy, is the next one again; a large one only if there is
    none that is later."""
    with queue_of(mode="latest") as (writer, (reader,)):
        writer.enqueue((Undecodable(1), bytes(size)))
        Undecodable.failures = 1
        with refuses(OutOfMemory):
            reader.dequeue(0)
        for number in range(2, 9):
            writer.enqueue((Undecodable(number), bytes(size)), timeout=0)
        seen = [message[0].number for message in drain(reader)]  # type: ignore[index]
        assert seen == expected
        assert reader.skipped == 8 - len(seen)


@pytest.mark.parametrize("mode", ["all", "latest"])
@pytest.mark.parametrize("again", ["dequeue", "dequeue_view"])
@pytest.mark.parametrize("first", ["dequeue", "dequeue_view"])
@pytest.mark.parametrize("size", [30_000, 1 << 20])
def test_what_a_failed_decoding_leaves_behind(size: int, first: str, again: str, mode: str) -> None:
    """An array of its traceback ends before the one of the next call, which stays as it is."""
    with queue_of(mode=mode, max_chunk_bytes=1 << 16, max_chunks=3) as (writer, (reader,)):

        def take(how: str) -> Any:
            if how == "dequeue":
                return reader.dequeue(0)[0]
            array = None
            with suppress(ViewInUse), reader.dequeue_view(0) as view:
                array = view[0]
            return array

        writer.enqueue((frame(1, size), Undecodable(1)))
        Undecodable.failures = 1
        with refuses(OutOfMemory) as caught:
            take(first)
        array = take(again)
        del caught
        gc.collect()
        for number in range(2, 30):
            with suppress(TimedOut):
                writer.enqueue((frame(number, size), Undecodable(number)), timeout=0)
            if mode == "all":
                with suppress(TimedOut, ViewInUse):
                    reader.dequeue(0)
        assert is_whole(array, 1)


class Stashing:
    """An object whose decoding fails once it has put its array where others find it."""

    found: ClassVar[list[Any]] = []

    def __init__(self, array: Any) -> None:
        self.array = array

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.array = state["array"]
        Stashing.found.append(self.array)
        if Undecodable.failures:
            Undecodable.failures -= 1
            raise MemoryError


@pytest.mark.parametrize("again", ["dequeue", "dequeue_view", "dropped view", "acquire_read"])
@pytest.mark.parametrize("size", [9000, 100_000, 3 << 20])
@pytest.mark.parametrize("mode", ["all", "latest"])
def test_an_escaped_array_stays_as_it_is(size: int, again: str, mode: str) -> None:
    """Stays as it is, until it is dropped, whatever takes the message then."""
    with queue_of(mode=mode, max_chunk_bytes=1 << 16, max_chunks=3) as (writer, (reader,)):
        Stashing.found.clear()
        writer.enqueue(Stashing(frame(1, size)))
        Undecodable.failures = 1
        with refuses(OutOfMemory), reader.dequeue_view(0):
            pass
        (stored,) = Stashing.found
        kept: list[Any] = []
        if again == "dequeue":
            kept.append(reader.dequeue(0).array)
        elif again == "acquire_read":
            with suppress(ViewInUse, CorruptMessage), reader.acquire_read(0):
                pass
        else:
            with suppress(ViewInUse), reader.dequeue_view(0) as view:
                kept.append(view.array)
            del view
            if again == "dropped view":
                kept.clear()
        del Stashing.found[1:]
        for number in range(2, 12):
            with suppress(TimedOut):
                writer.enqueue(frame(number, size), timeout=0)
            with suppress(TimedOut, ViewInUse):
                reader.dequeue(0)
            assert is_whole(stored, 1)
            assert all(is_whole(array, 1) for array in kept)
        del stored
        kept.clear()
        Stashing.found.clear()
        for number in range(12, 30):
            with suppress(TimedOut):
                reader.dequeue(0)
            writer.enqueue(frame(number, size), timeout=PATIENCE)
        assert writer.statistics().readers[0].views == 0


@pytest.mark.parametrize("newer", [0, 9])
@pytest.mark.parametrize("how", ["dequeue", "dequeue_view"])
@pytest.mark.parametrize("size", [9000, 100_000, 1 << 20])
def test_an_array_that_escapes_a_failed_decoding_stays_as_it_is(
    size: int, how: str, newer: int
) -> None:
    """Stays as it is, whatever comes, and so does what the next call returns."""
    with queue_of(mode="latest", max_chunk_bytes=1 << 16, max_chunks=1) as (writer, (reader,)):

        def take() -> Any:
            if how == "dequeue":
                return reader.dequeue(0).array
            array = None
            with suppress(ViewInUse), reader.dequeue_view(0) as view:
                array = view.array
            return array

        def send(numbers: range) -> None:
            for number in numbers:
                writer.enqueue(Stashing(frame(number, size)), timeout=0)

        Stashing.found.clear()
        send(range(1, 2))
        Undecodable.failures = 1
        with refuses(OutOfMemory):
            take()
        stored = Stashing.found[0]
        expected = 1 if how == "dequeue" else 1 + newer  # of which there is a private copy
        send(range(2, 2 + newer))
        assert is_whole(stored, 1)
        array = take()
        send(range(50, 60))
        assert is_whole(stored, 1)
        assert is_whole(array, expected)
        Stashing.found.clear()
        del stored
        send(range(60, 80))
        assert is_whole(array, expected)
        del array
        send(range(80, 90))
        assert writer.statistics().readers[0].views == 0
        Stashing.found.clear()


def crowded(_link: Link, keeps: str) -> tuple[list[int], int]:
    """Role: most of /dev/shm is another's, so that nothing is lent. Returns what was read."""
    Path("/dev/shm/another").write_bytes(bytes(20 << 20))
    with queue_of(2, mode="latest", max_chunk_bytes=4096) as (writer, (reader, keeper)):
        kept: list[Any] = []
        numbers = []
        for number in range(8):
            writer.enqueue(frame(number, 3 << 20), timeout=0)
            if number == 0 and keeps == "view":
                with suppress(ViewInUse), keeper.dequeue_view(0) as view:
                    kept.append(view[:])
            if number == 0 and keeps == "lent":
                kept.append(keeper.dequeue(0))
            array = reader.dequeue(0)
            assert is_whole(array, number)
            numbers.append(int(array[0]))
            assert all(is_whole(old, 0) for old in kept)
            del array
        return numbers, writer.statistics().waits


@pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
@pytest.mark.parametrize("keeps", ["nothing", "view", "lent"])
def test_messages_that_do_not_fit_a_chunk_arrive(keeps: str) -> None:
    """A message that does not fit a chunk is written, read and kept all the same."""
    peer = start(crowded, keeps, method="spawn", command=private_shm("40m"))
    assert peer.result() == ([*range(8)], 0)


def full(_link: Link) -> str:
    """Role: keeps views while another takes the rest of /dev/shm; says what the error says."""
    with queue_of(2, mode="latest", max_chunk_bytes=1 << 16, max_chunks=1) as (writer, readers):
        kept = []
        for number in range(20):
            writer.enqueue(frame(number, 60_000), timeout=0)
            with suppress(ViewInUse), readers[0].dequeue_view(0) as view:
                kept.append(view[:])
        with suppress(OSError), open("/dev/shm/another", "wb", buffering=0) as another:
            while another.write(bytes(1 << 16)):
                pass
        with refuses(ShmExhausted) as caught:
            for number in range(400):
                writer.enqueue(frame(number, 1 << 20), timeout=0)
        assert all(is_whole(array, number) for number, array in enumerate(kept))
        (holder,) = caught.value.holders
        assert holder.rank == 0
        assert 1 << 20 < holder.lent_bytes + holder.viewed_bytes < 2 << 20
        text = str(caught.value)
        del caught, kept, view
        writer.enqueue(frame(7, 1 << 19), timeout=0)
        assert is_whole(readers[1].dequeue(0), 7)
        assert writer.statistics().waits == 0
        return text


@pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
def test_the_error_of_a_full_file_system_names_who_keeps_what() -> None:
    """Is an error that names who keeps what, and goes when they drop it. No call waits."""
    peer = start(full, method="spawn", command=private_shm("8m"))
    assert "reader 0" in peer.result()


def test_a_sleeper_is_woken(method: str) -> None:
    with MessageQueue(1, 1, mode="latest") as writer:
        reader = start_reader(writer.export_handle(0), 0, method)
        writer.wait_until_ready(PATIENCE)
        for number in range(20):
            waiting = reader.begin("dequeue").until_blocked()
            writer.enqueue(number)
            assert waiting.outcome() == number
        waiting = reader.begin("dequeue").until_blocked()
        writer.close()
        with pytest.raises(WriterClosed):
            waiting.outcome()


def test_it_is_awaited() -> None:
    async def scene(writer: MessageQueue, reader: MessageQueue) -> None:
        for number in range(20):
            coming = asyncio.create_task(reader.adequeue(PATIENCE))
            await eventually(lambda: writer.statistics().readers[0].is_waiting)
            await writer.aenqueue(number)
            assert await coming == number
        await writer.aenqueue("skipped")
        await writer.aenqueue("taken")
        writer.close()
        assert [message async for message in reader] == ["taken"]

    with queue_of(mode="latest") as (writer, (reader,)):
        asyncio.run(scene(writer, reader))


def counts(link: Link, handle: Handle, rank: int) -> tuple[int, int, int]:
    """Role: reads all that it gets, and checks it."""
    taken = last = 0
    with MessageQueue.create_from_handle(handle, rank) as reader:
        reader.wait_until_ready(PATIENCE)
        kept: list[tuple[int, np.ndarray[Any, Any]]] = []
        for number, array in reader:
            assert number > last
            assert is_whole(array, number)
            taken, last = taken + 1, number
            if rank == 1:
                kept.append((number, array))
                assert is_whole(kept[0][1], kept[0][0])
                del kept[: len(kept) - 5]
        return taken, reader.skipped, last


@pytest.mark.parametrize("size", SIZES)
def test_readers_in_other_processes_get_whole_messages(size: int) -> None:
    """A writer that sends without a pause: whoever reads gets whole messages, and the last one."""
    sent = 3000 if size < 1 << 20 else 300
    with MessageQueue(3, 3, mode="latest", max_chunk_bytes=1 << 16) as writer:
        peers = [start(counts, writer.export_handle(rank), rank) for rank in range(3)]
        writer.wait_until_ready(PATIENCE)
        for number in range(1, sent + 1):
            writer.enqueue((number, frame(number, size)), timeout=0)
        writer.close()
    for peer in peers:
        taken, skipped, last = peer.result()
        assert (taken + skipped, last) == (sent, sent)


# Ends -------------------------------------------------------------------------------------------


def test_a_reader_that_is_stopped_or_dies(method: str) -> None:
    """The writer goes on beside a stopped one; of a dead one it tells, as in any queue."""
    with MessageQueue(2, 2, None, 64, mode="latest") as writer:
        doomed = start_reader(writer.export_handle(0), 0, method)
        with MessageQueue.create_from_handle(writer.export_handle(1), 1) as other:
            writer.wait_until_ready(PATIENCE)
            writer.enqueue("skipped")
            writer.enqueue("taken")
            assert doomed.call("dequeue") == "taken"
            doomed.peer.stop()
            for number in range(500):
                writer.enqueue(number, timeout=0)
                assert drain(other) == [number]
            doomed.peer.kill()
            with refuses(ReaderDied) as caught:
                while True:
                    writer.enqueue("sent", timeout=0)
            assert (caught.value.rank, caught.value.pid) == (0, doomed.pid)
            assert "died after 1 messages" in str(caught.value)
            writer.release_reader(0)
            writer.enqueue("missed", timeout=0)
            new = start_reader(writer.readmit(0), 0, method)
            writer.wait_until_ready(PATIENCE)
            with pytest.raises(TimedOut):
                new.call("dequeue", 0)
            writer.enqueue("next", timeout=0)
            assert new.call("dequeue") == "next"
            new.call("close")


def test_late_readers_get_the_messages_from_then_on() -> None:
    """Get what is sent from then on."""
    with MessageQueue(2, 2, mode="latest", late_readers=True) as writer:
        writer.wait_until_ready(0)
        for number in range(9):
            writer.enqueue(number, timeout=0)
        for _ in range(5):
            with MessageQueue.create_from_handle(
                writer.readmit(0) if _ else writer.handle, 0
            ) as late:
                assert drain(late) == []
                for number in range(9):
                    writer.enqueue(number, timeout=0)
                assert drain(late) == [8]
                assert late.skipped == 8


def test_the_writer_dies(method: str) -> None:
    """After its latest message."""
    writer = start_writer(1, method, mode="latest")
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        writer.call("wait_until_ready", PATIENCE)
        for number in range(3):
            writer.call("enqueue", number)
        writer.peer.kill()
        assert reader.dequeue(PATIENCE) == 2
        with refuses(WriterDied):
            reader.dequeue(PATIENCE)


def test_nothing_is_left() -> None:
    """Views of ends that have closed stay; the space of all that they do not show is given back."""
    before = segments()
    with queue_of(mode="latest", max_chunk_bytes=1 << 16) as (writer, (reader,)):
        kept = []
        for number in range(2):
            writer.enqueue(frame(number, 9000))
            with refuses(ViewInUse), reader.dequeue_view(0) as view:
                kept.append(view[:])
        for number in range(3):
            writer.enqueue(frame(number, 3 << 20))
            assert is_whole(reader.dequeue(0), number)
        segment = ring_in(writer)._segment
        assert segment is not None
        file = os.open(f"/proc/self/fd/{segment.descriptor}", os.O_RDONLY)
        assert os.fstat(file).st_blocks * 512 > 3 << 20
    del view
    assert all(is_whole(array, number) for number, array in enumerate(kept))
    used = os.fstat(file).st_blocks * 512
    os.close(file)
    assert 2 * 9000 < used < 1 << 18
    assert segments() == before


def keeping(_link: Link, handle: Handle) -> None:
    """Role: keeps views of all that it gets."""
    queue = MessageQueue.create_from_handle(handle, 0)
    kept = []
    while True:
        kept.append(queue.dequeue_view(PATIENCE))
        kept[-1].__enter__()
        _link.tell()


def test_blocks_tell_of_the_dead() -> None:
    """Also if views of the dead keep every chunk."""
    with MessageQueue(1, 1, None, 1 << 16, 3, mode="latest") as writer:
        peer = start(keeping, writer.export_handle(0))
        writer.wait_until_ready(PATIENCE)
        for number in range(4):
            writer.enqueue(frame(number, 30_000))
            peer.hear()
        with refuses(ViewInUse), writer.acquire_write(0):
            pass
        killed = peer.kill()
        error: Exception | None = None
        while not isinstance(error, ReaderDied):
            try:
                with writer.acquire_write(0):
                    pass
            except (ViewInUse, ReaderDied) as raised:
                error = raised
        assert_in_time(BOUND, killed)
        writer.release_reader(0)
        with writer.acquire_write(0) as chunk:
            chunk[0] = 1


# What it refuses, and what shows it ---------------------------------------------------------------


def test_calls_that_the_latest_has_not_are_refused() -> None:
    before = segments()
    for mode, kind in ((3, InvalidType), (None, InvalidType), ("newest", InvalidArgument)):
        with refuses(kind, match="mode must be"):
            MessageQueue(1, 1, mode=mode)  # type: ignore[arg-type]
    for local in (0, 1):
        with refuses(Unsupported, match="on this host"):
            MessageQueue(2, local, mode="latest")
    assert segments() == before
    with MessageQueue(0, 0, mode="latest") as lonely:
        lonely.enqueue("nobody")
    with queue_of(mode="latest") as (writer, (reader,)):
        assert path_of(writer).exists() is False
        with refuses(WrongRole):
            writer.skipped  # noqa: B018
        assert reader.skipped == 0
    with queue_of() as (writer, (reader,)):
        writer.enqueue(1)
        assert reader.dequeue(0) == 1
        assert reader.skipped == 0


def test_its_flags_are_not_those_of_a_ring() -> None:
    with MessageQueue(1, 1, None, 64, mode="latest") as writer:
        ring = ring_in(writer)
        with refuses(LayoutMismatch, match="latest"):
            ShmRingBuffer(*ring.handle())
        assert len(ring.handle()) == 4


def test_observers_see_it() -> None:
    with queue_of(2, mode="latest") as (writer, (one, _two)):
        for number in range(5):
            writer.enqueue(number)
        assert drain(one) == [4]
        name = ring_in(writer).handle()[3]
        (seen,) = [segment for segment in inspect.segments() if segment.name == name]
        assert seen.mode == "latest"
        assert seen.geometry["max_chunks"] == 4
        written, first, second = seen.participants
        assert written.position == 5
        assert (first.position, first.skipped, first.behind) == (1, 4, 0)
        assert (second.position, second.skipped, second.behind) == (0, 0, 1)


def test_a_stopped_reader_blocks_nobody() -> None:
    """`memlane stuck` names no reader of the latest as the cause of a wait."""
    with MessageQueue(1, 1, mode="latest") as writer:
        reader = start_reader(writer.export_handle(0))
        writer.wait_until_ready(PATIENCE)
        reader.peer.stop()
        for number in range(50):
            writer.enqueue(number, timeout=0)
        name = ring_in(writer).handle()[3]
        assert [wait for wait in inspect.stuck(0) if wait.segment == name] == []
        reader.peer.resume()
        until(lambda: reader.call("dequeue", 0) == 49, "it reads again")
