"""A reader's place changes hands: `readmit`, and readers that attach late."""

import gc
import os
import random
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from memlane import (
    Handle,
    MessageQueue,
    RankTaken,
    ReaderDied,
    SegmentMissing,
    TimedOut,
    ViewInUse,
    WriterClosed,
    WrongRole,
)
from memlane import inspect as looking
from tests.support import PATIENCE, Aside, Link, Remote, start, until
from tests.support.queues import (
    drain,
    fill,
    path_of,
    queue_of,
    refuses,
    start_reader,
    start_writer,
)

SECONDS = float(os.environ.get("MEMLANE_SOAK_REPLACED", "2"))


def dies(writer: MessageQueue, reader: Remote, rank: int = 0) -> None:
    """Kills that reader, and releases it once the writer has raised."""
    reader.peer.kill()
    for _ in range(2):
        with refuses(ReaderDied) as caught:
            while True:
                writer.enqueue("never", timeout=0.01)
        assert (caught.value.rank, caught.value.pid) == (rank, reader.pid)
    writer.release_reader(rank)


@pytest.mark.parametrize("sent", range(10))
@pytest.mark.parametrize("read", [0, 1, 3])
def test_the_next_message_is_the_first(sent: int, read: int) -> None:
    """Whatever its predecessor has left, on any lap; nobody else notices."""
    with MessageQueue(2, 2, None, 64, 4) as writer:
        other = MessageQueue.create_from_handle(writer.export_handle(1), 1)
        doomed = start_reader(writer.export_handle(0))
        writer.wait_until_ready(PATIENCE)
        for number in range(sent):
            writer.enqueue(number)
            assert other.dequeue(PATIENCE) == number
            if number < max(read, sent - 3):
                assert doomed.call("dequeue") == number
        reader = doomed
        for lap in range(3):
            reader.peer.kill()
            until(lambda: writer.statistics().readers[0].state == "dead", "its lock is free")
            writer.release_reader(0)
            writer.enqueue("missed", timeout=0)
            assert other.dequeue(PATIENCE) == "missed"
            handle = writer.readmit(0)
            writer.enqueue(("kept", lap), timeout=0)
            reader = start_reader(handle)
            writer.wait_until_ready(PATIENCE)
            writer.enqueue(("next", lap), timeout=0)
            for message in (("kept", lap), ("next", lap)):
                assert reader.call("dequeue", 0) == message
                assert other.dequeue(0) == message
            for number in range(5):
                writer.enqueue(number, timeout=0)
                assert reader.call("dequeue", 0) == other.dequeue(0) == number
            with refuses(TimedOut):
                reader.call("dequeue", 0)
        reader.call("close")
        other.close()


def test_a_reader_that_has_closed() -> None:
    """Its place is taken by another process, without a release."""
    with MessageQueue(1, 1, None, 64, 2) as writer:
        for number in range(5):
            reader = start_reader(writer.readmit(0) if number else writer.export_handle(0))
            writer.wait_until_ready(PATIENCE)
            assert not path_of(writer).exists()
            fill(writer)
            assert reader.call("dequeue") == 0
            reader.call("close")


def test_a_handle_from_before_its_place_was_opened_again_is_refused() -> None:
    """A replacement that comes after it was given up does not take the place of the next one."""
    with MessageQueue(2, 2, max_chunks=8) as writer:
        other = MessageQueue.create_from_handle(writer.export_handle(1), 1)
        late = [writer.export_handle(0)]
        for _ in range(2):  # without a message between the two
            writer.release_reader(0)
            late.append(writer.readmit(0))
        present = late.pop()
        writer.enqueue("for the present one")
        for handle in late:
            for sent in (handle, Handle.from_json(handle.to_json())):
                with refuses(RankTaken, match="was opened again for another process"):
                    MessageQueue.create_from_handle(sent, 0)
        reader = MessageQueue.create_from_handle(Handle.from_json(present.to_json()), 0)
        assert reader.dequeue(0) == other.dequeue(0) == "for the present one"
        reader.close()
        other.close()


def test_every_later_handle_knows_how_often_a_place_was_opened() -> None:
    with MessageQueue(2, 2) as writer:
        for number in range(3):
            assert writer.export_handle().local_openings == (0, number)
            writer.release_reader(1)
            assert writer.readmit(1).local_openings == (0, number + 1)
        assert writer.handle.local_openings == (0, 3)
        MessageQueue.create_from_handle(writer.handle, 1).close()


