"""Small messages back to back, which share frames: each arrives once and in order, none late."""

import dis
import os
import random
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest

from memlane import (
    Closed,
    ConcurrentUse,
    Handle,
    InvalidType,
    MessageQueue,
    TimedOut,
    WrongProcess,
)
from memlane.broadcast.network import ahead as reading
from memlane.broadcast.network.ahead import Ahead
from memlane.broadcast.network.driver import NetworkEnd
from memlane.broadcast.network.transport import Listening
from memlane.broadcast.protocol.frames import SMALL
from tests.support import (
    PATIENCE,
    Alarm,
    Aside,
    Link,
    alarm_after,
    alarms,
    start,
    until,
)
from tests.support.proxies import cutting
from tests.support.queues import start_reader
from tests.support.remote_queues import (
    HERE,
    address_of,
    reading_all,
    remote_queue,
    remote_writer,
)

MANY = 5000


def message(number: int) -> Any:
    """Returns a message of the kinds that may share a frame, and now and then one that may not."""
    if number % 997 == 0:
        return (number, bytes(20_000))
    if number % 101 == 0:
        return (number,)
    if number % 3 == 0:
        return {"number": number, "note": "x" * (number % 200)}
    return number.to_bytes(8, "little") + bytes(number % 700)


def number_of(message: Any) -> int:
    if isinstance(message, bytes):
        return int.from_bytes(message[:8], "little")
    number: int = message["number"] if isinstance(message, dict) else message[0]
    return number


def checked_number(came: Any) -> int:
    number = number_of(came)
    assert came == message(number)
    return number


