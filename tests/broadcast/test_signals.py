"""Signals reach a call that waits, and running their Python handlers loses nothing.

Fails without the guard: a native wait that never checks for signals cannot be interrupted.
"""

import asyncio
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from memlane import Closed, CorruptMessage, MessageQueue
from memlane.broadcast.starting import Starting
from tests.support import PATIENCE, Alarm, Aside, Link, alarm_after, alarms, start, until_asleep
from tests.support.gathers import gather_of
from tests.support.queues import drain, file_of, fill, queue_of, refuses, ring_in
from tests.support.remote_queues import remote_queue


class Interrupted(Exception):
    pass


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that the handler has received; a test may install another handler."""
    numbers: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, previous)


def interrupt_main_thread(then: Callable[[], object] = lambda: None) -> "Aside[None]":
    """Sends SIGUSR1 to the main thread once it is blocked, then calls ``then``."""

    def act() -> None:
        until_asleep(os.getpid())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        until_asleep(os.getpid())
        then()

    return Aside(act)


def raise_interrupted(_number: int, _frame: object) -> None:
    raise Interrupted


CALLS: dict[str, Callable[[MessageQueue, MessageQueue], object]] = {
    "dequeue": lambda _, reader: reader.dequeue(),
    "acquire_read": lambda _, reader: reader.acquire_read().__enter__(),
    "enqueue": lambda writer, _: writer.enqueue("never"),
    "acquire_write": lambda writer, _: writer.acquire_write().__enter__(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_handler_that_raises(heard: list[int], name: str) -> None:
    """Its exception ends the wait; nothing was sent or consumed, and the queue still works."""
    signal.signal(signal.SIGUSR1, raise_interrupted)
    with queue_of(max_chunks=2) as (writer, (reader,)):
        count = fill(writer) if "write" in name or name == "enqueue" else 0
        aside = interrupt_main_thread()
        with pytest.raises(Interrupted):
            CALLS[name](writer, reader)
        aside.result()
        assert not writer.statistics().readers[0].is_waiting
        assert drain(reader) == list(range(count))
        with refuses(TimeoutError, match=r"the writer \(pid \d+ .*, running"):  # and does not wait
            reader.dequeue(timeout=0)
        writer.enqueue("next", timeout=0)
        assert drain(reader) == ["next"]
    assert heard == []


def test_a_handler_that_returns(heard: list[int]) -> None:
    """It runs while the call waits, and the call continues to wait."""
    with queue_of(max_chunks=1) as (writer, (reader,)):
        aside = interrupt_main_thread(lambda: writer.enqueue(1))
        assert reader.dequeue() == 1
        aside.result()
        assert heard == [signal.SIGUSR1]
        writer.enqueue(2)
        aside = interrupt_main_thread(reader.dequeue)
        writer.enqueue(3)
        aside.result()
        assert heard == [signal.SIGUSR1] * 2
        assert drain(reader) == [3]


@pytest.mark.parametrize("name", CALLS)
def test_a_handler_that_closes(heard: list[int], name: str) -> None:
    """A handler that closes the end on which its own thread waits ends that wait with Closed."""
    with queue_of(max_chunks=2) as (writer, (reader,)):
        writes = "write" in name or name == "enqueue"
        if writes:
            fill(writer)
        end = writer if writes else reader

        def handler(_number: int, _frame: object) -> None:
            end.close()
            end.close()

        signal.signal(signal.SIGUSR1, handler)
        aside = interrupt_main_thread()
        with refuses(Closed):
            CALLS[name](writer, reader)
        aside.result()
        with refuses(Closed):
            CALLS[name](writer, reader)
    assert heard == []


def test_many_signals_do_not_prolong_a_timeout(heard: list[int]) -> None:
    """There is one deadline for the whole call, however often it is interrupted."""
    with queue_of() as (_, (reader,)):
        over = threading.Event()

        def send() -> None:
            while not over.wait(0.01):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

        sender = Aside(send)
        try:
            while len(heard) <= 2:
                with refuses(TimeoutError):
                    reader.dequeue(timeout=0.3)
        finally:
            over.set()
            sender.result()


def test_a_handler_that_uses_the_queue(heard: list[int]) -> None:
    """A call in a handler is a second call: it is refused, and the first one continues."""
    errors: list[str] = []

    def handler(_number: int, _frame: object) -> None:
        try:
            reader.dequeue(timeout=0)
        except RuntimeError as error:
            errors.append(type(error).__name__)

    signal.signal(signal.SIGUSR1, handler)
    with queue_of() as (writer, (reader,)):
        aside = interrupt_main_thread(lambda: writer.enqueue("whole"))
        assert reader.dequeue() == "whole"
        aside.result()
        assert errors == ["ConcurrentUse"]


def interrupt_blocks(_link: Link, seed: int) -> None:
    """Role: blocks on chunks, until a hundred were interrupted at random moments."""
    dice = random.Random(seed)
    count = 0
    for number in itertools.count():
        if count == 100:
            return
        with queue_of(max_chunk_bytes=64, max_chunks=4) as (writer, (reader,)):
            writer.enqueue("first")
            try:
                with alarm_after(dice.uniform(1e-6, 4e-5)):
                    with writer.acquire_write(0) if number % 2 else reader.acquire_read(0) as chunk:
                        chunk[:1]
                    del chunk
            except Alarm:
                count += 1
            writer.enqueue("next", timeout=0)
            while True:
                try:
                    if reader.dequeue(timeout=0) == "next":
                        break
                except CorruptMessage:  # filled by hand
                    continue


def test_a_block_on_a_chunk_is_interrupted_anywhere() -> None:
    """The block is left whatever the moment; none stays open for ever."""
    for peer in [start(interrupt_blocks, seed) for seed in range(2)]:
        peer.result()


def create_under_a_profiler(_link: Link) -> int:
    """Role: creates a ring while a signal arrives every 200 us."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    with MessageQueue(1, 1, None, 64 << 20, 1) as queue:
        ring_in(queue).shared_memory.buf.release()  # takes the space of all chunks
        signal.setitimer(signal.ITIMER_REAL, 0)
        return file_of(queue).st_blocks * 512


