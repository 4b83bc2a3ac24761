"""Gather: many writers, one reader."""

import asyncio
import gc
import os
import resource
import select
import signal
import threading
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from memlane import (
    Cancelled,
    Closed,
    ConcurrentUse,
    Gather,
    GatherHandle,
    InvalidArgument,
    InvalidType,
    MessageQueue,
    RankTaken,
    ReaderDied,
    TimedOut,
    WriterClosed,
    WriterDied,
    WrongProcess,
    WrongRole,
    first_ready,
    inspect,
)
from memlane.broadcast import gather as module
from tests.support import (
    PATIENCE,
    Aside,
    Link,
    Remote,
    assert_in_time,
    eventually,
    start,
    until,
)
from tests.support.gathers import gather_of, writing
from tests.support.queues import BOUND, SHM, queue_of, refuses, segments


def start_writer(reader: Gather, rank: int, method: str = "fork") -> Remote:
    """An attached writer in its own process."""
    return Remote(start(writing, reader.export_handle(rank), method=method))


def counting(_link: Link, handle: GatherHandle, count: int, size: int) -> None:
    """Role: sends so many numbered messages."""
    with Gather.create_from_handle(handle, handle.rank) as writer:
        writer.wait_until_ready(PATIENCE)
        for number in range(count):
            writer.enqueue((handle.rank, number, bytes(size)), PATIENCE)


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("sleeps", [True, False], ids=["one sleep", "a descriptor each"])
def test_messages_of_each_writer_arrive_in_order(
    size: int, sleeps: bool, method: str, monkeypatch: Any
) -> None:
    """From four processes; also where the system has no futex_waitv."""
    if not sleeps:
        monkeypatch.setattr(module._Reader, "SLEEPS", False)
    with Gather(4, 4096, 4) as reader:
        handles = [reader.export_handle(rank) for rank in range(4)]
        peers = [start(counting, handle, 200, size, method=method) for handle in handles]
        reader.wait_until_ready(PATIENCE, processes=peers)
        assert not segments()
        latest = [-1] * 4
        for rank, number, body in reader:
            assert number == latest[rank] + 1
            assert len(body) == size
            latest[rank] = number
        assert latest == [199] * 4
        with refuses(WriterClosed):
            reader.dequeue()
    for peer in peers:
        assert peer.join() == 0


def test_writers_are_served_in_turn() -> None:
    """Nobody is served twice while another one waits."""
    with gather_of(3, max_chunks=4) as (reader, writers):
        for number in range(4):
            for rank, writer in enumerate(writers):
                writer.enqueue((rank, number))
        got = [reader.dequeue(0) for _ in range(12)]
        assert [rank for rank, _ in got] == [0, 1, 2] * 4
        writers[2].enqueue("a")
        writers[2].enqueue("b")
        writers[0].enqueue("c")
        assert [reader.dequeue(0) for _ in range(3)] == ["c", "a", "b"]


def test_timeout_and_cancel_end_a_wait() -> None:
    """`timeout` and `cancel` are those of a queue."""
    with gather_of(3) as (reader, writers):
        with refuses(TimedOut, match="timed out after 0 s; none of 3 writers has sent a message"):
            reader.dequeue(0)
        before = time.monotonic()
        with refuses(TimedOut):
            reader.dequeue(0.1)
        assert_in_time(BOUND, before)
        assert time.monotonic() - before >= 0.1
        event = threading.Event()
        waiting = Aside(reader.dequeue, None, event).until_blocked()
        event.set()
        with refuses(Cancelled):
            waiting.result()
        writers[1].enqueue("first")
        assert reader.dequeue(0, event) == "first"  # what is there wins
        for rank in (2, 0, 1):
            waiting = Aside(reader.dequeue).until_blocked()
            writers[rank].enqueue(rank)
            assert waiting.result() == rank


def test_a_writer_waits_for_room() -> None:
    """In its own ring: the others go on."""
    with gather_of(2, max_chunks=2) as (reader, writers):
        for number in range(2):
            writers[0].enqueue(number)
        with refuses(TimedOut):
            writers[0].enqueue(2, timeout=0.05)
        writers[1].enqueue("beside")
        sending = Aside(writers[0].enqueue, 2).until_blocked()
        assert [reader.dequeue(0) for _ in range(2)] == [0, "beside"]
        sending.result()
        assert [reader.dequeue(0) for _ in range(2)] == [1, 2]