def test_a_reader_is_replaced_in_the_same_process() -> None:
    """It closes while it keeps a lent array and a view; they stay as they are."""
    with queue_of(max_chunk_bytes=1 << 16, max_chunks=2) as (writer, (reader,)):
        writer.enqueue(np.full(1 << 20, 7, np.uint8))
        lent = reader.dequeue(PATIENCE)
        writer.enqueue(np.full(1 << 13, 8, np.uint8))
        with refuses(ViewInUse), reader.dequeue_view(PATIENCE) as view:
            kept = view[:]
        reader.close()
        new = MessageQueue.create_from_handle(writer.readmit(0), 0)
        for number in range(20):
            writer.enqueue(np.full(1 << 20, number, np.uint8), timeout=PATIENCE)
            assert (new.dequeue(PATIENCE) == number).all()
        assert (lent == 7).all()
        del view, kept, lent
        gc.collect()
        for number in range(20):
            writer.enqueue(np.full(1 << 20, number, np.uint8), timeout=PATIENCE)
            assert (new.dequeue(PATIENCE) == number).all()
        assert new.statistics().messages == 40
        new.close()


def test_what_the_dead_kept_is_used_again() -> None:
    """Its leases end with it, also once its place is another's."""
    with MessageQueue(1, 1, None, 4096, 2, max_extent_bytes=8 << 20) as writer:
        reader = start_reader(writer.export_handle())
        for _ in range(6):
            writer.wait_until_ready(PATIENCE)
            for _ in range(4):
                writer.enqueue(np.ones(1 << 20, np.uint8), timeout=PATIENCE)
                reader.call("__setattr__", "kept", None)
                reader.call("dequeue")
            dies(writer, reader)
            reader = start_reader(writer.readmit(0))
        size = os.fstat(writer._end.segment.descriptor).st_size  # type: ignore[union-attr]
        assert size < 16 << 20
        reader.call("close")


def test_only_one_takes_it() -> None:
    """The second of two readers with the same handle is refused; so is one that comes before it is
    open."""
    with MessageQueue(1, 1) as writer:
        first = start_reader(writer.export_handle())
        writer.wait_until_ready(PATIENCE)
        old = writer.export_handle()
        with refuses(SegmentMissing):
            MessageQueue.create_from_handle(old, 0)
        dies(writer, first)
        handle = Handle.from_json(writer.readmit(0).to_json())
        second = start_reader(handle)
        with refuses(RankTaken, match=f"is held by pid {second.pid}"):
            MessageQueue.create_from_handle(handle, 0)
        dies(writer, second)
        with refuses(RankTaken):
            MessageQueue.create_from_handle(handle, 0)
        third = start_reader(writer.readmit(0))
        writer.enqueue("here")
        assert third.call("dequeue") == "here"
        third.call("close")


def test_a_place_is_closed_until_then() -> None:
    """One that was released before anybody came."""
    with MessageQueue(2, 2, None, 64, 2) as writer:
        other = MessageQueue.create_from_handle(writer.export_handle(1), 1)
        writer.release_reader(0)
        with refuses(RankTaken, match="was released by release_reader"):
            MessageQueue.create_from_handle(writer.export_handle(), 0)
        writer.enqueue("missed")
        handle = writer.readmit(0)
        writer.enqueue("kept")
        with MessageQueue.create_from_handle(handle, 0) as reader:
            assert drain(reader) == ["kept"]
            assert drain(other) == ["missed", "kept"]
        other.close()


def test_the_writer_waits_for_whoever_comes() -> None:
    """Messages that are sent before the replacement attaches are kept for it; it can be released
    again."""
    with MessageQueue(1, 1, None, 64, 3) as writer:
        doomed = start_reader(writer.export_handle())
        writer.wait_until_ready(PATIENCE)
        dies(writer, doomed)
        handle = writer.readmit(0)
        assert fill(writer) == 3
        with refuses(TimedOut, match=r"reader 0 \(never attached"):
            writer.enqueue("too much", timeout=0.05)
        with refuses(TimedOut, match=r"waiting for reader 0 \(never attached"):
            writer.wait_until_ready(0.05)
        with MessageQueue.create_from_handle(handle, 0) as reader:
            assert drain(reader) == [0, 1, 2]
        writer.readmit(0)
        fill(writer)
        writer.release_reader(0)
        writer.enqueue("to nobody", timeout=0)