class Frames:
    """Counts what the writer hands over."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, send = 0, Listening.send

        def counting(transport: Listening, *frame: Any) -> bool:
            self.count += 1
            return send(transport, *frame)

        patch.setattr(Listening, "send", counting)


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Frames:
    return Frames(monkeypatch)


def stream(writer: MessageQueue, count: int = 2000) -> None:
    """Until messages wait for each other."""
    for _ in range(count):
        writer.enqueue(b"stream", PATIENCE)


# What arrives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"insecure_network": True, "serializer": "msgpack"}])
def test_all_arrive_in_fewer_frames(options: dict[str, Any], frames: Frames) -> None:
    with remote_writer(2, **options) as writer:
        readers = [start(read_bytes, writer.export_handle(rank), rank) for rank in range(2)]
        for reader in readers:
            assert reader.hear() == "attached"
        before = frames.count
        for number in range(MANY):
            writer.enqueue(b"%d" % number, PATIENCE)
        assert frames.count - before < 2 * MANY * 0.8, "frames for two readers"
        assert writer.statistics().messages == MANY
        writer.close(PATIENCE)
    for reader in readers:
        assert reader.result() == [b"%d" % number for number in range(MANY)]


def read_bytes(link: Link, handle: Handle, rank: int) -> list[bytes]:
    """Role: reads to the end."""
    got = []
    with MessageQueue.create_from_handle(handle, rank) as reader:
        link.tell("attached")
        with suppress(Closed):
            while True:
                got.append(reader.dequeue(PATIENCE))
    return got


def large(number: int) -> bytes:
    """The largest that share frames, each different in every part."""
    return b"%08d" % number * (SMALL // 8)


def test_full_frames_are_kept_until_acknowledged(frames: Frames) -> None:
    """They are kept until the reader has acknowledged them, and the next one is elsewhere."""
    with remote_queue(1) as (writer, (reader,)):
        stream(writer, 200)
        for _ in range(200):
            assert reader.dequeue(PATIENCE) == b"stream"
        before = frames.count
        for number in range(500):  # 16 MiB, which nobody reads yet
            writer.enqueue(large(number), PATIENCE)
        assert frames.count - before < 500 * 0.8
        for number in range(500):
            assert reader.dequeue(PATIENCE) == large(number)


@pytest.mark.parametrize("window", [1, 7, 1024])
@pytest.mark.parametrize("relay", [False, True])
def test_messages_of_all_kinds_and_sizes_arrive(window: int, relay: bool) -> None:
    count = MANY if window > 1 else 500
    with remote_writer(2, remote_window=window, relay=relay) as writer:
        readers = [
            start(reading_all, writer.export_handle(rank), rank, checked_number)
            for rank in range(2)
        ]
        for reader in readers:
            assert reader.hear() == "attached"
        for number in range(count):
            writer.enqueue(message(number), PATIENCE)
        writer.close(PATIENCE)
    for reader in readers:
        assert reader.result() == (list(range(count)), 0)


@pytest.mark.parametrize("window", [{"remote_window": 500}, {"remote_window_bytes": 5000}])
def test_a_window_is_not_exceeded(window: dict[str, int]) -> None:
    with remote_queue(1, **window) as (writer, (reader,)):
        sent, taken = 0, 0
        for _ in range(5):  # the stream goes on once there is room
            with suppress(TimedOut):
                while True:
                    writer.enqueue(b"0123456789", 0.05)
                    sent += 1
            # What was taken is acknowledged by a quarter of a window, bytes by whole frames.
            assert 100 <= sent - taken <= 500
            for _ in range(200):
                assert reader.dequeue(PATIENCE) == b"0123456789"
            taken += 200


def test_statistics_count_what_was_returned() -> None:
    with remote_queue(1) as (writer, (reader,)):
        stream(writer, 600)
        for number in range(600):
            assert reader.dequeue(PATIENCE) == b"stream"
            seen = reader.statistics()
            assert (seen.messages, seen.bytes) == (number + 1, 6 * (number + 1))


# When it is sent -------------------------------------------------------------------------------


def test_the_last_ones_do_not_wait_for_more() -> None:
    """The writer makes no more calls; its thread sends them."""
    with remote_queue(1) as (writer, (reader,)):
        for _ in range(50):
            stream(writer, 200)
            for _ in range(200):
                assert reader.dequeue(PATIENCE) == b"stream"
            assert reader.statistics().messages == writer.statistics().messages


def test_a_call_that_fails_does_not_hold_up_what_was_sent_before() -> None:
    class Unpicklable:
        def __reduce__(self) -> Any:
            raise ValueError("not this one")

    with remote_queue(1) as (writer, (reader,)):
        # Until it is closed: the thread sends nothing.
        end: Any = writer._writer
        end._sleep = lambda _poller, _seconds: NetworkEnd._sleep(end._poller(), None)
        for _ in range(30):
            stream(writer, 150)
            with pytest.raises(ValueError, match="not this one"):
                writer.enqueue(Unpicklable(), PATIENCE)
            for _ in range(150):
                assert reader.dequeue(PATIENCE) == b"stream"


def test_whoever_sends_few_messages_does_not_wait(frames: Frames) -> None:
    """A burst is sent message by message."""
    with remote_queue(1) as (writer, (reader,)):
        before = frames.count
        for _ in range(100):
            for _ in range(10):
                writer.enqueue(b"step", PATIENCE)
            for _ in range(10):
                assert reader.dequeue(PATIENCE) == b"step"
            time.sleep(1e-3)  # at least: what comes then belongs to no stream
        assert frames.count - before == 1000


def test_the_end_comes_after_the_stream() -> None:
    for count in range(180, 240, 4):
        with remote_queue(1) as (writer, (reader,)):
            stream(writer, count)
            closing = Aside(writer.close)
            assert list(reader) == [b"stream"] * count
            closing.result()


def test_a_reader_that_comes_late_gets_what_is_sent_from_then_on() -> None:
    attach = MessageQueue.create_from_handle
    with (
        remote_writer(2, late_readers=True) as writer,
        attach(writer.export_handle(0), 0) as first,
    ):
        aside = Aside(lambda: [first.dequeue(PATIENCE) for _ in range(2000)])
        stream(writer)
        aside.result()
        with attach(writer.export_handle(1), 1) as second:
            writer.enqueue(b"late", PATIENCE)
            assert second.dequeue(PATIENCE) == first.dequeue(PATIENCE) == b"late"


# What comes in between -------------------------------------------------------------------------


def test_an_awaited_reader_is_told_of_all() -> None:
    """Its descriptor is readable as long as there is a message."""
    with remote_queue(1) as (writer, (reader,)):
        stream(writer, 500)
        assert reader.dequeue(PATIENCE) == b"stream"  # which may have read ahead
        descriptor = reader.fileno()
        for _ in range(499):
            assert select.select([descriptor], [], [], PATIENCE)[0]
            assert reader.dequeue(0) == b"stream"
        assert not select.select([descriptor], [], [], 0)[0]


def test_a_message_that_is_being_returned_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the call returns it, while memlane's thread looks."""
    generation = reading.fork_generation

    def late() -> int:
        if threading.current_thread() is threading.main_thread():
            time.sleep(2e-3)
        return generation()

    with remote_queue(1) as (writer, (reader,)):
        descriptor = reader.fileno()
        monkeypatch.setattr(reading, "fork_generation", late)
        for _ in range(100):
            writer.enqueue(b"one", PATIENCE)
            assert reader.dequeue(PATIENCE) == b"one"
            assert not select.select([descriptor], [], [], 0)[0]


def test_a_forked_child_neither_sends_nor_reads() -> None:
    with remote_queue(1) as (writer, (reader,)):
        stream(writer, 500)
        assert reader.dequeue(PATIENCE) == b"stream"
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for call in (lambda: writer.enqueue(b"child"), reader.dequeue):
                    with suppress(WrongProcess):
                        call()
                        os._exit(2)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert [reader.dequeue(PATIENCE) for _ in range(499)] == [b"stream"] * 499