def test_a_dead_writer_raises_until_it_is_released(method: str) -> None:
    """After its messages, every call raises until it is released; then the others go on."""
    with Gather(3, 4096, 4, name="all") as reader:
        writers = [start_writer(reader, rank, method) for rank in range(3)]
        reader.wait_until_ready(PATIENCE)
        writers[1].call("enqueue", "last words")
        waiting = None
        assert reader.dequeue(PATIENCE) == "last words"
        writers[1].call("enqueue", "really")
        with refuses(InvalidArgument, match="writer 1 is running"):
            reader.release_writer(1)
        writers[1].peer.kill()
        assert reader.dequeue(PATIENCE) == "really"
        waiting = Aside(reader.dequeue)
        killed = time.monotonic()
        with refuses(
            WriterDied, match=r"writer 1 \(pid \d+\) died after 2 messages of gather all,"
        ) as caught:
            waiting.result()
        assert_in_time(BOUND, killed)
        assert (caught.value.rank, caught.value.pid) == (1, writers[1].pid)
        writers[0].call("enqueue", "waits")
        for _ in range(2):
            with refuses(WriterDied, match=r"call release_writer\(1\) to continue without it"):
                reader.dequeue(PATIENCE)
        states = [writer.state for writer in reader.statistics().writers]
        assert states == ["running", "dead", "running"]
        reader.release_writer(1)
        reader.release_writer(1)
        assert reader.dequeue(PATIENCE) == "waits"
        writers[0].call("close")
        writers[2].call("enqueue", "the last one")
        writers[2].call("close")
        assert list(reader) == ["the last one"]


def test_writers_learn_that_the_reader_died() -> None:
    """Writers are told."""
    peer = start(gathering)
    handle = peer.hear()
    with Gather.create_from_handle(handle, 0) as writer:
        writer.enqueue("one")
        peer.kill()
        for _ in range(2):
            with refuses(ReaderDied, match="it was the reader, so nobody gathers") as caught:
                while True:
                    writer.enqueue("more", timeout=PATIENCE)
            assert caught.value.pid == peer.pid
        with refuses(ReaderDied):
            writer.wait_until_ready(PATIENCE)
    assert not segments()


def gathering(link: Link) -> None:
    reader = Gather(1, 64, 2)
    link.tell(reader.export_handle(0))
    link.hear()


def test_who_is_absent() -> None:
    """It is named, can be released, and a process that ends before it attaches is reported."""
    with gather_of(3, ready=False) as (reader, writers):
        reader.wait_until_ready(PATIENCE)
        assert len(writers) == 3
    with Gather(3, 64, 2) as reader, ExitStack() as stack:
        writer = Gather.create_from_handle(reader.export_handle(1), 1)
        stack.callback(writer.close)
        names = r"writer 0 \(never attached\), writer 2 \(never attached\)"
        with refuses(TimedOut, match=f"timed out after 0.05 s waiting for {names}"):
            reader.wait_until_ready(0.05)
        peer = start(lambda _link: None)
        peer.join()
        with refuses(ReaderDied, match=f"process {peer.pid} died before it attached"):
            reader.wait_until_ready(PATIENCE, processes=[peer.pid])
        doomed = start_writer(reader, 0)
        doomed.peer.kill()
        with refuses(WriterDied) as caught:  # although another is absent
            reader.wait_until_ready(PATIENCE)
        assert (caught.value.rank, caught.value.pid) == (0, doomed.pid)
        reader.release_writer(0)
        reader.release_writer(2)
        reader.wait_until_ready(0)
        assert not segments()
        writer.enqueue("here")
        assert reader.dequeue(0) == "here"
        with refuses(InvalidArgument, match="writer 0 has closed or was released"):
            reader.export_handle(0)


def test_a_death_is_the_right_one() -> None:
    """The error names the writer that died, though the wait was for another."""
    with Gather(2, 64, 2) as reader:
        doomed = start_writer(reader, 0)
        waiting = Aside(reader.wait_until_ready, PATIENCE)
        doomed.peer.kill()
        with refuses(WriterDied) as caught:
            waiting.result()
        assert (caught.value.rank, caught.value.pid) == (0, doomed.pid)