def test_wrong_ranks_are_refused() -> None:
    """They are refused, and nothing changes."""
    with MessageQueue(3, 3, [4, 2, 7], 64, 3) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(4), 4)
        doomed = start_reader(writer.export_handle(2), 2)
        with refuses(WrongRole):
            reader.readmit(4)
        with refuses(ValueError, match="reader 4 is running: only the place of one"):
            writer.readmit(4)
        with refuses(ValueError, match="reader 7 is absent"):
            writer.readmit(7)
        with refuses(ValueError, match="no reader 3"):
            writer.readmit(3)
        with refuses(ValueError):
            writer.readmit(-1)
        with refuses(TypeError):
            writer.readmit("0")  # type: ignore[arg-type]
        doomed.peer.stop()
        with refuses(ValueError, match="reader 2 is stopped"):
            writer.readmit(2)
        doomed.peer.kill()
        with refuses(ValueError, match="reader 2 is dead"):
            until(lambda: writer.readmit(2), "it is seen")
        writer.release_reader(7)
        writer.release_reader(2)
        assert fill(writer) == 3
        assert drain(reader) == [0, 1, 2]
        reader.close()
    with refuses(ValueError, match="no reader 0"):
        MessageQueue(0, 0).readmit(0)


def test_a_writer_that_is_gone() -> None:
    """Closed or ended, and its descriptor's number another file's."""
    writer = MessageQueue(1, 1)
    MessageQueue.create_from_handle(writer.export_handle(), 0).close()
    writer.wait_until_ready(PATIENCE)
    handle = writer.readmit(0)
    writer.close()
    with refuses(SegmentMissing, match=rf"the writer \(pid {os.getpid()}\) has closed"):
        MessageQueue.create_from_handle(handle, 0)
    assert handle.writer_file is not None
    number = handle.writer_file[1]
    for path, flags in (("/dev/zero", os.O_RDWR), (__file__, os.O_RDONLY)):
        with ExitStack() as stack:
            taken = os.open(path, flags)
            stack.callback(os.close, taken)
            if taken != number:
                os.dup2(taken, number)
                stack.callback(os.close, number)
            with refuses(SegmentMissing, match="has closed it or ended"):
                MessageQueue.create_from_handle(handle, 0)
    with queue_of() as (other, _), refuses(SegmentMissing):
        file = os.dup(other._end.segment.descriptor)  # type: ignore[union-attr]
        try:
            handle.writer_file = (os.getpid(), file)
            MessageQueue.create_from_handle(handle, 0)
        finally:
            os.close(file)
    remote = start_writer()
    here = MessageQueue.create_from_handle(remote.greeting, 0)
    remote.call("wait_until_ready")
    here.close()
    handle = remote.call("readmit", 0)
    remote.peer.kill()
    remote.peer.join(PATIENCE)
    with refuses(SegmentMissing):
        MessageQueue.create_from_handle(handle, 0)


def test_handles_that_nobody_made() -> None:
    """A writer_file of the wrong form is refused."""
    with MessageQueue(1, 1) as writer:
        handle = writer.export_handle()
        for wrong in ((0, 3), (-1, 3), (1, -1), (1,), (1, 2, 3), ("1", 2), 5):
            handle.writer_file = wrong  # type: ignore[assignment]
            with pytest.raises((ValueError, TypeError)):
                MessageQueue.create_from_handle(handle, 0)


def test_a_replacement_that_dies_too() -> None:
    """As it attaches, and later."""
    with MessageQueue(1, 1, None, 64, 2) as writer:
        reader = start_reader(writer.export_handle())
        for _ in range(4):
            writer.wait_until_ready(PATIENCE)
            dies(writer, reader)
            reader = start_reader(writer.readmit(0))
            dies(writer, reader)
            reader = start_reader(writer.readmit(0))
        writer.enqueue("still here")
        assert reader.call("dequeue") == "still here"
        reader.call("close")


def taking(link: Link, handle: Handle, rank: int, is_large: bool) -> None:
    """Role: reads numbers, each of which must be the next; tells the first one."""
    with MessageQueue.create_from_handle(handle, rank) as queue:
        expected = None
        while True:
            try:
                message = queue.dequeue()
            except WriterClosed:
                link.tell(("end", expected))
                return
            number = int(message[0]) if is_large else message
            if is_large:
                assert (message == number).all()
            if expected is None:
                link.tell(("first", number))
            else:
                assert number == expected, f"{number} instead of {expected}"
            expected = number + 1