def test_space_is_taken_under_a_fast_profiler() -> None:
    """tmpfs gives up whenever a signal is pending, so large pieces would never be reserved."""
    assert start(create_under_a_profiler).result() >= 64 << 20


SECONDS = float(os.environ.get("MEMLANE_SOAK_INTERRUPTS", "1"))


def awaited(
    coroutine: Coroutine[object, None, None],
    loop: asyncio.AbstractEventLoop,
    state: dict[str, bool],
) -> None:
    """Drives a coroutine that need not wait: what a handler raises would end a loop that runs."""
    asyncio._set_running_loop(loop)
    try:
        while True:
            coroutine.send(None)
    except StopIteration:
        state["is_inside"] = False  # before anything at which a handler could run
    finally:
        asyncio._set_running_loop(None)


@pytest.mark.filterwarnings("ignore:coroutine")  # one that was never begun
@pytest.mark.soak(seconds=60 + 4 * SECONDS)
@pytest.mark.parametrize("call", ["enqueue", "gather", "aenqueue"])
def test_a_call_that_a_handler_has_left_has_sent_nothing(call: str) -> None:
    """At whatever moment it raises. What it raises after the message was sent is raised in the
    caller's own code, after the return."""
    state = {"is_armed": False, "is_inside": False}

    def handler(_number: int, _frame: object) -> None:
        if state["is_armed"]:
            state["is_armed"] = False
            raise Interrupted

    previous, raised = signal.signal(signal.SIGALRM, handler), 0
    loop = asyncio.new_event_loop()
    with (
        queue_of(max_chunk_bytes=64, max_chunks=8) as (writer, (reader,)),
        gather_of(1) as (
            collected,
            (of_gather,),
        ),
    ):
        send = of_gather.enqueue if call == "gather" else writer.enqueue
        receive = collected if call == "gather" else reader
        end = time.monotonic() + SECONDS
        for number in itertools.count():
            if time.monotonic() > end and raised > 20:
                break
            sent: list[object] = []
            try:
                state["is_armed"] = True
                signal.setitimer(signal.ITIMER_REAL, 5e-6 + number % 50 * 1e-6)
                while len(sent) < 4:
                    state["is_inside"] = True
                    if call == "aenqueue":
                        awaited(writer.aenqueue(len(sent)), loop, state)
                    else:
                        send(len(sent))
                    state["is_inside"] = False
                    sent.append(len(sent))
                os.getpid()  # what the last one left is raised here at the latest
            except Interrupted:
                raised += state["is_inside"]
                received = drain(receive)
                if not state["is_inside"] and len(received) > len(sent):
                    sent.append(len(sent))  # raised before it was appended
                assert received == sent
            finally:
                state["is_armed"] = False
            drain(receive)
    signal.signal(signal.SIGALRM, previous)
    loop.close()