def test_wrong_use_is_refused() -> None:
    """Is refused, and changes nothing."""
    for count in (0, -1, 5000):
        with refuses(InvalidArgument):
            Gather(count)
    with refuses(InvalidType):
        Gather("2")  # type: ignore[arg-type]
    with gather_of(2, ready=False) as (reader, writers):
        handle = reader.export_handle(0)
        with refuses(RankTaken, match="writer 0 cannot attach"):
            Gather.create_from_handle(handle, 0)
        with refuses(InvalidArgument, match="this handle is writer 0's, not writer 1's"):
            Gather.create_from_handle(handle, 1)
        with refuses(InvalidArgument, match="no writer 2"):
            reader.export_handle(2)
        with refuses(InvalidArgument, match="no writer 7"):
            reader.release_writer(7)
        with refuses(InvalidType):
            Gather.create_from_handle(writers[0], 0)  # type: ignore[arg-type]
        for call in (reader.enqueue, writers[0].release_writer, writers[0].export_handle):
            with refuses(WrongRole):
                call(0)
        for call in (writers[0].dequeue, writers[0].fileno, lambda: iter(writers[0])):
            with refuses(WrongRole):
                call()
        writers[1].enqueue(1)
        assert reader.dequeue(0) == 1
    for call in (reader.dequeue, reader.statistics, lambda: writers[0].enqueue(1)):
        with refuses(Closed):
            call()
    reader.close()
    assert "closed" in repr(reader)


def test_text_that_is_no_handle_is_refused() -> None:
    """Text that no gather has written is refused."""
    with Gather(1, 64, 2, serializer="msgpack") as reader:
        handle = reader.export_handle(0)
        text = handle.to_json()
        assert GatherHandle.from_json(text) == handle
        changed = text.replace('"rank":0', '"rank":-1'), text.replace("msgpack", "x")
        for wrong in ("", "{}", *changed):
            with refuses(ValueError):
                GatherHandle.from_json(wrong)
        with Gather.create_from_handle(GatherHandle.from_json(text), 0) as writer:
            writer.enqueue({"a": 1})
            assert reader.dequeue(0) == {"a": 1}
            with refuses(InvalidType):
                writer.enqueue(object())


def test_a_place_is_for_one_writer() -> None:
    """A second writer at the place of one that has ended would continue its numbers from
    anywhere."""
    with Gather(1, 64, 4) as reader:
        handle = reader.export_handle(0)
        with Gather.create_from_handle(handle, 0) as writer:
            writer.enqueue(1)
        with refuses(RankTaken, match="which has left it"):
            Gather.create_from_handle(handle, 0)
        assert list(reader) == [1]


def test_a_message_that_cannot_be_decoded_is_consumed() -> None:
    """A message that cannot be decoded is consumed; the others are there."""
    with gather_of(2) as (reader, writers):
        writers[0].enqueue(Broken(TimedOut("of its own", 0.0)))
        writers[0].enqueue("next")
        with pytest.raises(TimedOut, match="of its own"):
            reader.dequeue(PATIENCE)
        assert reader.dequeue(0) == "next"
        for error in (ValueError("its own"), WriterClosed("its own"), WriterDied(7, " its own")):
            writers[1].enqueue(Broken(error))
            with pytest.raises(type(error), match="its own"):
                reader.dequeue(PATIENCE)
        writers[1].enqueue("goes on")
        assert reader.dequeue(PATIENCE) == "goes on"


