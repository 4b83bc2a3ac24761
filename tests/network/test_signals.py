"""A signal handler raises in the middle of a call to another host, at any moment."""

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any

import pytest
import zmq
from zmq.utils.garbage import gc as collector

from memlane import Closed, MessageQueue
from memlane.broadcast.network import transport as reading
from memlane.broadcast.protocol.frames import PIECE, What, header_of
from memlane.broadcast.protocol.message import Assembly
from memlane.broadcast.protocol.writer_session import WriterSession
from tests.support import PATIENCE, Alarm, Aside, Link, alarm_after, alarms, start, until
from tests.support.queues import start_reader
from tests.support.remote_queues import reading_all, remote_queue, remote_writer

MANY = 150
SIZES = [0, 0, 100, 8000, 20_000]
SENT = [*SIZES, 100_000]
"""The last is lent to libzmq. What a handler raises while a reader frees such a message is lost."""
number_of = itemgetter(0)


def write_interrupted(link: Link, seed: int, n_local: int) -> list[int]:
    """Role: sends until so many calls were interrupted; returns what was sent for sure."""
    dice = random.Random(seed)
    sent, count, number = [], 0, 0
    with remote_writer(2, n_local, remote_window=16) as writer:
        link.tell([writer.export_handle(rank) for rank in range(2 + n_local)])
        writer.wait_until_ready(PATIENCE)
        while count < MANY:
            message = (number, bytes(dice.choice(SENT)))
            is_inside = True
            try:
                with alarm_after(dice.uniform(1e-6, 2e-4)):
                    writer.enqueue(message, PATIENCE)
                    is_inside = False
                    os.getpid()  # what came after the message was sent is raised here at the latest
            except Alarm:
                count += is_inside
            if not is_inside:
                sent.append(number)
            number += 1
        until(lambda: all(row.behind == 0 for row in writer.statistics().readers))
    return sent


@pytest.mark.parametrize("n_local", [0, 1], ids=["remote", "mixed"])
def test_a_writer_is_interrupted_anywhere(n_local: int) -> None:
    """Messages for which enqueue returned are read by all, once and in order; others by none. No
    call stays open that nobody can end.

    Mixed, it fails without the guard: the ring had got what was not committed for the network.
    """
    writer = start(write_interrupted, 1, n_local)
    readers = [
        start(reading_all, handle, rank, number_of) for rank, handle in enumerate(writer.hear())
    ]
    for reader in readers:
        assert reader.hear() == "attached"
    sent = writer.result()
    first, *others = [reader.result()[0] for reader in readers]
    assert first == sent
    assert others == [first] * (1 + n_local)


def test_pyzmq_s_collector_outlives_handlers_that_raise() -> None:
    """Fails without the guard: CPython takes the thread for ended, pyzmq starts another for every
    large message, and that one cannot bind the first one's address."""
    dice = random.Random(1)
    with remote_writer(1):
        thread = collector.thread
        for _ in range(2000):
            with suppress(Alarm), alarm_after(dice.uniform(1e-6, 6e-5)):
                for _ in range(30):
                    collector.is_alive()
        assert (collector.is_alive(), collector.thread) == (True, thread)
    assert not collector.is_alive()


def test_a_collector_that_was_half_stopped_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler raised in the close of the last writer; pyzmq starts another for the next one."""

    def interrupted(_: object) -> None:
        raise Alarm

    with remote_writer(1) as writer:
        assert collector.is_alive()
        with monkeypatch.context() as patched:
            patched.setattr(type(collector), "_clear", interrupted)
            with pytest.raises(Alarm):
                writer.close()
        assert not collector.is_alive()
    collector._clear()


def test_a_frame_that_has_come_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler raises once the call has copied it: the next call has it."""
    add, sent = Assembly.add, WriterSession.sent
    frames: list[object] = []
    is_raised = False

    def add_and_raise(*args: Any) -> Any:
        nonlocal is_raised
        added = add(*args)
        if not is_raised and threading.current_thread() is threading.main_thread():
            is_raised = True
            raise Alarm
        return added

    def count(session: WriterSession, peer: Any, cursor: Any) -> None:
        frames.extend([cursor] if cursor is not None else [])
        sent(session, peer, cursor)

    with remote_queue() as (writer, (reader,)):
        monkeypatch.setattr(Assembly, "add", add_and_raise)
        monkeypatch.setattr(WriterSession, "sent", count)
        messages = 0
        while not is_raised:
            messages += 1
            writer.enqueue(bytes(2 * PIECE))
            with suppress(Alarm):
                reader.dequeue(PATIENCE)
                continue
            assert reader.dequeue(PATIENCE) == bytes(2 * PIECE)
        assert len(frames) == len(set(frames)) == 2 * messages


