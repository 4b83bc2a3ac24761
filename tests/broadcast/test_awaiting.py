"""Queues in event loops: awaited by asyncio, selected on, many at once.

``MEMLANE_SOAK_CANCELS`` is the number of cancelled calls (default 500).
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import pytest

from memlane import (
    Cancelled,
    Closed,
    ConcurrentUse,
    Handle,
    InvalidArgument,
    InvalidType,
    MessageQueue,
    ReaderDied,
    SystemFault,
    TimedOut,
    ViewInUse,
    WriterClosed,
    WriterDied,
    WrongProcess,
    WrongRole,
    first_ready,
    inspect,
)
from memlane.broadcast.local import LocalWriter
from memlane.testing import kill
from tests.support import PATIENCE, Aside, Link, assert_in_time, eventually, start, until
from tests.support.loops import (
    LOOPS,
    in_loop,
    is_readable,
    move_between_loops,
    receive_and_cancel,
    wait_and_close,
)
from tests.support.queues import BOUND, name_in, queue_of, refuses
from tests.support.seccomp import refuse

CANCELS = int(os.environ.get("MEMLANE_SOAK_CANCELS", "500"))
T = TypeVar("T")


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Runs a coroutine in a loop of each kind."""
    return in_loop(request.param)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


# Awaiting ---------------------------------------------------------------------------------------


def test_both_ends_can_be_awaited(run: Callable[[Any], Any]) -> None:
    """Every message once and in order, though the ring is small."""

    async def both() -> list[int]:
        async def send() -> None:
            for number in range(3000):
                await writer.aenqueue(number)

        sending = asyncio.create_task(send())
        received = [await reader.adequeue() for _ in range(3000)]
        await sending
        return received

    with queue_of(max_chunks=2) as (writer, (reader,)):
        assert run(both()) == list(range(3000))


def sends(link: Link, count: int, pause: float) -> None:
    """Role: the writer, which then waits to be told to close, or is killed."""
    with MessageQueue(1, 1, max_chunks=8) as queue:
        link.tell(queue.export_handle())
        queue.wait_until_ready(PATIENCE)
        for number in range(count):
            queue.enqueue(number, PATIENCE)
            if pause:
                time.sleep(random.random() * pause)
        link.hear()


def test_cancelled_receives_consume_nothing(run: Callable[[Any], Any]) -> None:
    """At random moments: while it waits, while a message comes, before it has begun."""
    peer = start(sends, 1_000_000, 0.001)
    with MessageQueue.create_from_handle(peer.hear(), 0) as reader:
        received = run(receive_and_cancel(reader, CANCELS))
        assert received == list(range(len(received)))
    peer.kill()


def test_cancelled_sends_send_nothing(run: Callable[[Any], Any]) -> None:
    """The message of a cancelled call never arrives."""
    dice = random.Random(8)

    async def send(writer: MessageQueue[int], reader: MessageQueue[int]) -> tuple[Any, Any]:
        sent: list[int] = []
        received: list[int] = []
        for number in range(CANCELS):
            task = asyncio.create_task(writer.aenqueue(number))
            await asyncio.sleep(dice.choice([0, 0, 1e-5, 1e-4]) * dice.random())
            if dice.random() < 0.5:
                with suppress(TimedOut):
                    received.append(reader.dequeue(timeout=0))
            await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
                sent.append(number)
            if not received or dice.random() < 0.1:
                with suppress(TimedOut):
                    received.append(reader.dequeue(timeout=0))
            if len(sent) == len(received):  # or the next dequeue would wait for ever
                writer.enqueue(-1 - number)
                sent.append(-1 - number)
        while len(received) < len(sent):
            received.append(reader.dequeue(timeout=PATIENCE))
        return sent, received

    with queue_of(max_chunks=2) as (writer, (reader,)):
        writer.enqueue(-1_000_000)
        sent, received = run(send(writer, reader))
        assert received == [-1_000_000, *sent][: len(received)]
        assert len(sent) > 10