@pytest.mark.soak(seconds=SECONDS * 2)
@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
def test_replacements_miss_nothing_under_random_kills(is_large: bool) -> None:
    """Every replacement begins with the first message after `readmit`, and misses nothing; nor does
    the other reader, from the beginning to the end."""
    dice = random.Random(7)

    def message(number: int) -> object:
        return np.full(1 << 17, number, np.int64) if is_large else number

    with MessageQueue(2, 2, None, 256, 3) as writer:
        doomed = start(taking, writer.export_handle(0), 0, is_large)
        other = start(taking, writer.export_handle(1), 1, is_large)
        writer.wait_until_ready(PATIENCE)
        sent, first, kills = 0, 0, 0
        over = time.monotonic() + SECONDS
        while kills <= 5 or time.monotonic() < over:
            killer = threading.Timer(dice.uniform(0, 0.03), doomed.kill)
            killer.start()
            with refuses(ReaderDied) as caught:
                while True:
                    writer.enqueue(message(sent), timeout=PATIENCE)
                    sent += 1
            assert (caught.value.rank, caught.value.pid) == (0, doomed.pid)
            killer.join()
            kills += 1
            writer.release_reader(0)
            for _ in range(dice.randrange(5)):
                writer.enqueue(message(sent), timeout=PATIENCE)
                sent += 1
            handle, first = writer.readmit(0), sent
            for _ in range(dice.randrange(3)):
                writer.enqueue(message(sent), timeout=PATIENCE)
                sent += 1
            doomed = start(taking, handle, 0, is_large)
            writer.wait_until_ready(PATIENCE)  # who is killed before has no place
            if dice.random() < 0.5:
                writer.enqueue(message(sent), timeout=PATIENCE)
                sent += 1
                assert doomed.hear(PATIENCE) == ("first", first)
        writer.enqueue(message(sent), timeout=PATIENCE)
        sent += 1
    ends = []
    while not ends or ends[-1][0] != "end":
        ends.append(doomed.hear(PATIENCE))
    assert ends[-1] == ("end", sent)
    assert other.hear(PATIENCE) == ("first", 0)
    assert other.hear(PATIENCE) == ("end", sent)


def test_views_that_are_left_behind() -> None:
    """They stay as they are when the writer closes, also if somebody else has the place by then."""
    for is_taken in (False, True):
        with queue_of(max_chunk_bytes=1 << 16, max_chunks=2) as (writer, (reader,)):
            kept = []
            for number, size in enumerate((1 << 13, 1 << 20)):
                writer.enqueue(np.full(size, 7 + number, np.uint8))
                with refuses(ViewInUse), reader.dequeue_view(PATIENCE) as view:
                    kept.append(view[:])
                del view
            reader.close()
            handle = writer.readmit(0)
            if is_taken:
                MessageQueue.create_from_handle(handle, 0).close()
        assert [int(array.min()) for array in kept] == [7, 8]
        assert [int(array.max()) for array in kept] == [7, 8]


def test_the_writers_own_handle(caplog: pytest.LogCaptureFixture) -> None:
    """Is as good as the one that was returned; nobody is missed who was owed nothing."""
    with MessageQueue(1, 1) as writer:
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            writer.wait_until_ready(PATIENCE)
            writer.enqueue(1)
            assert reader.dequeue(PATIENCE) == 1
        writer.readmit(0)
        assert writer.handle == writer.export_handle()
        with MessageQueue.create_from_handle(writer.handle, 0) as reader:
            writer.enqueue(2)
            assert reader.dequeue(PATIENCE) == 2
        writer.readmit(0)
    assert caplog.messages == []


def test_processes_that_have_had_a_place() -> None:
    """Have attached, for `wait_until_ready(processes=)`."""
    with MessageQueue(1, 1) as writer:
        reader = start_reader(writer.export_handle())
        writer.wait_until_ready(PATIENCE)
        reader.call("close")
        reader.leave()
        reader.peer.join(PATIENCE)
        handle = writer.readmit(0)
        with refuses(TimedOut):
            writer.wait_until_ready(0.05, processes=[reader.pid])
        with MessageQueue.create_from_handle(handle, 0):
            writer.wait_until_ready(PATIENCE, processes=[reader.pid])


def test_what_observers_see_of_a_replacement() -> None:
    """Its own messages, and times."""
    with queue_of() as (writer, (reader,)):
        for number in range(3):
            writer.enqueue(number)
            reader.dequeue(PATIENCE)
        reader.close()
        with MessageQueue.create_from_handle(writer.readmit(0), 0) as new:
            (segment,) = looking.segments()
            seen = segment.participants[1]
            assert (seen.position, seen.bytes, seen.behind) == (0, 0, 0)
            assert seen.deliveries is None or sum(seen.deliveries.counts) == 0
            writer.enqueue("next")
            (segment,) = looking.segments()
            assert segment.participants[1].behind == 1
            new.dequeue(PATIENCE)
            (segment,) = looking.segments()
            assert (segment.participants[1].position, segment.participants[1].behind) == (1, 0)