class Broken:
    """Raises while it is decoded."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return raising, (self.error,)


def raising(error: Exception) -> None:
    raise error


def test_a_call_of_a_second_thread_is_refused() -> None:
    """One at a time; the other is refused, also where a message is there for it."""
    with gather_of(2) as (reader, writers):
        waiting = Aside(reader.dequeue).until_blocked()
        with refuses(ConcurrentUse):
            reader.dequeue(0)
        writers[0].enqueue("one")
        assert waiting.result() == "one"
        writers[1].enqueue(Slow())  # whose turn it is
        writers[0].enqueue("beside")
        decoding = Aside(reader.dequeue)
        until(_is_decoding.is_set)
        with refuses(ConcurrentUse):
            reader.dequeue(0)
        _is_decoding.clear()
        decoding.result()
        assert reader.dequeue(0) == "beside"


_is_decoding = threading.Event()


class Slow:
    """Is decoded until the event is cleared."""

    def __reduce__(self) -> Any:
        return wait_there, ()


def wait_there() -> None:
    _is_decoding.set()
    until(lambda: not _is_decoding.is_set())


class Unsure:
    """Neither true nor false, the first time."""

    asked = 0

    def __bool__(self) -> bool:
        self.asked += 1
        if self.asked == 1:
            raise WriterClosed("not of this gather")
        return True


def test_an_argument_that_raises_ends_no_ring() -> None:
    with gather_of(2) as (reader, writers):
        for rank, writer in enumerate(writers):
            writer.enqueue(rank, PATIENCE)
        unsure: Any = Unsure()
        with refuses(WriterClosed):
            reader.dequeue(PATIENCE, lend=unsure)
        assert sorted(reader.dequeue(PATIENCE, lend=unsure) for _ in range(2)) == [0, 1]


def test_lent_arrays_belong_to_the_reader() -> None:
    """As of a queue: they are the reader's, and their space is used again when they are dropped."""
    with gather_of(2, max_extent_bytes=32 << 20) as (reader, writers):
        kept = []
        for number in range(20):
            writers[number % 2].enqueue(np.full(1 << 18, number))
            kept.append(reader.dequeue(PATIENCE))
            kept = kept[-2:]
        assert [int(array[0]) for array in kept] == [18, 19]
        kept[0][:] = 7
        reader.close()
        assert (kept[0] == 7).all()
        assert (kept[1] == 19).all()


def test_close_from_another_thread_ends_a_wait() -> None:
    """A waiting call raises Closed."""
    with gather_of(3) as (reader, _):
        waiting = Aside(reader.dequeue).until_blocked()
        reader.close()
        with refuses(Closed):
            waiting.result()
    gc.collect()
    assert not [name for name in os.listdir(SHM) if name.startswith("memlane-")]


async def begun(reader: Gather) -> asyncio.Task[Any]:
    """A call that is awaited, and waits."""
    before = reader.statistics().waits
    waiting = asyncio.create_task(reader.adequeue())
    await eventually(lambda: reader.statistics().waits > before)
    return waiting


def test_awaited_calls_return_what_plain_calls_do() -> None:
    """By asyncio, and by selectors: one descriptor for all writers."""

    async def play(reader: Gather, writers: list[Gather]) -> list[Any]:
        with refuses(TimedOut):
            await reader.adequeue(0.02)
        waiting = await begun(reader)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        for number in range(8):
            for writer in writers:
                await writer.aenqueue(number)
            for _ in writers:
                assert await reader.adequeue(PATIENCE) == number
        for rank in (2, 0, 1):
            waiting = await begun(reader)
            writers[rank].enqueue(rank)
            assert await waiting == rank
        for writer in writers:
            writer.enqueue("end")
            writer.close()
        return [message async for message in reader]

    with gather_of(3) as (reader, writers):
        assert asyncio.run(play(reader, writers)) == ["end"] * 3
    with gather_of(3) as (reader, writers):
        poller = select.poll()
        poller.register(reader.fileno(), select.POLLIN)
        for writer in writers:
            assert not poller.poll(200)  # nothing comes
            writer.enqueue(1)
            assert poller.poll(1000 * PATIENCE)
            assert reader.dequeue(0) == 1
            until(lambda: not poller.poll(0))


def test_first_ready_waits_for_gathers_and_queues() -> None:
    with gather_of(2) as (reader, writers), queue_of(1) as (queue, (other,)):
        both: list[Any] = [reader, other]
        with refuses(TimedOut):
            first_ready(both, 0)
        writers[1].enqueue("gathered")
        queue.enqueue("sent")
        assert {type(first_ready(both, PATIENCE)) for _ in both} == {Gather, MessageQueue}
        assert reader.dequeue() == "gathered"
        assert first_ready(both, PATIENCE) is other
        for writer in writers:
            writer.close()
        assert first_ready([reader], PATIENCE) is reader  # its end
    with gather_of(1) as (_, (writer,)), refuses(WrongRole):
        first_ready([writer], 0)