def test_only_one_await_at_a_time_is_allowed(run: Callable[[Any], Any]) -> None:
    async def twice(reader: MessageQueue, writer: MessageQueue) -> None:
        first = asyncio.create_task(reader.adequeue())
        await eventually(lambda: writer.statistics().readers[0].is_waiting)
        with refuses(RuntimeError, match="another coroutine awaits this queue") as refused:
            await reader.adequeue(timeout=0)
        assert refused.type is ConcurrentUse
        assert writer.statistics().readers[0].is_waiting  # as before
        writer.enqueue("first")
        assert await first == "first"
        assert not writer.statistics().readers[0].is_waiting

    with queue_of() as (writer, (reader,)):
        run(twice(reader, writer))


def test_what_observers_see_of_an_await(run: Callable[[Any], Any]) -> None:
    """Whatever other calls come between: it waits as long as it does, and no longer."""

    def shown(name: str, place: int) -> tuple[str, bool]:
        (segment,) = [each for each in inspect.segments() if each.name == name]
        who = segment.participants[place]
        return who.activity, who.activity_since is not None

    async def wait(writer: MessageQueue, reader: MessageQueue) -> None:
        name = name_in(writer.export_handle())
        receiving = asyncio.create_task(reader.adequeue())
        await eventually(lambda: shown(name, 1) == ("waiting", True))
        with suppress(TimedOut):
            reader.dequeue(timeout=0.02)
        assert shown(name, 1) == ("waiting", True)
        over = threading.Event()
        blocked = Aside(reader.dequeue, cancel=over).until_blocked()
        receiving.cancel()
        await asyncio.sleep(0)
        over.set()
        with pytest.raises(Cancelled):
            blocked.result()
        assert shown(name, 1) == ("elsewhere", False)
        for number in range(4):
            writer.enqueue(number)
        before = writer.statistics().waits
        sending = asyncio.create_task(writer.aenqueue(4))
        await eventually(lambda: shown(name, 0) == ("waiting", True))
        with suppress(TimedOut):
            writer.enqueue(5, timeout=0)
        assert shown(name, 0) == ("waiting", True)
        reader.dequeue()
        await sending
        assert writer.statistics().waits == before + 2  # of two calls
        assert shown(name, 0) == ("elsewhere", False)

    with queue_of() as (writer, (reader,)):
        run(wait(writer, reader))


def test_awaited_calls_keep_to_their_timeouts(run: Callable[[Any], Any]) -> None:
    """0 and less poll; a message takes precedence; NaN and text are refused, with nothing done."""

    async def wait(reader: MessageQueue, writer: MessageQueue) -> None:
        began = time.monotonic()
        with refuses(TimeoutError, match=r"timed out after 0.2 s waiting for the writer"):
            await reader.adequeue(timeout=0.2)
        assert_in_time(BOUND, began)
        assert time.monotonic() - began >= 0.2
        for polls in (0, -1):
            with refuses(TimeoutError):
                await reader.adequeue(timeout=polls)
        writer.enqueue(1)
        assert await reader.adequeue(timeout=0) == 1
        for wrong, kind in ((float("nan"), InvalidArgument), ("soon", InvalidType)):
            with pytest.raises(kind):
                await reader.adequeue(timeout=wrong)  # type: ignore[arg-type]
        for number in range(4):
            await writer.aenqueue(number)
        began = time.monotonic()
        with refuses(TimeoutError, match=r"timed out after 0.2 s waiting for reader 0"):
            await writer.aenqueue(4, timeout=0.2)
        assert_in_time(BOUND, began)
        assert time.monotonic() - began >= 0.2
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(writer.aenqueue(5), 0.05)
        assert [await reader.adequeue() for _ in range(4)] == [0, 1, 2, 3]

    with queue_of() as (writer, (reader,)):
        run(wait(reader, writer))


