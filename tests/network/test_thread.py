"""An end's own thread beside calls, and what a call that was interrupted leaves to the next one."""

import os
import socket
import threading
import time
from functools import partial
from typing import Any, cast

import pytest

from memlane import MessageQueue, TimedOut, WrongProcess
from memlane._net.tcp import Spare
from memlane.broadcast.network import transport
from tests.network.test_handlers import behind, interrupt
from tests.support import PATIENCE, Alarm, Aside, Remote, start, until
from tests.support.queues import reading, refuses
from tests.support.remote_queues import (
    LIVENESS,
    enqueue_and_go_on,
    remote_queue,
    remote_writer,
    start_remote_reader,
)


class Watched:
    """A lock that calls `act` each time that it was released."""

    def __init__(self, lock: Any, act: Any) -> None:
        self._lock, self._act = lock, act

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)
        self._act()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def slept_with(end: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The poller with which the thread would sleep, if it did now what is due."""
    pollers: list[Any] = []
    monkeypatch.setattr(end, "_sleep", lambda poller, _pause: pollers.append(poller))
    end._serve()
    monkeypatch.undo()
    return pollers[-1]


def test_a_call_between_a_look_and_the_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread sleeps as what it has seen says: it is woken by what arrives."""
    with remote_queue() as (writer, _):
        end: Any = writer._writer
        with end.lock:  # its own thread waits
            end._served_at = 0.0

            def call() -> None:
                end._look_at = time.monotonic()

            monkeypatch.setattr(end, "lock", Watched(end.lock, call))
            end.transport._looked_at, end.transport._look_at = 0.0, None
            poller = slept_with(end, monkeypatch)
        assert poller is end._pollers[False, False]


def test_frames_that_a_call_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread reads them although a call has just read."""
    monkeypatch.setattr(transport, "_MOST_AT_ONCE", 1)
    with remote_queue() as (writer, (reader,)):
        end, far = writer._writer, reader._reader
        assert end is not None
        with end.lock:
            for _ in range(3):
                far.ask_who_is_absent()
                far._asked_at = 0.0
            until(lambda: transport.sockets.can_receive(end.socket))
            end._hear()
            until(lambda: end.transport.has_more or not end._hear())
            heard: list[int] = []
            behind(monkeypatch, end.session, "heard", lambda: heard.append(1))
            end._served_at = time.monotonic()
            monkeypatch.setattr(end, "_sleep", lambda *_: None)
            end._serve()
            assert heard
            monkeypatch.undo()


def test_a_handler_raises_when_a_hello_was_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's connection is known all the same, so it stays alive."""
    with remote_writer() as writer:
        end, handle = cast("Any", writer._writer), writer.export_handle(0)
        with end.lock:
            reader = start(reading, handle, 0)
            until(lambda: list(end.transport.accept_authenticated()))
            until(lambda: transport.sockets.can_receive(end.socket))
            behind(monkeypatch, end.session, "heard", interrupt)
            with pytest.raises(Alarm):
                end._hear()
            monkeypatch.undo()
        far = Remote(reader)
        writer.enqueue("message")
        assert far.call("dequeue", PATIENCE) == "message"
        assert [row.state for row in writer.statistics().readers] == ["running"]
        far.call("close")


def test_a_handler_raises_when_the_ring_has_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call, whatever it is, sends it to remote readers before it waits."""
    with remote_writer(2, 1) as writer:
        local, remote = (start_remote_reader(writer, rank) for rank in range(2))
        monkeypatch.setattr(cast("Any", writer._writer).sending, "_publish", interrupt)
        with pytest.raises(Alarm):
            enqueue_and_go_on(writer)
        monkeypatch.undo()
        waits = Aside(writer.wait_until_ready, PATIENCE)
        assert local.call("dequeue", PATIENCE) == "message"
        assert remote.call("dequeue", PATIENCE) == "message"
        absent = start_remote_reader(writer, 2)
        waits.result()
        for far in (local, remote, absent):
            far.call("close")


def test_a_handler_raises_again_before_the_next_call_recovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message that the ring has reaches remote readers all the same, before later ones."""
    with remote_queue(1, 1) as (writer, readers):
        sending, caller = cast("Any", writer._writer).sending, threading.current_thread()
        recover, is_armed = sending.recover, True

        def interrupted() -> None:
            if threading.current_thread() is caller:  # the end's own thread would recover first
                if is_armed:
                    raise Alarm
                recover()

        monkeypatch.setattr(sending, "recover", interrupted)
        monkeypatch.setattr(sending, "_publish", interrupt)
        with pytest.raises(Alarm):
            enqueue_and_go_on(writer)
        monkeypatch.delattr(sending, "_publish")
        with pytest.raises(Alarm):
            writer.enqueue("never sent")
        is_armed = False
        writer.enqueue("last")
        for reader in readers:
            assert [*iter(partial(reader.dequeue, PATIENCE), "last")] == ["message"]
        monkeypatch.undo()


def test_a_handler_raises_when_a_look_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing keeps that connection open."""
    spare = Spare()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        dup2 = os.dup2

        def dup2_and_raise(*args: Any, **options: Any) -> None:
            monkeypatch.undo()
            dup2(*args, **options)
            raise Alarm

        monkeypatch.setattr(os, "dup2", dup2_and_raise)
        with (
            pytest.raises(Alarm),
            spare.of(ours.fileno(), os.fstat(ours.fileno()).st_ino),
        ):
            pass
        ours.close()
        theirs.settimeout(PATIENCE)
        assert theirs.recv(1) == b""
    spare.close()


def test_timeouts_behind_a_relay_are_the_callers() -> None:
    """They are the caller's, in the error and in its text, also once the relay has ended."""
    with remote_writer(3, relay=True, remote_liveness=LIVENESS) as writer:
        relay = start_remote_reader(writer, 0)
        with MessageQueue.create_from_handle(writer.export_handle(1), 1) as reader:
            for timeout in (0.75, 2.25):
                with refuses(TimedOut, match=f"after {timeout} s waiting for") as caught:
                    reader.wait_until_ready(timeout)
                assert caught.value.timeout == timeout
                if timeout == 0.75:
                    relay.peer.kill()


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    """The parent's thread held the lock at the fork, and does not exist in the child."""

    def use(_link: object) -> str:
        try:
            writer.statistics()
        except WrongProcess:
            return "refused"
        return "answered"

    with remote_writer() as writer:
        is_held, is_over = threading.Event(), threading.Event()

        def hold() -> None:
            with writer._writer.lock:  # type: ignore[union-attr]
                is_held.set()
                is_over.wait()

        holds = Aside(hold)
        is_held.wait()
        child = start(use)
        try:
            assert child.result() == "refused"
        finally:
            is_over.set()
            holds.result()


class Noticing(list[int]):
    """The descriptors of an end; calls `act` when the last one was closed."""

    act: Any = None

    def __bool__(self) -> bool:
        if not len(self) and self.act is not None:
            act, self.act = self.act, None
            act()
        return len(self) > 0


def test_a_second_close_writes_to_no_foreign_descriptor() -> None:
    """The second does not write to a descriptor that another file has by now."""
    writer = remote_writer()
    end: Any = writer._writer
    taken: list[int] = []

    def close_again() -> None:
        while end._closing_event not in taken:
            taken.append(os.eventfd(0, os.EFD_NONBLOCK))
        Aside(end._close).until_blocked()

    end._events = Noticing(end._events)
    end._events.act = close_again
    writer.close()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(end._closing_event)
    for number in taken:
        os.close(number)