@pytest.mark.soak(seconds=60 + 4 * SECONDS)
@pytest.mark.parametrize("ends", [queue_of, gather_of])
def test_a_reader_loses_nothing_to_a_handler(ends: Callable[..., Any]) -> None:
    """The message that `dequeue` took is in the caller's variable before a handler can raise."""
    is_armed = False

    def handler() -> None:
        if is_armed:
            raise Interrupted

    with ends(1, max_chunk_bytes=1 << 16) as (one, (other,)), alarms(handler, every=0.0003):
        writer, reader = (one, other) if ends is queue_of else (other, one)
        end = time.monotonic() + SECONDS
        raised = 0
        for number in itertools.count():
            if time.monotonic() > end and raised > 20:
                break
            # One is decoded by C alone, one by Python with an array beside it.
            writer.enqueue((number, np.zeros(2000)) if number % 2 else (number, b""))
            message = None
            while message is None:
                try:
                    is_armed = True
                    message = reader.dequeue(0)
                    is_armed = False
                except Interrupted:
                    is_armed = False
                    raised += 1
            assert message[0] == number


# From CPython 3.14 on, a handler also runs between `__enter__` and the block.
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="the block may not begin")
@pytest.mark.soak(seconds=60 + 4 * SECONDS)
@pytest.mark.parametrize("ends", [queue_of, remote_queue], ids=["local", "remote"])
def test_a_view_that_was_taken_is_in_its_block_before_a_handler_can_raise(
    ends: Callable[..., Any],
) -> None:
    is_armed = False

    def handler() -> None:
        if is_armed:
            raise Interrupted

    with ends() as (writer, (reader,)), alarms(handler, every=0.0003):
        end = time.monotonic() + SECONDS
        raised = 0
        for number in itertools.count():
            if time.monotonic() > end and raised > 20:
                break
            writer.enqueue((number, np.zeros(2000)) if number % 2 else (number, b""))
            message = None
            while message is None:
                try:
                    is_armed = True
                    with reader.dequeue_view(PATIENCE) as message:
                        is_armed = False
                except Interrupted:
                    is_armed = False
                    raised += 1
            assert message[0] == number


def test_a_handler_that_raises_before_the_wait_for_processes_leaves_no_descriptor() -> None:
    """At whatever moment of its beginning."""
    is_armed, raised = False, 0

    def handler() -> None:
        if is_armed:
            raise Interrupted

    with alarms(handler, every=0.0003):
        before = len(os.listdir("/proc/self/fd"))
        while raised < 300:
            starting = Starting(set, [os.getpid()])
            try:
                is_armed = True
                with starting:
                    is_armed = False
            except Interrupted:
                is_armed = False
                raised += 1
        assert len(os.listdir("/proc/self/fd")) == before