def test_a_closed_end_gives_nothing() -> None:
    with remote_queue(1) as (writer, (reader,)):
        stream(writer, 500)
        assert reader.dequeue(PATIENCE) == b"stream"
        reader.close()
        with pytest.raises(Closed):
            reader.dequeue(0)
        closing = threading.Thread(target=writer.close)
        closing.start()
        with suppress(Closed):
            while True:
                writer.enqueue(b"stream", PATIENCE)
        closing.join()


@pytest.mark.parametrize("repeats", [1, 4000])
def test_connections_that_are_cut(repeats: int) -> None:
    with remote_writer(remote_liveness=PATIENCE) as writer:
        handle = writer.export_handle(0)
        cutter = start(cutting, address_of(handle), 5, 20)
        way = replace(handle, remote_subscribe_addr=f"tcp://{HERE}:{cutter.hear()}")
        reader = start_reader(way, 0)
        reader.begin(partial(count_in_order, repeats=repeats))
        number = 0
        while not cutter.has_spoken():
            writer.enqueue(b"%d" % number * repeats, PATIENCE)
            number += 1
        assert cutter.hear() == "cut enough"
        writer.close(PATIENCE)
        assert reader.outcome() == str(number)
        reader.leave()


def count_in_order(reader: MessageQueue, repeats: int) -> str:
    number = 0
    for came in reader:
        assert came == b"%d" % number * repeats, (came[:20], number)
        number += 1
    return str(number)


def write_interrupted(link: Link) -> tuple[list[int], int]:
    """Role: sends a stream, interrupted all the time; returns what was sent for sure, and how often
    it was interrupted."""
    dice, sent, count, number = random.Random(1), [], 0, 0
    with remote_writer(2, remote_window=512) as writer:
        link.tell([writer.export_handle(rank) for rank in range(2)])
        writer.wait_until_ready(PATIENCE)
        while count < 300:
            try:
                with alarm_after(dice.uniform(1e-6, 1e-3)):
                    for _ in range(100):
                        writer.enqueue(number.to_bytes(8, "little") + bytes(number % 700), PATIENCE)
                        sent.append(number)
                        number += 1
            except Alarm:
                count += 1
                number += 1  # it is not known whether this one was sent
        until(lambda: all(row.behind == 0 for row in writer.statistics().readers))
    return sent, count


def read_numbers(link: Link, handle: Handle, rank: int) -> list[int]:
    """Role: reads to the end."""
    return [number_of(each) for each in read_bytes(link, handle, rank)]


def test_a_writer_that_is_interrupted() -> None:
    """Messages for which enqueue returned arrive; others arrive at all readers or at none."""
    writer = start(write_interrupted)
    readers = [start(read_numbers, handle, rank) for rank, handle in enumerate(writer.hear())]
    for reader in readers:
        assert reader.hear() == "attached"
    sent, interrupted = writer.result()
    first, second = (reader.result() for reader in readers)
    assert interrupted == 300
    assert first == second == sorted({*first})
    assert {*sent} <= {*first}