def test_a_loop_ends_while_it_waits(run: Callable[[Any], Any]) -> None:
    """The next loop goes on, and so does a plain call."""

    async def give_up(reader: MessageQueue, writer: MessageQueue) -> None:
        asyncio.create_task(reader.adequeue())  # noqa: RUF006  # cancelled with the loop
        await eventually(lambda: writer.statistics().readers[0].is_waiting)

    async def receive(reader: MessageQueue) -> Any:
        return await reader.adequeue()

    with queue_of() as (writer, (reader,)):
        run(give_up(reader, writer))
        writer.enqueue(1)
        assert run(receive(reader)) == 1
        run(give_up(reader, writer))
        writer.enqueue(2)
        assert reader.dequeue(timeout=PATIENCE) == 2


def test_iteration_ends_when_the_writer_closes(run: Callable[[Any], Any]) -> None:
    """Ends when the writer closes, after all its messages."""

    async def collect(reader: MessageQueue, writer: MessageQueue) -> list[Any]:
        collected = []
        async for message in reader:
            collected.append(message)
            if message == 3:
                writer.close()
        return collected

    with queue_of(max_chunks=10) as (writer, (reader,)):
        for number in range(6):
            writer.enqueue(number)
        assert run(collect(reader, writer)) == list(range(6))
        with pytest.raises(WriterClosed):
            run(reader.adequeue())


def test_a_busy_queue_lets_others_run(run: Callable[[Any], Any]) -> None:
    """Timeouts and cancellation work, though no call ever waits."""

    async def drain(reader: MessageQueue) -> None:
        began = time.monotonic()
        with suppress(asyncio.TimeoutError):
            async with asyncio.timeout(0.2):
                async for _ in reader:
                    time.sleep(0.001)  # the work
        assert_in_time(BOUND, began)

    peer = start(sends, 1_000_000, 0)
    with MessageQueue.create_from_handle(peer.hear(), 0) as reader:
        run(drain(reader))
    peer.kill()


def test_a_descriptor_that_the_user_has_registered(run: Callable[[Any], Any]) -> None:
    """Stays registered, and `adequeue` works beside it."""

    async def both(reader: MessageQueue, writer: MessageQueue) -> list[int]:
        async def received_late(number: int) -> int:
            receiving = asyncio.create_task(reader.adequeue())
            await eventually(lambda: writer.statistics().readers[0].is_waiting)
            writer.enqueue(number)
            return await receiving

        loop, seen, received = asyncio.get_running_loop(), [], []
        loop.add_reader(reader, seen.append, 1)
        for number in range(3):
            received.append(await received_late(number))
        with pytest.raises(TimedOut):
            await reader.adequeue(timeout=0.02)
        seen.clear()
        writer.enqueue(3)
        await eventually(lambda: seen)
        loop.remove_reader(reader)
        assert reader.dequeue() == 3
        return [*received, await received_late(4)]

    with queue_of() as (writer, (reader,)):
        assert run(both(reader, writer)) == [0, 1, 2, 4]


def test_a_loop_that_was_closed_with_a_call_pending() -> None:
    """Nobody cancelled it; the next loop takes its place."""
    with queue_of() as (writer, (reader,)):
        old = asyncio.new_event_loop()
        pending = old.create_task(reader.adequeue())
        old.run_until_complete(eventually(lambda: writer.statistics().readers[0].is_waiting))
        old.close()
        writer.enqueue(1)
        assert asyncio.run(reader.adequeue(timeout=PATIENCE)) == 1
        pending._log_destroy_pending = False  # type: ignore[attr-defined]
        del pending


def test_a_queue_that_moves_between_loops() -> None:
    """Keeps no descriptor of a loop that was closed, or that never ran again."""
    with queue_of() as (writer, (reader,)):
        move_between_loops(reader)
        writer.enqueue(1)
        assert asyncio.run(reader.adequeue()) == 1


def test_a_handler_that_raises_as_it_registers(run: Callable[[Any], Any]) -> None:
    """The loop knows the descriptor, and the queue does not: it does not spin."""

    async def fail(reader: MessageQueue, writer: MessageQueue) -> float:
        loop = asyncio.get_running_loop()
        add_reader = loop.add_reader

        def interrupted(*args: Any) -> None:
            add_reader(*args)
            raise Alarm

        if not isinstance(loop, asyncio.SelectorEventLoop):  # uvloop's cannot be replaced
            return 0.0
        loop.add_reader = interrupted  # type: ignore[method-assign]
        with pytest.raises(Alarm):
            await reader.adequeue()
        loop.add_reader = add_reader  # type: ignore[method-assign]
        writer.enqueue(1)
        before = time.process_time()
        await asyncio.sleep(0.3)  # nothing happens: it would use more than half of it
        used = time.process_time() - before
        assert await reader.adequeue() == 1
        return used

    with queue_of() as (writer, (reader,)):
        assert run(fail(reader, writer)) < 0.15