def test_the_end_is_awaited() -> None:
    """Also again, and if the last writer is released meanwhile."""

    async def play(reader: Gather, writers: list[Gather]) -> None:
        waiting = await begun(reader)
        for writer in writers:
            writer.close()
        for _ in range(3):
            with refuses(WriterClosed):
                await asyncio.wait_for(waiting, PATIENCE)
            waiting = asyncio.create_task(reader.adequeue())
        with refuses(WriterClosed):
            await waiting

    with gather_of(3) as (reader, writers):
        asyncio.run(play(reader, writers))
        with refuses(WriterClosed):
            reader.dequeue()
    with gather_of(1) as (reader, (writer,)):
        writer.close()
        with refuses(WriterClosed):
            reader.dequeue()
        with refuses(WriterClosed):
            asyncio.run(reader.adequeue(PATIENCE))
        with refuses(WriterClosed):
            reader.fileno()
    with Gather(2) as reader:
        poller = select.poll()
        poller.register(reader.fileno(), select.POLLIN)
        waiting = Aside(reader.dequeue).until_blocked()
        reader.release_writer(0)
        reader.release_writer(1)
        with refuses(WriterClosed):
            waiting.result()
        assert poller.poll(1000 * PATIENCE)


def test_the_timeout_is_one() -> None:
    """However many writers close meanwhile."""
    with gather_of(4) as (reader, writers):
        for number, writer in enumerate(writers[:3]):
            threading.Timer(0.1 * (1 + number), writer.close).start()
        before = time.monotonic()
        with refuses(TimedOut):
            reader.dequeue(0.5)
        assert_in_time(0.7, before)  # 0.8 if it began anew with the last that closed
        assert time.monotonic() - before >= 0.5


def sending_for_ever(_link: Link, handle: GatherHandle) -> None:
    with Gather.create_from_handle(handle, handle.rank) as writer:
        while True:
            writer.enqueue("busy")


def test_a_death_beside_a_busy_writer_is_reported_in_a_second() -> None:
    """Is told within a second, though there is always another message."""
    with Gather(2, 4096, 16) as reader:
        busy = start(sending_for_ever, reader.export_handle(0))
        doomed = start_writer(reader, 1)
        reader.wait_until_ready(PATIENCE)
        doomed.peer.kill()
        killed = time.monotonic()
        with refuses(WriterDied, match="writer 1"):
            while True:
                reader.dequeue(PATIENCE)
        assert_in_time(BOUND, killed)
        busy.kill()


def test_what_the_dead_had_sent() -> None:
    """Is not lost by a release that comes too early."""
    with Gather(2, 4096, 4) as reader:
        doomed = start_writer(reader, 0)
        doomed.call("enqueue", "one")
        doomed.call("enqueue", "two")
        doomed.peer.kill()
        until(lambda: reader.statistics().writers[0].state == "dead")
        with refuses(InvalidArgument, match="has sent messages that were not read"):
            reader.release_writer(0)
        assert [reader.dequeue(PATIENCE) for _ in range(2)] == ["one", "two"]
        with refuses(WriterDied):
            reader.dequeue(PATIENCE)
        reader.release_writer(0)
        reader.release_writer(1)
        with refuses(WriterClosed):
            reader.dequeue(PATIENCE)


def in_a_child(_link: Link, reader: Gather) -> None:
    for call in (lambda: reader.dequeue(0), lambda: reader.wait_until_ready(0), reader.statistics):
        with refuses(WrongProcess):
            call()
    reader.close()


def test_a_forked_child_may_only_close_it() -> None:
    """May only close it."""
    with gather_of(2) as (reader, writers):
        time.sleep(0.3)  # the time is what is tested: the next call looks for deaths in passing
        start(in_a_child, reader).result()
        writers[0].enqueue("here")
        assert reader.dequeue(PATIENCE) == "here"
    with refuses(Closed):
        reader.wait_until_ready(0)