def test_a_reader_that_is_interrupted() -> None:
    """It gets everything, once and in order."""
    with remote_writer(1) as writer:
        reader = start(reading_all, writer.export_handle(0), 0, checked_number, 4e-4)
        assert reader.hear() == "attached"
        for number in range(MANY // 2):
            writer.enqueue(message(number), PATIENCE)
        writer.close(PATIENCE)
    got, interrupted = reader.result()
    assert got == sorted({*got})
    assert len(got) >= MANY // 2 - interrupted


@pytest.mark.parametrize("who", ["writer", "reader"])
def test_bad_arguments_within_a_stream_send_nothing(who: str) -> None:
    with remote_queue(1) as (writer, (reader,)):
        stream(writer, 500)
        reader.dequeue(PATIENCE)
        with pytest.raises(InvalidType):
            writer.enqueue(b"x", "soon") if who == "writer" else reader.dequeue(1, cancel="no")  # type: ignore[arg-type]


def test_a_handler_that_closes() -> None:
    """In the middle of a stream: all that was sent arrives, and then the end."""
    for trial in range(10):
        with remote_queue(1) as (writer, (reader,)):
            sent = 0
            received = Aside(lambda come=reader: len([*come]))
            with alarms(writer.close, 0.5, 0.02 + 0.003 * trial), suppress(Closed):
                while True:
                    writer.enqueue(b"stream", PATIENCE)
                    sent += 1
            assert received.result() in (sent, sent + 1)


def test_nothing_comes_between_a_message_and_its_return() -> None:
    """Threads change, and handlers run, at calls and backward jumps only."""
    steps = [*dis.get_instructions(Ahead.receive_by)]
    first = next(at for at, step in enumerate(steps) if step.argval == "_at")
    last = next(at for at, step in enumerate(steps) if at > first and "RETURN" in step.opname)
    names = [step.opname for step in steps[first:last]]
    assert names.count("STORE_ATTR") == 2
    assert not [name for name in names if "CALL" in name or "BACKWARD" in name]


def test_a_handler_that_raises_right_after_a_message_was_taken() -> None:
    """It is acknowledged all the same, or a writer with a window of one would wait for ever."""
    with remote_queue(1, remote_window=1) as (writer, (reader,)):
        writer.enqueue(b"one", PATIENCE)
        with raising_after("popleft"), pytest.raises(Alarm):
            reader.dequeue(PATIENCE)
        assert reader.dequeue(PATIENCE) == b"one"
        second = Aside(reader.dequeue, PATIENCE)
        writer.enqueue(b"two", 5)
        assert second.result() == b"two"


def test_a_handler_that_raises_within_the_decoding_of_plain_messages() -> None:
    """No message is lost."""
    with remote_queue(1) as (writer, (reader,)):
        for number in range(3):
            writer.enqueue({"number": number}, PATIENCE)
        got: list[int] = []
        raised = 0
        while len(got) < 3:
            try:
                with raising_after("decode"):
                    got.append(reader.dequeue(PATIENCE)["number"])
            except Alarm:
                raised += 1
                got.append(reader.dequeue(PATIENCE)["number"])
        assert got == [0, 1, 2]
        assert raised > 0


@contextmanager
def raising_after(name: str) -> Iterator[None]:
    """As a handler would, once, when a call of that name of C's returns in this thread."""

    def look(_frame: Any, event: str, function: Any) -> None:
        if event == "c_return" and function.__name__ == name:
            sys.setprofile(None)
            raise Alarm

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_threads_and_a_handler_read() -> None:
    """Each gets what comes after what it got before; together they get each message once."""
    with remote_queue(1) as (writer, (reader,)):
        got: list[list[int]] = [[], [], []]

        def read(mine: list[int]) -> None:
            while True:
                try:
                    mine.append(int(reader.dequeue(PATIENCE)))
                except ConcurrentUse:
                    continue
                except Closed:
                    return

        looks = 0

        def look() -> None:
            nonlocal looks
            looks += 1
            if looks == 1:  # else it interrupts itself, before it has noted what it got
                with suppress(ConcurrentUse, TimedOut, Closed):
                    got[2].append(int(reader.dequeue(0)))
            looks -= 1

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            writing = Aside(
                lambda: [writer.enqueue(b"%d" % each, PATIENCE) for each in range(8000)]
            )
            other = Aside(read, got[0])
            with alarms(look, 5e-4):
                while sum(map(len, got)) < 8000:
                    with suppress(ConcurrentUse, TimedOut):
                        got[1].append(int(reader.dequeue(0.01)))
            writing.result()
            writer.close()
            other.result()
        finally:
            sys.setswitchinterval(interval)
        assert sorted(chain(*got)) == list(range(8000))
        for mine in got[::2]:
            assert mine == sorted(mine)


def test_what_a_handler_raises_is_not_taken_for_a_fault_of_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reaches the application, and nothing is lost but what a call had returned."""
    raised = caught = last = 0
    is_armed = False
    ignored: list[object] = []  # raised in a finalizer of something else, which Python reports here
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)

    def give_up() -> None:
        nonlocal raised, is_armed
        if is_armed:
            is_armed = False
            raised += 1
            raise TimeoutError

    with remote_queue(1) as (writer, (reader,)):
        writing = Aside(lambda: [writer.enqueue({"n": n}, PATIENCE) for n in range(4 * MANY)])
        with alarms(give_up, 7e-4):
            while reader.statistics().messages < 4 * MANY:
                try:
                    is_armed = True
                    came = reader.dequeue(PATIENCE)["n"]
                    is_armed = False
                except TimeoutError:
                    caught += 1
                else:
                    assert last <= came <= last + 1 + raised
                    last = came
        writing.result()
    assert caught + len(ignored) == raised > 20


def test_two_threads_send() -> None:
    """A refused thread gets an error; everything else arrives once."""
    sent: list[list[bytes]] = [[], []]
    with remote_queue(1) as (writer, (reader,)):
        over = threading.Event()
        got: list[bytes] = []

        def read() -> None:
            while not (over.is_set() and len(got) == sum(map(len, sent))):
                with suppress(TimedOut):
                    got.append(reader.dequeue(0.05))

        def write(which: int) -> None:
            for number in range(MANY):
                each = b"%d %d" % (which, number)
                with suppress(Exception):
                    writer.enqueue(each, PATIENCE)
                    sent[which].append(each)

        reading = Aside(read)
        threads = [threading.Thread(target=write, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        over.set()
        reading.result()
        for which in range(2):
            assert [each for each in got if each.startswith(b"%d " % which)] == sent[which]