class Unwilling:
    """Raises TimedOut as it is encoded."""

    def __reduce__(self) -> Any:
        raise TimedOut("of the object's own", 0.0)


def test_an_object_is_not_taken_for_a_timeout(run: Callable[[Any], Any]) -> None:
    with queue_of() as (writer, _), pytest.raises(TimedOut, match="of the object's own"):
        run(writer.aenqueue(Unwilling()))


class Alarm(Exception):
    """Raised by a signal's handler."""


@pytest.mark.parametrize("step", ["check", "stall_line", "show_waiting", "timed_out"])
def test_a_handler_that_raises_on_the_way(
    run: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The next call is not refused, and the loop sleeps."""

    def ring(*_: object) -> None:
        raise Alarm

    async def fail(writer: MessageQueue) -> float:
        with pytest.raises(Alarm):
            await writer.aenqueue(2, timeout=0.5 if step == "timed_out" else PATIENCE)
        before = time.process_time()
        await asyncio.sleep(0.3)  # nothing happens: it would use more than half of it
        return time.process_time() - before

    monkeypatch.setenv("MEMLANE_RINGBUFFER_WARNING_INTERVAL", "0.05")
    with queue_of(max_chunks=1) as (writer, (reader,)):
        writer.enqueue(1)
        with monkeypatch.context() as patch:
            patch.setattr(LocalWriter, step, ring)
            assert run(fail(writer)) < 0.15
        with pytest.raises(TimedOut):
            run(writer.aenqueue(2, timeout=0.01))
        assert reader.dequeue() == 1
        run(writer.aenqueue(2))


class Ending:
    """Raises as it is decoded."""

    def __reduce__(self) -> Any:
        return (_end, ())


def _end() -> None:
    raise StopAsyncIteration


class Late:
    """Raises TimedOut as it is decoded."""

    def __reduce__(self) -> Any:
        return (_time_out, ())


def _time_out() -> None:
    raise TimedOut("of the message's own", 0.0)


def test_a_message_is_not_taken_for_a_timeout(run: Callable[[Any], Any]) -> None:
    with queue_of() as (writer, (reader,)):
        writer.enqueue(Late())
        writer.enqueue("next")
        with pytest.raises(TimedOut, match="of the message's own"):
            run(reader.adequeue())
        assert run(reader.adequeue()) == "next"


def test_a_message_does_not_end_the_iteration(run: Callable[[Any], Any]) -> None:
    async def iterate(reader: MessageQueue) -> None:
        async for _ in reader:
            pass

    with queue_of() as (writer, (reader,)):
        writer.enqueue(Ending())
        with pytest.raises(RuntimeError, match="raised StopAsyncIteration"):
            run(iterate(reader))


def test_an_awaited_call_ends_when_its_queue_closes(run: Callable[[Any], Any]) -> None:
    """In the loop's thread, and in another."""
    for in_thread in (False, True):
        with queue_of() as (_, (reader,)):
            thread = threading.Thread(target=reader.close)
            run(wait_and_close(reader, thread.start if in_thread else reader.close))
            if in_thread:
                thread.join()


def test_the_writer_is_killed(run: Callable[[Any], Any]) -> None:
    """Its messages come first, then its death, within a second."""

    async def wait(reader: MessageQueue) -> None:
        assert [await reader.adequeue() for _ in range(3)] == [0, 1, 2]
        died = asyncio.get_running_loop().run_in_executor(None, peer.kill)
        with pytest.raises(WriterDied):
            await reader.adequeue()
        moment = time.monotonic()
        assert_in_time(BOUND, await died, moment)

    peer = start(sends, 3, 0)
    with MessageQueue.create_from_handle(peer.hear(), 0) as reader:
        reader.wait_until_ready(PATIENCE)
        run(wait(reader))


def reads_nothing(link: Link, handle: Handle) -> None:
    """Role: a reader that never reads."""
    with MessageQueue.create_from_handle(handle, 0):
        link.tell()
        link.hear()


def test_a_reader_is_killed(
    run: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A send that waits for it is logged, then fails."""
    monkeypatch.setenv("MEMLANE_RINGBUFFER_WARNING_INTERVAL", "0.2")

    async def send(writer: MessageQueue) -> None:
        for number in range(2):
            await writer.aenqueue(number)
        sending = asyncio.create_task(writer.aenqueue(2))
        await eventually(lambda: "no free chunk" in caplog.text)
        kill(peer.pid)
        with pytest.raises(ReaderDied):
            await sending

    with MessageQueue(1, 1, max_chunks=2) as writer:
        peer = start(reads_nothing, writer.export_handle())
        peer.hear()
        run(send(writer))
        peer.join()
        writer.release_reader(0)


def test_one_thread_watches_many_queues_of_a_loop(run: Callable[[Any], Any]) -> None:
    """One thread watches up to 127 of them; with the queues the threads end."""
    before = threads()

    async def echo(ends: list[tuple[MessageQueue, MessageQueue]]) -> list[int]:
        receiving = [asyncio.create_task(reader.adequeue()) for _, reader in ends]
        await eventually(
            lambda: all(writer.statistics().readers[0].is_waiting for writer, _ in ends)
        )
        assert threads() - before <= 2
        for number, (writer, _) in enumerate(ends):
            await writer.aenqueue(number)
        return await asyncio.gather(*receiving)

    with ExitStack() as stack:
        ends = [stack.enter_context(queue_of(max_chunks=2)) for _ in range(60)]
        assert run(echo([(writer, reader) for writer, (reader,) in ends])) == list(range(60))
    until(lambda: threads() <= before, "the threads have ended")


def test_what_cannot_be_awaited(run: Callable[[Any], Any]) -> None:
    """Ends of the other role."""
    with queue_of() as (writer, (reader,)):
        for call in (writer.adequeue, lambda: reader.aenqueue(1), writer.__anext__):
            with pytest.raises(WrongRole):
                run(call())
        with pytest.raises(WrongRole):
            aiter(writer)
        with pytest.raises(WrongRole):
            writer.fileno()
    with MessageQueue(0, 0) as lonely:
        assert run(lonely.aenqueue(1)) is None


# Descriptors ------------------------------------------------------------------------------------


def test_a_descriptor_is_readable_while_a_message_is_there() -> None:
    """Level-triggered, however the messages are taken."""
    with queue_of(max_chunk_bytes=1 << 16) as (writer, (reader,)):
        assert not is_readable(reader, 0.05)
        for take in (
            reader.dequeue,
            lambda: reader.dequeue_view().__enter__(),
            lambda: next(reader),
        ):
            writer.enqueue(1)
            writer.enqueue(2)
            assert is_readable(reader, PATIENCE)
            assert is_readable(reader)
            assert take() == 1
            assert is_readable(reader)
            assert take() == 2
            assert not is_readable(reader)
        with refuses(TimeoutError):
            reader.dequeue(timeout=0.05)  # waits as ever
        with writer.acquire_write() as chunk:
            chunk[0] = 1
        del chunk
        assert is_readable(reader, PATIENCE)
        with reader.acquire_read() as chunk:
            assert not is_readable(reader)  # it is the block's
        del chunk
        writer.close()
        assert is_readable(reader, PATIENCE)
        with pytest.raises(WriterClosed):
            reader.dequeue(timeout=0)
        assert is_readable(reader)


def test_a_descriptor_outlives_close() -> None:
    """A selector on it sees the end, and can unregister it; another queue gets another
    descriptor."""
    with queue_of() as (_, (reader,)), selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        assert not selector.select(0)
        reader.close()
        assert selector.select(0)
        with pytest.raises(Closed):
            reader.dequeue(timeout=0)
        with queue_of() as (_, (other,)):
            assert other.fileno() != reader.fileno()
        selector.unregister(reader)


@pytest.mark.parametrize("is_there", [False, True], ids=["waiting", "with a message"])
def test_a_cancelled_call_is_over_at_once(is_there: bool) -> None:
    """Also before the cancelled task has run again, which has then consumed nothing."""

    async def play(writer: MessageQueue, reader: MessageQueue) -> None:
        cancelled = asyncio.create_task(reader.adequeue())
        await asyncio.sleep(0.02)
        if is_there:
            writer.enqueue(1)
        cancelled.cancel()
        if not is_there:
            asyncio.get_running_loop().call_later(0.02, writer.enqueue, 1)
        assert await reader.adequeue(PATIENCE) == 1
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        waiting = asyncio.create_task(reader.adequeue(PATIENCE))
        await asyncio.sleep(0.02)
        with refuses(ConcurrentUse):  # that one is not cancelled
            await reader.adequeue()
        writer.enqueue(2)
        assert await waiting == 2

    with queue_of(1) as (writer, (reader,)):
        asyncio.run(play(writer, reader))


def test_first_ready_hears_of_a_close_in_another_thread() -> None:
    with queue_of() as (_, (reader,)), queue_of() as (_, (other,)):
        waits = Aside(first_ready, [other, reader], PATIENCE).until_blocked()
        reader.close()
        assert waits.result() is reader


def test_a_chunk_that_a_view_keeps() -> None:
    """A call would not wait, but refuse. When the view is gone, the descriptor is quiet."""
    import numpy as np

    with queue_of(max_chunks=1, max_chunk_bytes=1 << 16) as (writer, (reader,)):
        reader.fileno()
        writer.enqueue(np.zeros(8192, np.uint8))
        with reader.dequeue_view() as kept:
            assert is_readable(reader, PATIENCE)
            with pytest.raises(ViewInUse):
                reader.dequeue(timeout=0)
            del kept
        until(lambda: not is_readable(reader), "it is quiet")


def test_a_blocking_call_and_a_watched_descriptor_are_both_woken() -> None:
    """Both are woken, message by message."""
    with queue_of(max_chunks=2) as (writer, (reader,)):
        reader.fileno()
        sending = threading.Thread(
            target=lambda: [writer.enqueue(number, PATIENCE) for number in range(5000)]
        )
        sending.start()
        assert [reader.dequeue(timeout=PATIENCE) for _ in range(5000)] == list(range(5000))
        sending.join()
        assert not is_readable(reader)


def test_a_descriptor_says_that_the_writer_was_killed() -> None:
    peer = start(sends, 0, 0)
    with MessageQueue.create_from_handle(peer.hear(), 0) as reader:
        reader.wait_until_ready(PATIENCE)
        assert not is_readable(reader, 0.05)
        killed = peer.kill()
        assert is_readable(reader, PATIENCE)
        assert_in_time(BOUND, killed)
        for _ in range(3):
            with pytest.raises(WriterDied):
                reader.dequeue(timeout=0)
            assert is_readable(reader)
            assert first_ready([reader], 0) is reader


def first_ready_of(reader: MessageQueue) -> Callable[[], object]:
    return lambda: first_ready([reader], 0)


def is_refused(call: Callable[[], object]) -> bool:
    """In a child that was forked."""
    try:
        call()
    except WrongProcess:
        return True
    except BaseException:
        return False
    return False


def has_ended(child: int, statuses: list[int]) -> bool:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid == child:
        statuses.append(status)
    return pid == child


def test_a_child_that_was_forked() -> None:
    """Is refused, and does not hang, whatever the thread was doing."""
    with queue_of() as (writer, (reader,)):
        reader.fileno()
        for number in range(50):
            writer.enqueue(number)  # wakes the thread
            child = os.fork()
            if child == 0:
                calls = (reader.fileno, partial(reader.dequeue, timeout=0), first_ready_of(reader))
                os._exit(sum(not is_refused(call) for call in calls))
            ended: list[int] = []
            until(lambda child=child, ended=ended: has_ended(child, ended), "it has ended")
            assert ended == [0]
            assert reader.dequeue(timeout=PATIENCE) == number


def without_futex_waitv(_link: Link) -> None:
    """Role: a kernel before 5.16: each end has a thread of its own."""
    refuse("futex_waitv", errno.ENOSYS)
    before = threads()
    with queue_of() as (writer, (reader,)), queue_of() as (other, (second,)):
        assert not is_readable(reader)
        assert not is_readable(second)
        assert threads() - before == 2
        for _ in range(300):
            threading.Timer(0.0005, other.enqueue, ("x",)).start()  # about as the wait begins
            assert first_ready([reader, second], PATIENCE) is second
            assert second.dequeue() == "x"
        writer.close()
        assert is_readable(reader, PATIENCE)
    until(lambda: threads() <= before + 1, "the threads have ended")


def test_awaiting_works_without_futex_waitv() -> None:
    start(without_futex_waitv).result()


def without_resources(_link: Link) -> None:
    """Role: there is no descriptor left, then no thread."""
    threads = len(os.listdir("/proc/self/task"))
    with queue_of() as (writer, (reader,)), asyncio.Runner() as runner:
        writer.enqueue(0)
        assert runner.run(reader.adequeue()) == 0  # the loop has its descriptors, and all is loaded
        reader.fileno()
        for _ in range(2):
            with no_descriptor(), refuses(SystemFault):
                runner.run(reader.adequeue())
            writer.enqueue(1)
            assert reader.dequeue(timeout=PATIENCE) == 1
    until(lambda: len(os.listdir("/proc/self/task")) == threads, "the watcher's thread has ended")
    with queue_of() as (writer, (reader,)):
        for wrong in (no_descriptor, no_thread):
            with wrong(), refuses(SystemFault):
                reader.fileno()
            writer.enqueue(1)
            assert reader.dequeue(timeout=PATIENCE) == 1


@contextmanager
def no_descriptor() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def no_thread() -> Iterator[None]:
    refuse("clone3", errno.EAGAIN)
    yield


def test_awaiting_without_descriptors_or_threads_is_an_error() -> None:
    """An error, and the queue works as before."""
    start(without_resources).result()


# Many at once -----------------------------------------------------------------------------------


def test_the_first_that_is_ready() -> None:
    """Nothing is consumed; the one served longest ago comes first."""
    with ExitStack() as stack:
        ends = [stack.enter_context(queue_of(max_chunks=2)) for _ in range(200)]
        first_of([writer for writer, _ in ends], [reader for _, (reader,) in ends])


def first_of(writers: list[MessageQueue], readers: list[MessageQueue]) -> None:
    with refuses(TimeoutError, match="none of 200 queues is ready"):
        first_ready(readers, 0.05)
    waits = Aside(first_ready, readers, PATIENCE).until_blocked()
    writers[123].enqueue("here")
    assert waits.result() is readers[123]
    assert first_ready(readers, 0) is readers[123]
    assert readers[123].dequeue(timeout=0) == "here"
    for number in (5, 123, 7):
        writers[number].enqueue(number)
        writers[number].enqueue(number)
    served = [first_ready(readers, 0) for _ in range(6)]
    assert {id(each) for each in served[:2]} == {id(readers[5]), id(readers[7])}
    assert served[2] is readers[123]
    assert served[3:] == served[:3]
    writers[9].close()
    assert first_ready(readers, PATIENCE) is readers[9]


def test_wrong_queues_to_wait_for() -> None:
    """Refused, and nothing is consumed."""
    with refuses(ValueError, match="first_ready needs at least one queue"):
        first_ready([])
    with queue_of() as (writer, (reader,)):
        writer.enqueue(1)
        with pytest.raises(WrongRole):
            first_ready([reader, writer], 0)
        with pytest.raises(InvalidArgument):
            first_ready([reader], float("nan"))
        assert reader.dequeue(timeout=0) == 1
    with pytest.raises(Closed):
        first_ready([reader])