# Late readers -----------------------------------------------------------------------------------


def test_late_readers_come_when_they_like() -> None:
    """They come when they like, and get what is sent from then on."""
    with MessageQueue(3, 3, None, 64, 2, late_readers=True) as writer:
        writer.wait_until_ready(0)
        assert not path_of(writer).exists()
        for number in range(7):
            writer.enqueue(number, timeout=0)  # to nobody
        handle = writer.export_handle()
        with MessageQueue.create_from_handle(handle, 1) as first:
            first.wait_until_ready(0)
            with refuses(TimedOut):
                first.dequeue(0)
            assert fill(writer) == 2
            with MessageQueue.create_from_handle(handle, 0) as second:
                assert drain(second) == []
                assert drain(first) == [0, 1]
                writer.enqueue("both")
                assert drain(first) == drain(second) == ["both"]
                states = [reader.state for reader in writer.statistics().readers]
                assert states == ["running", "running", "absent"]
                assert [reader.behind for reader in writer.statistics().readers][:2] == [0, 0]
            writer.enqueue("one")
            assert drain(first) == ["one"]
            again = MessageQueue.create_from_handle(writer.readmit(0), 0)
            writer.enqueue("again")
            assert drain(again) == drain(first) == ["again"]
            again.close()
        for number in range(7):
            writer.enqueue(number, timeout=0)
        assert writer.statistics().messages == 19


def test_late_readers_in_other_processes_are_woken_and_missed(method: str) -> None:
    """The one that sleeps is woken by its first message; the one that dies is reported."""
    with MessageQueue(2, 2, None, 64, 2, late_readers=True) as writer:
        writer.wait_until_ready(0)
        writer.enqueue("early")
        reader = start_reader(writer.export_handle(0), 0, method)
        waiting = reader.begin("dequeue").until_blocked()
        writer.enqueue("here")
        assert waiting.outcome() == "here"
        dies(writer, reader)
        writer.enqueue("to nobody", timeout=0)
        with refuses(RankTaken):
            MessageQueue.create_from_handle(writer.export_handle(), 0)
        with MessageQueue.create_from_handle(writer.readmit(0), 0) as new:
            writer.enqueue("again")
            assert new.dequeue(0) == "again"


def test_a_late_reader_that_nobody_has_counted() -> None:
    """It closes before the next message: its place can be another's; nobody owes anything."""
    with MessageQueue(2, 2, late_readers=True) as writer:
        for number in range(3):
            writer.enqueue(number)
        handle = writer.export_handle()
        MessageQueue.create_from_handle(handle, 0).close()
        assert [row.behind for row in writer.statistics().readers] == [0, 0]
        with MessageQueue.create_from_handle(writer.readmit(0), 0) as reader:
            writer.enqueue("here")
            assert drain(reader) == ["here"]


def test_a_late_reader_learns_of_the_end() -> None:
    """The queue's writer closes, or dies, before it has counted the late reader."""
    with MessageQueue(1, 1, late_readers=True) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    with refuses(WriterClosed):
        reader.dequeue(PATIENCE)
    reader.close()


@pytest.mark.soak(seconds=SECONDS * 2)
def test_late_readers_come_and_go() -> None:
    """Each gets consecutive messages, the first of which was sent after it had attached."""
    with MessageQueue(4, 4, None, 256, 3, late_readers=True) as writer:
        handles, over = [writer.export_handle()] * 4, threading.Event()
        latest, closed = [0], [threading.Event() for _ in range(4)]
        visits = [0] * 4

        def comes_and_goes(rank: int) -> None:
            dice = random.Random(rank)
            while not over.is_set():
                with MessageQueue.create_from_handle(handles[rank], rank) as reader:
                    before = latest[0]
                    expected = None
                    for _ in range(dice.randrange(1, 30)):
                        try:
                            number = reader.dequeue(0.5)
                        except (TimedOut, WriterClosed):
                            break
                        assert number >= before
                        assert expected in (None, number)
                        expected = number + 1
                visits[rank] += 1
                closed[rank].set()
                until(lambda: not closed[rank].is_set() or over.is_set(), "readmitted", pause=0)

        visitors = [Aside(comes_and_goes, rank) for rank in range(4)]
        end = time.monotonic() + SECONDS
        while sum(visits) <= 20 or time.monotonic() < end:
            latest[0] += 1
            writer.enqueue(latest[0], timeout=PATIENCE)
            for rank, event in enumerate(closed):
                if event.is_set():
                    handles[rank] = writer.readmit(rank)
                    event.clear()
        over.set()
    for visitor in visitors:
        visitor.result()