def test_whatever_else_raises() -> None:
    """A `cancel` of the user's, and a message that is decoded again: no end of a writer."""

    class Cancel:
        def is_set(self) -> bool:
            raise WriterDied(7, " its own")

    with gather_of(2) as (reader, writers):
        with pytest.raises(WriterDied, match="its own"):
            reader.dequeue(PATIENCE, Cancel())  # type: ignore[arg-type]
        writers[0].enqueue(Twice())
        writers[0].enqueue("next")
        with pytest.raises(KeyboardInterrupt):
            reader.dequeue(PATIENCE)
        with pytest.raises(WriterClosed, match="its own"):
            reader.dequeue(PATIENCE)
        assert reader.dequeue(PATIENCE) == "next"
        with refuses(InvalidType):
            reader.dequeue("soon")  # type: ignore[arg-type]
        with refuses(InvalidType):
            reader.dequeue(0, 5)  # type: ignore[arg-type]


class Twice:
    """Is interrupted while it is decoded, then raises."""

    def __reduce__(self) -> Any:
        return again, ()


_decoded: list[int] = []


def again() -> None:
    _decoded.append(1)
    raise KeyboardInterrupt if len(_decoded) == 1 else WriterClosed("its own")


def test_statistics_count_messages_and_lag() -> None:
    """Both roles count the same."""
    with gather_of(2) as (reader, writers):
        for number in range(3):
            writers[1].enqueue(number)
        reader.dequeue()
        rows = reader.statistics().writers
        assert [(row.rank, row.pid, row.behind) for row in rows] == [
            (0, os.getpid(), 0),
            (1, os.getpid(), 2),
        ]
        assert reader.statistics().messages == 1
        with refuses(InvalidArgument, match="writer 0 is running"):
            reader.release_writer(0)
        assert (writers[1].statistics().messages, writers[1].statistics().writers) == (3, ())
        writers[0].close()
        for expected in (1, 2):
            assert reader.dequeue() == expected
        writers[1].enqueue("last")
        writers[1].close()
        before = reader.statistics()
        assert list(reader) == ["last"]
        after = reader.statistics()
        assert (before.messages, after.messages) == (3, 4)
        assert after.bytes > before.bytes


def test_a_sleeping_reader_is_seen() -> None:
    """Its wait counts once, however many writers it has."""
    with gather_of(3) as (reader, writers):
        sleeper = Aside(reader.dequeue, PATIENCE)
        names = {f"memlane-{ring.id.hex()}" for ring in reader._reader.rings}  # type: ignore[union-attr]

        def waiting() -> int:
            rings = [segment for segment in inspect.segments() if segment.name in names]
            return sum(ring.participants[1].activity == "waiting" for ring in rings)

        until(lambda: waiting() == 3, "it is shown in every ring")
        writers[2].enqueue("here")
        assert sleeper.result() == "here"
        assert waiting() == 0
        assert reader.statistics().waits == 1


def releasing_among_many_files(link: Link) -> None:
    """Role: a reader with more than 1024 descriptors releases a child that it has not reaped."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with Gather(1, 4096, 4) as gather:
        handle = gather.export_handle(0)
        child = os.fork()
        if child == 0:
            Gather.create_from_handle(handle).enqueue("here")
            os.kill(os.getpid(), signal.SIGKILL)
        assert gather.dequeue(PATIENCE) == "here"
        files = [os.dup(0) for _ in range(1100)]
        with pytest.raises(WriterDied):
            gather.dequeue(PATIENCE)
        gather.release_writer(0)
        os.waitpid(child, 0)
        for file in files:
            os.close(file)


def test_a_writer_is_released_in_a_process_with_many_files() -> None:
    start(releasing_among_many_files).result()


def test_a_gather_that_is_closed_while_a_writer_dies() -> None:
    """Its call says that it is closed: nobody could release that writer any more."""
    with gather_of(1) as (gather, _):
        end = gather._reader
        assert end is not None

        class Dying:
            ended = 0

            def __getitem__(self, _how: object) -> None:
                gather.close()
                raise WriterDied(1, "")

        end._gather = Dying()  # type: ignore[assignment]
        with pytest.raises(Closed):
            gather.dequeue(PATIENCE)