def test_a_reader_is_interrupted_anywhere() -> None:
    """It gets everything, once and in order, but what a call had taken that was interrupted."""
    with remote_writer(1, remote_window=16) as writer:
        reader = start(reading_all, writer.export_handle(0), 0, number_of, 4e-4)
        assert reader.hear() == "attached"
        for number in range(1500):
            writer.enqueue((number, bytes(SIZES[number % len(SIZES)])), PATIENCE)
        until(lambda: writer.statistics().readers[0].behind == 0)
    got, count = reader.result()
    assert count >= MANY
    assert got == sorted(set(got))
    assert len(got) >= 1500 - count


def write_and_look(link: Link) -> int:
    """Role: sends while a signal handler asks for statistics all the time."""
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += len(writer.statistics().readers) // 2

    with remote_writer(2, remote_window=16) as writer:
        link.tell([writer.export_handle(rank) for rank in range(2)])
        writer.wait_until_ready(PATIENCE)
        with alarms(look, 5e-4):
            for number in range(3000):
                writer.enqueue((number, bytes(SIZES[number % len(SIZES)])), PATIENCE)
    return looks


def test_statistics_in_a_signal_handler_disturb_no_call() -> None:
    """They are of the moment, and the call that was interrupted goes on as if nothing happened.

    Fails without the guard: the handler sent frames in the middle of the call's own.
    """
    writer = start(write_and_look)
    readers = [
        start(reading_all, handle, rank, number_of) for rank, handle in enumerate(writer.hear())
    ]
    for reader in readers:
        assert reader.hear() == "attached"
    assert writer.result() > 100
    for reader in readers:
        assert reader.result()[0] == list(range(3000))


def lose(reader: MessageQueue, frame: tuple[int, int]) -> str:
    """Role's call: reads to the end; when that frame has come, a handler raises once before it was
    looked at. Returns what came."""
    receive, came = reading.receive, []

    def raising(_number: int, _frame: object) -> None:
        raise Alarm

    def receive_and_raise(*args: Any) -> Any:
        part = receive(*args)
        if reading.receive is not receive and header_of(part)[:3:2] == frame:
            reading.receive = receive
            if frame == LAST:
                assert args[0].poll(1000 * PATIENCE), "the end comes behind it"
            signal.raise_signal(signal.SIGALRM)
        return part

    signal.signal(signal.SIGALRM, raising)
    reading.receive = receive_and_raise
    while True:
        try:
            came.append(str(reader.dequeue(PATIENCE)))
        except Alarm:
            came.append("interrupted")
        except Closed:
            return " ".join(came)


LAST, END = (What.MESSAGE, 2), (What.END, 3)


@pytest.mark.parametrize("frame", [LAST, END], ids=["last", "end"])
def test_a_reader_is_interrupted_while_its_writer_closes(frame: tuple[int, int]) -> None:
    """The message that the interrupted call had taken comes once more; a writer that closed is not
    called dead.

    Fails without the guard: the writer had left as soon as the frames were delivered to libzmq.
    """
    with remote_writer() as writer:
        reader = start_reader(writer.export_handle(0), 0)
        reader.begin(lose, frame).until_blocked()
        for number in range(3):
            writer.enqueue(number)
        closing = Aside(writer.close)
        came = reader.outcome().split()
        assert came.count("interrupted") == 1
        assert [word for word in came if word != "interrupted"] == ["0", "1", "2"]
        closing.result()
    reader.leave()


def test_a_handler_that_raises_while_a_socket_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its context knows of it, which would wait for it for ever."""
    known = zmq.Context._add_socket
    made: list[object] = []

    def interrupted(context: Any, socket: Any) -> None:
        made.append(None)
        if len(made) == 2:
            raise Alarm
        known(context, socket)

    monkeypatch.setattr(zmq.Context, "_add_socket", interrupted)
    with pytest.raises(Alarm):
        remote_writer()


@pytest.mark.parametrize("role", ["writer", "reader"])
def test_a_handler_that_raises_before_an_end_is_owned(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is left: its thread has ended, and with that all that it had open."""

    def interrupted(*_: Any) -> None:
        raise Alarm

    with remote_writer() as writer:
        begin: Callable[[], object] = remote_writer
        if role == "reader":
            begin = partial(MessageQueue.create_from_handle, writer.export_handle(0))
        before = threading.active_count()
        with monkeypatch.context() as patched:
            patched.setattr(MessageQueue, "_setup", interrupted)
            with pytest.raises(Alarm):
                begin()
        until(lambda: threading.active_count() == before)
