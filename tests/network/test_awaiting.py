"""Queues between hosts in event loops: awaited by asyncio, selected on, many at once.

``MEMLANE_SOAK_CANCELS`` is the number of cancelled calls (default 500).
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, cast

import pytest

from memlane import (
    Closed,
    ConcurrentUse,
    Handle,
    MessageQueue,
    ReaderDied,
    TimedOut,
    WriterClosed,
    WriterDied,
    WrongProcess,
    first_ready,
)
from memlane import inspect as looking
from memlane.broadcast.network import relay
from memlane.broadcast.network.reader import NetworkReader
from memlane.broadcast.protocol.frames import PIECE
from memlane.testing import kill
from tests.support import (
    PATIENCE,
    Aside,
    Link,
    assert_in_time,
    idle_share,
    late_since,
    start,
    until,
)
from tests.support.loops import (
    LOOPS,
    in_loop,
    is_readable,
    move_between_loops,
    receive_and_cancel,
    turns,
    wait_and_close,
)
from tests.support.proxies import Cable
from tests.support.queues import BOUND, name_in, refuses
from tests.support.remote_queues import (
    LIVENESS,
    address_of,
    relayed_queue,
    remote_queue,
    remote_writer,
    start_remote_reader,
)

CANCELS = int(os.environ.get("MEMLANE_SOAK_CANCELS", "500"))
Ends = AbstractContextManager[tuple[MessageQueue, list[MessageQueue]]]
QUEUES: dict[str, Callable[..., Ends]] = {
    "direct": lambda **options: remote_queue(2, **options),
    "mixed": lambda **options: remote_queue(1, 1, **options),
    "relayed": lambda **options: relayed_queue(2, **options),
}


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Runs a coroutine in a loop of each kind."""
    return in_loop(request.param)


@pytest.fixture(params=QUEUES)
def queues(request: pytest.FixtureRequest) -> Callable[..., Ends]:
    """A writer with two readers, of each kind."""
    return QUEUES[request.param]


async def idle(seconds: float) -> float:
    """Returns how much of a processor this process uses while its loop has nothing to do that
    long."""
    began, used = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - used) / (time.monotonic() - began)


def delay_since(began: float) -> float:
    """Seconds since then, without those that the machine kept everybody waiting."""
    return time.monotonic() - began - late_since(began)


# Awaiting ---------------------------------------------------------------------------------------


def test_both_ends_can_be_awaited(run: Callable[[Any], Any], queues: Callable[..., Ends]) -> None:
    """Every message once and in order, though windows and rings are small."""
    count = 600

    async def both(writer: MessageQueue, readers: list[MessageQueue]) -> list[list[int]]:
        async def send() -> None:
            for number in range(count):
                await writer.aenqueue(number)

        async def receive(reader: MessageQueue) -> list[int]:
            return [await reader.adequeue() for _ in range(count)]

        sending = asyncio.create_task(send())
        received = await asyncio.gather(*map(receive, readers))
        await sending
        return received

    with queues(remote_window=6) as (writer, readers):
        assert run(both(writer, readers)) == [list(range(count))] * 2


def sends(link: Link, count: int, pause: float, options: dict[str, Any]) -> None:
    """Role: the writer, which then waits to be told to close, or is killed."""
    with remote_writer(1, **options) as queue:
        link.tell(queue.export_handle(0))
        queue.wait_until_ready(PATIENCE)
        for number in range(count):
            queue.enqueue(number, PATIENCE)
            if pause:
                time.sleep(random.random() * pause)
        link.hear()


def test_cancelled_receives_consume_nothing(run: Callable[[Any], Any]) -> None:
    """At random moments: while it waits, while a message comes, before it has begun."""
    peer = start(sends, 1_000_000, 0.001, {})
    with MessageQueue.create_from_handle(peer.hear(), 0) as reader:
        received = run(receive_and_cancel(reader, CANCELS))
        assert len(received) > 10
        assert received == list(range(len(received)))
        peer.kill()


def test_cancelled_sends_send_nothing(
    run: Callable[[Any], Any], queues: Callable[..., Ends]
) -> None:
    """The message of a cancelled call never arrives."""
    dice = random.Random(8)

    async def send(writer: MessageQueue[int]) -> list[int]:
        sent: list[int] = []
        for number in range(CANCELS):
            task = asyncio.create_task(writer.aenqueue(number))
            await asyncio.sleep(dice.choice([0, 0, 1e-4, 1e-3]) * dice.random())
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
                sent.append(number)
        await writer.aenqueue(-1)
        return sent

    def receive(reader: MessageQueue[int]) -> list[int]:
        received = []
        while (message := reader.dequeue(PATIENCE)) >= 0:
            received.append(message)
            time.sleep(0.0005)
        return received

    with queues(remote_window=2, max_chunks=2) as (writer, readers):
        receiving = [Aside(receive, reader) for reader in readers]
        sent = run(send(writer))
        assert 10 < len(sent) < CANCELS
        assert [each.result() for each in receiving] == [sent] * 2


def test_awaited_calls_keep_to_their_timeouts(
    run: Callable[[Any], Any], queues: Callable[..., Ends]
) -> None:
    """Both ends time out; the error names the peer that was waited for."""

    async def wait(writer: MessageQueue, readers: list[MessageQueue]) -> None:
        for reader in readers:
            began = time.monotonic()
            with refuses(
                TimeoutError, match=r"timed out after 0.2 s waiting for the (writer|relay)"
            ):
                await reader.adequeue(timeout=0.2)
            assert time.monotonic() - began >= 0.2
            assert_in_time(BOUND, began)
            with refuses(TimeoutError):
                await reader.adequeue(timeout=0)
        for number in range(2):
            await writer.aenqueue(number)
        began = time.monotonic()
        with refuses(TimeoutError, match=r"timed out after 0.2 s waiting for reader"):
            await writer.aenqueue("late", timeout=0.2)
        assert time.monotonic() - began >= 0.2
        assert_in_time(BOUND, began)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(writer.aenqueue("later"), 0.05)
        for reader in readers:
            assert [await reader.adequeue(timeout=PATIENCE) for _ in range(2)] == [0, 1]
        await writer.aenqueue("now")
        for reader in readers:
            assert await reader.adequeue() == "now"

    with queues(remote_window=2, max_chunks=2) as (writer, readers):
        run(wait(writer, readers))


def test_a_ring_that_is_full_beside_an_open_window(run: Callable[[Any], Any]) -> None:
    """The send waits for the reader here, and is logged and told of its room and its death."""

    async def fill(writer: MessageQueue, local: MessageQueue, remote: MessageQueue) -> None:
        for number in range(4):
            await writer.aenqueue(number)
            assert await remote.adequeue() == number
        with refuses(TimeoutError, match="waiting for reader 0"):
            await writer.aenqueue("late", timeout=0.2)
        waiting = asyncio.create_task(writer.aenqueue(4))
        await asyncio.sleep(0.3)  # more than a call looks again after
        assert await idle(0.3) < 0.5
        assert not waiting.done()
        began = time.monotonic()
        assert await local.adequeue() == 0
        await waiting
        assert_in_time(BOUND, began)
        assert await remote.adequeue() == 4

    with remote_queue(1, 1, max_chunks=4) as (writer, (local, remote)):
        run(fill(writer, local, remote))


def test_only_one_await_at_a_time_is_allowed(run: Callable[[Any], Any]) -> None:
    async def twice(reader: MessageQueue, writer: MessageQueue) -> None:
        first = asyncio.create_task(reader.adequeue())
        await turns()
        with pytest.raises(ConcurrentUse, match="another coroutine awaits this queue"):
            await reader.adequeue(timeout=0)
        writer.enqueue("first")
        assert await first == "first"

    with remote_queue() as (writer, (reader,)):
        run(twice(reader, writer))


def test_iteration_ends_with_the_writer(
    run: Callable[[Any], Any], queues: Callable[..., Ends]
) -> None:
    """Ends when the writer closes, after all its messages; plain calls go on in between."""

    async def collect(reader: MessageQueue) -> list[Any]:
        collected = [reader.dequeue(timeout=PATIENCE)]
        async for message in reader:
            collected.append(message)
        with pytest.raises(WriterClosed):
            await reader.adequeue()
        return collected

    async def all_of(readers: list[MessageQueue]) -> list[list[Any]]:
        return await asyncio.gather(*map(collect, readers))

    with queues(remote_window=16, max_chunks=16) as (writer, readers):
        for number in range(6):
            writer.enqueue(number)
        closing = Aside(writer.close, PATIENCE)
        assert run(all_of(readers)) == [list(range(6))] * 2
        closing.result()


def test_an_awaited_call_ends_when_its_queue_closes(
    run: Callable[[Any], Any], queues: Callable[..., Ends]
) -> None:
    """In the loop's thread, and in another."""
    with queues() as (_, readers):
        run(wait_and_close(readers[0], readers[0].close))
        thread = threading.Thread(target=readers[1].close)
        run(wait_and_close(readers[1], thread.start))
        thread.join()


def test_a_writer_that_is_closed_while_it_waits(run: Callable[[Any], Any]) -> None:
    async def wait(writer: MessageQueue) -> None:
        await writer.aenqueue(1)
        waiting = asyncio.create_task(writer.aenqueue(2))
        await turns()
        closing.append(Aside(writer.close, PATIENCE))
        with pytest.raises(Closed):
            await waiting

    closing: list[Aside[None]] = []
    with remote_queue(remote_window=1) as (writer, (reader,)):
        run(wait(writer))
        assert reader.dequeue(PATIENCE) == 1
        closing[0].result()


def test_the_writer_is_killed(run: Callable[[Any], Any]) -> None:
    """Its messages come first, then its death, within a second."""

    async def wait(reader: MessageQueue) -> float:
        assert [await reader.adequeue() for _ in range(3)] == [0, 1, 2]
        died = asyncio.get_running_loop().run_in_executor(None, peer.kill)
        with pytest.raises(WriterDied):
            await reader.adequeue()
        return await died

    peer = start(sends, 3, 0, {})
    with MessageQueue.create_from_handle(peer.hear(), 0) as reader:
        reader.wait_until_ready(PATIENCE)
        assert_in_time(BOUND + 0.2, run(wait(reader)))


def reads_nothing(link: Link, handle: Handle) -> None:
    """Role: a reader that never reads."""
    with MessageQueue.create_from_handle(handle, 0):
        link.tell()
        link.hear()


@pytest.mark.parametrize("where", ["there", "here"])
def test_a_reader_is_killed(
    run: Callable[[Any], Any],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A send that waits for another is logged, then fails."""
    monkeypatch.setenv("MEMLANE_RINGBUFFER_WARNING_INTERVAL", "0.2")

    async def send(writer: MessageQueue) -> None:
        for number in range(2):
            await writer.aenqueue(number)
        waiting = asyncio.create_task(writer.aenqueue(2))
        while "blocked for 0." not in caplog.text:
            await asyncio.sleep(0.01)
        kill(peer.pid)
        with pytest.raises(ReaderDied) as died:
            await waiting
        assert died.value.rank == 0

    n_local = int(where == "here")
    options = {"remote_window": 2, "max_chunks": 2, "remote_liveness": LIVENESS}
    with remote_writer(2 - n_local, n_local, **options) as writer:
        peer = start(reads_nothing, writer.export_handle(0))
        peer.hear()
        with MessageQueue.create_from_handle(writer.export_handle(1), 1):
            run(send(writer))
        peer.join()
        writer.release_reader(0)


def computing(link: Link, handle: Handle) -> list[object]:
    """Role: a reader that awaits, in a loop that is then busy until it is told to go on."""
    with MessageQueue.create_from_handle(handle, 0) as reader:
        link.tell()

        async def receive() -> list[object]:
            received: list[object] = []

            async def collect() -> None:
                async for message in reader:
                    received.append(message)

            collecting = asyncio.create_task(collect())
            await asyncio.sleep(0.7)  # more than a call looks again after
            link.tell()
            link.hear()
            await collecting
            return received

        return asyncio.run(receive())


def test_a_writer_closes_while_the_loop_is_busy() -> None:
    """The reader's thread receives meanwhile, as for a reader that awaits nothing."""
    with remote_writer(1) as writer:
        peer = start(computing, writer.export_handle(0))
        peer.hear()
        writer.wait_until_ready(PATIENCE)
        peer.hear()
        writer.enqueue(1)
        writer.enqueue(2)
        writer.close(timeout=PATIENCE)
        peer.tell()
        assert peer.result() == [1, 2]


def test_a_reader_here_is_killed_while_a_window_is_full(run: Callable[[Any], Any]) -> None:
    """Within a second, though nobody is connected and nothing is logged."""

    async def send(writer: MessageQueue) -> float:
        for number in range(2):
            await writer.aenqueue(number)
        waiting = asyncio.create_task(writer.aenqueue(2))
        await turns()
        killed = peer.kill()
        with pytest.raises(ReaderDied):
            await waiting
        return killed

    with remote_writer(1, 1, remote_window=2) as writer:
        peer = start(reads_nothing, writer.export_handle(0))
        peer.hear()
        assert_in_time(BOUND + 0.2, run(send(writer)))
        writer.release_reader(0)


def test_a_reader_that_is_released(run: Callable[[Any], Any]) -> None:
    """The send goes on at once."""

    async def send(writer: MessageQueue) -> float:
        for number in range(2):
            await writer.aenqueue(number)
        waiting = asyncio.create_task(writer.aenqueue(2))
        await turns()
        began = time.monotonic()
        writer.release_reader(0)
        await waiting
        return began

    with remote_writer(1, remote_window=2) as writer:
        assert_in_time(BOUND, run(send(writer)))


def test_what_observers_see_of_a_send(run: Callable[[Any], Any]) -> None:
    """That it waits for the ring, as long as it does; it is one wait."""

    async def send(writer: MessageQueue, local: MessageQueue) -> None:
        for number in range(4):
            await writer.aenqueue(number)
        before = writer.statistics().waits
        waiting = asyncio.create_task(writer.aenqueue(4))
        await turns()  # a ring that is full for long is a wait, too, before this one begins
        name = name_in(writer.export_handle())
        while not (waits := [each for each in looking.stuck(0.1) if each.segment == name]):
            await asyncio.sleep(0.01)
        (wait,) = waits
        assert (wait.waiter.role, wait.reason) == ("writer", "no free chunk")
        local.dequeue()
        await waiting
        for _ in range(4):
            local.dequeue()
        assert not [each for each in looking.stuck(0.0) if each.segment == name]
        assert writer.statistics().waits == before + 1

    with remote_queue(1, 1, max_chunks=4) as (writer, (local, _)):
        run(send(writer, local))


def test_a_queue_that_moves_between_loops() -> None:
    """Keeps no descriptor of a loop that was closed, or that never ran again."""
    with remote_queue() as (writer, (reader,)):
        move_between_loops(reader)
        writer.enqueue(1)
        assert asyncio.run(reader.adequeue()) == 1


def test_nothing_stays_open(run: Callable[[Any], Any], queues: Callable[..., Ends]) -> None:
    """Ends that were awaited and selected on leave nothing open once they are closed and gone."""

    async def use(writer: MessageQueue, readers: list[MessageQueue]) -> None:
        await writer.aenqueue(1)
        for reader in readers:
            assert is_readable(reader, PATIENCE)
            assert await reader.adequeue() == 1

    counts = []
    for _ in range(3):
        with queues() as (writer, readers):
            run(use(writer, readers))
        del writer, readers
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] == counts[2]


def test_an_awaiting_reader_acknowledges_soon(run: Callable[[Any], Any]) -> None:
    """Soon, though it has nothing more to do: the next message may need the room."""

    async def receive(writer: MessageQueue, reader: MessageQueue) -> float:
        waiting = asyncio.create_task(reader.adequeue())
        await turns()
        writer.enqueue(b"x" * 60_000)
        await waiting
        following = asyncio.create_task(reader.adequeue())
        began = time.monotonic()
        await writer.aenqueue(b"y" * 60_000)
        waited = delay_since(began)
        assert await following == b"y" * 60_000
        return waited

    with remote_queue(remote_window_bytes=100_000, remote_liveness=60.0) as (writer, (reader,)):
        assert sorted(run(receive(writer, reader)) for _ in range(5))[2] < 0.2


@pytest.mark.parametrize("place", [0, 1])
def test_a_relay_that_fails(
    run: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: int,
) -> None:
    """Its readers go on by themselves, though one of them waits: nothing is lost."""

    def fail(*_: object) -> None:
        raise MemoryError

    async def receive(writer: MessageQueue, reader: MessageQueue) -> list[Any]:
        waiting = asyncio.create_task(reader.adequeue())
        await turns()
        writer.enqueue("in the ring")
        received = [await waiting]
        waiting = asyncio.create_task(reader.adequeue())
        await turns()
        monkeypatch.setattr(relay.Relay, "_put", fail)
        writer.enqueue("over its own")
        received.append(await waiting)
        assert not is_readable(reader, 0.2)
        late = []
        for number in range(5):
            waiting = asyncio.create_task(reader.adequeue())
            await asyncio.sleep(0.13)
            began = time.monotonic()
            writer.enqueue(number)
            received.append(await waiting)
            late.append(delay_since(began))
        assert sorted(late)[2] < 0.2
        return received

    with relayed_queue(2, remote_liveness=3.0) as (writer, readers):
        descriptor = readers[place].fileno()
        assert run(receive(writer, readers[place])) == ["in the ring", "over its own", *range(5)]
        assert readers[place].fileno() == descriptor
        assert not is_readable(readers[place], 0.1)
        writer.enqueue("last")
        assert is_readable(readers[place], PATIENCE)
        assert readers[place].dequeue(timeout=0) == "last"
    assert "over its own connection" in caplog.text
    caplog.clear()  # its records refer to errors, and these to frames


def flooding(link: Link, address: tuple[str, int]) -> int:
    """Role: a stranger of an insecure queue, whose frame never ends. Returns how many bytes it has
    sent until its connection is ended, or it is told so: it does not see the end of a connection
    that was not read from (a TCP window of 0)."""
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    part = b"\x03" + (4000).to_bytes(8, "big") + bytes(4000)  # and more follow
    sent = 0
    with socket.create_connection(address) as stranger:
        stranger.settimeout(PATIENCE)
        stranger.sendall(
            b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        )
        greeting = b""
        while len(greeting) < 64:
            greeting += stranger.recv(64 - len(greeting))
        stranger.sendall(b"\x04" + bytes([len(ready)]) + ready)
        stranger.recv(1000)
        link.tell("is let in")
        link.hear()
        stranger.settimeout(0.01)
        while sent < 1 << 30 and not link.has_word():
            with suppress(TimeoutError):
                try:
                    sent += stranger.send((64 * part)[sent % len(part) :])
                except ConnectionError:
                    return sent
        return sent


def test_a_flood_while_a_send_is_awaited(run: Callable[[Any], Any]) -> None:
    """It is ended as soon as ever, though only the reader here is waited for."""

    async def send(writer: MessageQueue) -> int:
        waiting = asyncio.create_task(writer.aenqueue("late"))
        await turns()
        stranger.tell()
        descriptors = writer._writer.transport.descriptors  # type: ignore[union-attr]
        while len(descriptors) > 1:  # the first one listens
            await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()
        with suppress(BrokenPipeError):  # it has seen the end of the connection itself
            stranger.tell()
        sent: int = stranger.result()
        return sent

    options = {"insecure_network": True, "serializer": "msgpack", "max_chunks": 2}
    with (
        remote_writer(1, 1, **options) as writer,
        MessageQueue.create_from_handle(writer.export_handle(0), 0),
    ):
        for number in range(2):
            writer.enqueue(number)
        stranger = start(flooding, address_of(writer.export_handle(1)))
        assert stranger.hear() == "is let in"
        assert run(send(writer)) < 200 << 20


def test_an_awaited_send_beside_a_plain_one(run: Callable[[Any], Any]) -> None:
    """A larger message that had no room does not keep the awaited one waiting."""

    async def send(writer: MessageQueue, reader: MessageQueue) -> None:
        await writer.aenqueue(b"a" * 50_000)
        await writer.aenqueue(b"b" * 48_000)
        waiting = asyncio.create_task(writer.aenqueue(b"c" * 10_000))
        await turns()
        with refuses(TimeoutError):
            writer.enqueue(b"d" * 200_000, timeout=0)
        reader.dequeue(PATIENCE)
        began = time.monotonic()
        await waiting
        assert_in_time(BOUND, began)

    with remote_queue(remote_window_bytes=100_000, remote_liveness=3.0) as (writer, (reader,)):
        run(send(writer, reader))


def test_a_plain_receive_takes_the_message_before_an_awaited_one(run: Callable[[Any], Any]) -> None:
    """Takes the first message, and the second is noticed at once."""

    async def receive(writer: MessageQueue, reader: MessageQueue) -> list[float]:
        late = []
        for _ in range(5):
            waiting = asyncio.create_task(reader.adequeue(timeout=PATIENCE))
            await asyncio.sleep(0.07)
            writer.enqueue("a")
            writer.enqueue("b")
            time.sleep(0.005)
            began = time.monotonic()
            assert reader.dequeue(timeout=PATIENCE) == "a"
            assert await waiting == "b"
            late.append(delay_since(began))
        return late

    with remote_queue(remote_window=4, remote_liveness=3.0) as (writer, (reader,)):
        assert sorted(run(receive(writer, reader)))[2] < 0.2


@pytest.mark.parametrize("call", ["first_ready", "fileno"])
def test_the_first_look_sees_what_has_come(call: str) -> None:
    """The thread has shown nothing yet: the message came while there was no descriptor."""
    with remote_queue() as (writer, (reader,)):
        end: Any = reader._reader

        def has_come() -> bool:
            with end.lock:
                return bool(end.incoming.receive())

        writer.enqueue("there")
        until(has_come, "the message is here")
        if call == "first_ready":
            assert first_ready([reader], 0) is reader
        else:
            assert select.select([reader.fileno()], [], [], 0)[0]
        assert reader.dequeue(timeout=0) == "there"


def test_first_ready_works_beside_an_await(run: Callable[[Any], Any]) -> None:
    async def receive(writer: MessageQueue, reader: MessageQueue) -> list[float]:
        late = []
        for number in range(5):
            waiting = asyncio.create_task(reader.adequeue(timeout=PATIENCE))
            await asyncio.sleep(0.08)
            threading.Timer(0.03, writer.enqueue, (number,)).start()
            began = time.monotonic()
            assert first_ready([reader], PATIENCE) is reader
            late.append(delay_since(began))
            await waiting
        return late

    with remote_queue(remote_liveness=3.0) as (writer, (reader,)):
        reader.fileno()
        assert sorted(run(receive(writer, reader)))[2] < 0.2


def test_a_large_message_lets_others_run(run: Callable[[Any], Any]) -> None:
    """It is received in parts, between which other tasks have a turn."""
    size = 128 << 20

    async def receive(writer: MessageQueue, reader: MessageQueue) -> tuple[list[int], int]:
        count, end = 0, cast(NetworkReader, reader._reader)

        async def tick() -> None:
            nonlocal count
            while True:
                count += 1
                await asyncio.sleep(0)

        waiting = asyncio.create_task(reader.adequeue())
        await turns()
        hears: list[int] = []  # frames that each received

        def received() -> int:
            sequence, piece = end.session.wanted
            return sequence * (size // PIECE) + piece

        def counted() -> bool:
            with end.lock:
                before = received()
                is_ready = end.hear_now()
                hears.append(received() - before)
            return is_ready

        parts = reader._awaiting._signal._parts  # type: ignore[union-attr]
        parts[1]._hear = counted
        ticking = asyncio.create_task(tick())
        await asyncio.to_thread(writer.enqueue, bytes(size))  # here, it would keep the loop busy
        assert len(await waiting) == size
        ticking.cancel()
        return hears, count

    with remote_queue(remote_window_bytes=2 * size, remote_liveness=5.0) as (writer, (reader,)):
        hears, count = run(receive(writer, reader))
        # The rest is received by the thread, while the loop is busy.
        assert 0 < max(hears) < size // PIECE // 4
        assert count >= len(hears)


class Alarm(Exception):
    """Raised by a signal's handler."""


def test_a_handler_that_closes_as_the_time_is_over() -> None:
    """The reader is closed, and the writer knows."""
    with remote_queue() as (writer, (reader,)):
        end: Any = reader._reader
        who = end.session.who

        def close(now: float) -> str:
            text: str = who(now)
            if end.guard.thread == 0 and not reader._is_closed:
                signal.raise_signal(signal.SIGUSR1)
            return text

        before = signal.signal(signal.SIGUSR1, lambda *_: reader.close(timeout=1))
        try:
            end.session.who = close
            with pytest.raises((TimedOut, Closed)):
                asyncio.run(reader.adequeue(timeout=0.05))
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert end._is_freed
        until(lambda: writer.statistics().readers[0].state == "closed")


def test_a_handler_that_raises_as_an_await_ends() -> None:
    """The descriptor says what comes next as soon as ever."""
    with remote_queue(remote_liveness=3.0) as (writer, (reader,)):
        reader.fileno()
        end: Any = reader._reader
        show_waiting = end.show_waiting

        def raises(is_waiting: bool, counts: bool) -> None:
            if not is_waiting:
                raise Alarm
            show_waiting(is_waiting, counts)

        end.show_waiting = raises
        with pytest.raises(Alarm):
            asyncio.run(reader.adequeue(timeout=0.05))
        end.show_waiting = show_waiting
        late = []
        for number in range(5):
            time.sleep(0.13)
            began = time.monotonic()
            writer.enqueue(number)
            assert is_readable(reader, PATIENCE)
            late.append(delay_since(began))
            assert reader.dequeue(timeout=0) == number
        assert sorted(late)[2] < 0.2


def test_a_handler_that_raises_as_a_call_ends() -> None:
    """The next call returns the message: nobody has it."""
    with remote_queue() as (writer, (reader,)):
        writer.enqueue("kept")

        def raises(frame: Any, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_name == "_end_call":
                sys.setprofile(None)
                raise Alarm

        sys.setprofile(raises)
        try:
            with pytest.raises(Alarm):
                reader.dequeue(timeout=PATIENCE)
        finally:
            sys.setprofile(None)
        assert reader.dequeue(timeout=PATIENCE) == "kept"


def test_a_descriptor_after_a_handler_that_raised_anywhere_in_a_call() -> None:
    """It shows the next message. Fails without the guard: until the thread looked again, half a
    second later, or for ever if the handler kept the call from noting its end."""
    with remote_queue() as (writer, (reader,)):
        reader.fileno()
        end: Any = reader._reader
        end._recent = 10 * PATIENCE  # so that the thread looks only if it is told to
        moment, is_over = 0, False
        while not is_over:
            moment += 1
            is_over = not _raises_in_a_poll(reader, moment)
            writer.enqueue(moment)
            assert is_readable(reader, PATIENCE), moment
            assert reader.dequeue(PATIENCE) == moment
        assert moment > 50


def _raises_in_a_poll(reader: MessageQueue, moment: int) -> bool:
    """Raises at that moment of a dequeue that finds nothing; returns whether it has so many."""
    left = moment

    def raises(frame: Any, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and "/memlane/" in frame.f_code.co_filename:
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise Alarm

    sys.setprofile(raises)
    try:
        reader.dequeue(0.001)
    except Alarm:
        return True
    except TimedOut:
        return False
    finally:
        sys.setprofile(None)
    raise AssertionError("there was a message")


def test_a_handler_that_raises_as_a_relay_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader goes on with the next call."""

    def fail(*_: object) -> None:
        raise MemoryError

    class Interrupted:
        """An epoll descriptor, during whose system call a signal comes."""

        is_armed = True

        def __init__(self, real: Any) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def unregister(self, descriptor: int) -> None:
            self._real.unregister(descriptor)
            if self.is_armed:
                self.is_armed = False
                raise Alarm

    with relayed_queue(2) as (writer, readers):
        reader = readers[1]
        reader.fileno()
        joint: Any = reader._watch
        joint._epoll = Interrupted(joint._epoll)
        monkeypatch.setattr(relay.Relay, "_put", fail)
        writer.enqueue("after")
        with pytest.raises(Alarm):
            reader.dequeue(PATIENCE)
        assert is_readable(reader, PATIENCE)
        assert reader.dequeue(PATIENCE) == "after"
    caplog.clear()  # its records refer to errors, and these to frames


# Descriptors ------------------------------------------------------------------------------------


def test_a_descriptor_is_readable_while_a_message_is_there(queues: Callable[..., Ends]) -> None:
    """Level-triggered, however the messages are taken."""
    with queues(remote_window=16, max_chunks=16) as (writer, readers):
        for reader in readers:
            assert not is_readable(reader, 0.05)
        for number in range(60):
            writer.enqueue(number)
            writer.enqueue(-number)
            for reader in readers:
                assert is_readable(reader, PATIENCE)
                assert reader.dequeue(PATIENCE) == number
                assert is_readable(reader, PATIENCE)
                assert reader.dequeue(PATIENCE if number % 2 else 0) == -number
                assert not is_readable(reader)
                with refuses(TimeoutError):
                    reader.dequeue(timeout=0.001)
        Aside(writer.close, PATIENCE)
        for reader in readers:
            assert is_readable(reader, PATIENCE)
            for _ in range(2):
                with pytest.raises(WriterClosed):
                    reader.dequeue(timeout=PATIENCE)
                assert is_readable(reader)
            reader.close()
            assert is_readable(reader)


class Valve(Cable):
    """A proxy that passes on `open_for` more times up to 64 KiB."""

    open_for = 1 << 60

    def _pass_on(self, end: Any) -> None:
        if self.open_for <= 0:
            time.sleep(0.001)
            return
        self.open_for -= 1
        super()._pass_on(end)


def test_a_part_of_a_message_is_none() -> None:
    with (
        remote_writer(1) as writer,
        Valve(writer.export_handle(0)) as valve,
        MessageQueue.create_from_handle(valve.handle, 0) as reader,
    ):
        writer.wait_until_ready(PATIENCE)
        reader.fileno()
        valve.open_for = 0
        writer.enqueue(bytes(4 << 20))
        session = reader._reader.session  # type: ignore[union-attr]

        def is_a_part_here() -> bool:
            valve.open_for = max(valve.open_for, 1)
            return session.wanted[1] > 0

        until(is_a_part_here)
        assert not is_readable(reader, 0.1)
        with pytest.raises(TimedOut):
            asyncio.run(reader.adequeue(timeout=0.1))
        valve.open_for = 1 << 60
        assert is_readable(reader, PATIENCE)
        assert len(reader.dequeue(timeout=0)) == 4 << 20


def test_no_signal_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """However calls, threads and acknowledgements take turns on the socket, the next message is
    noticed at once: there is no second look here that would hide it."""
    opening = NetworkReader.__init__

    def open_without_looking_again(reader: NetworkReader, *args: Any, **options: Any) -> None:
        opening(reader, *args, **options)
        reader._recent = 1e6

    monkeypatch.setattr(NetworkReader, "__init__", open_without_looking_again)
    dice = random.Random(3)

    async def take(reader: MessageQueue, number: int) -> None:
        way = dice.randrange(4)
        if way == 0:
            assert is_readable(reader, PATIENCE)
            assert reader.dequeue(timeout=0) == number
        elif way == 1:
            assert first_ready([reader], PATIENCE) is reader
            assert reader.dequeue(timeout=0) == number
        elif way == 2:
            assert await reader.adequeue(timeout=PATIENCE) == number
        else:
            assert reader.dequeue(timeout=PATIENCE) == number

    async def take_all(reader: MessageQueue) -> None:
        for number in range(3000):
            await take(reader, number)

    peer = start(sends, 3000, 0.0005, {"remote_window": 64, "remote_liveness": 60.0})
    with MessageQueue.create_from_handle(peer.hear(), 0) as reader:
        asyncio.run(take_all(reader))
        peer.tell(None)
        assert is_readable(reader, PATIENCE)
        with pytest.raises(WriterClosed):
            reader.dequeue(timeout=PATIENCE)
    peer.result()


def test_a_blocking_call_and_a_watched_descriptor_are_both_woken() -> None:
    """Both are woken, message by message."""
    with remote_queue() as (writer, (reader,)):
        reader.fileno()
        sending = Aside(lambda: [writer.enqueue(number, PATIENCE) for number in range(3000)])
        assert [reader.dequeue(timeout=PATIENCE) for _ in range(3000)] == list(range(3000))
        sending.result()
        assert not is_readable(reader)


def test_a_descriptor_says_that_the_writer_was_killed() -> None:
    peer = start(sends, 0, 0, {})
    with MessageQueue.create_from_handle(peer.hear(), 0) as reader:
        reader.wait_until_ready(PATIENCE)
        assert not is_readable(reader, 0.05)
        killed = peer.kill()
        assert is_readable(reader, PATIENCE)
        assert_in_time(BOUND + 0.2, killed)
        for _ in range(3):
            with pytest.raises(WriterDied):
                reader.dequeue(timeout=0)
            assert is_readable(reader)
            assert first_ready([reader], 0) is reader


def test_a_connection_that_is_cut() -> None:
    """The descriptor is quiet meanwhile; then it says what arrives, or that nothing ever will."""
    with (
        remote_writer(1, remote_liveness=3.0) as writer,
        Cable(writer.export_handle(0)) as cable,
        MessageQueue.create_from_handle(cable.handle, 0) as reader,
    ):
        writer.wait_until_ready(PATIENCE)
        assert not is_readable(reader)
        cable.cut(mend=True)
        writer.enqueue("after")
        assert is_readable(reader, PATIENCE)
        assert reader.dequeue(timeout=0) == "after"
        assert not is_readable(reader, 0.05)
        with cable.refusing():
            assert is_readable(reader, PATIENCE)
            with pytest.raises(WriterDied):
                reader.dequeue(timeout=0)


def test_a_child_that_was_forked(queues: Callable[..., Ends]) -> None:
    """Is refused, and takes nothing from its parent, whose descriptor it shares."""
    with queues() as (writer, readers):
        for reader in readers:
            reader.fileno()
        for number in range(20):
            writer.enqueue(number)
            if (child := os.fork()) == 0:
                status = 0
                for reader in readers:
                    for call in (reader.fileno, lambda r=reader: first_ready([r], 0)):
                        try:
                            call()
                        except WrongProcess:
                            continue
                        status = 1
                    reader.close()
                os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            for reader in readers:
                assert is_readable(reader, PATIENCE)
                assert reader.dequeue(timeout=PATIENCE) == number


def test_idle_ends_sleep(run: Callable[[Any], Any]) -> None:
    """Awaited, selected on and closed by their writer: none of them costs anything."""

    async def awaited(readers: list[MessageQueue]) -> float:
        waiting = [asyncio.create_task(reader.adequeue()) for reader in readers]
        await asyncio.sleep(0.2)  # more than a call looks again after
        used = await idle(1.0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return used

    with ExitStack() as stack:
        ends = [stack.enter_context(remote_queue()) for _ in range(5)]
        readers = [reader for _, (reader,) in ends]
        assert run(awaited(readers)) < 0.1
        for reader in readers:
            reader.fileno()
        time.sleep(0.2)
        assert idle_share() < 0.1
        closing = [Aside(writer.close, PATIENCE) for writer, _ in ends]
        for each in closing:
            each.result()
        assert run(awaited(readers)) < 0.1  # all are over, and nobody takes that
        time.sleep(0.2)
        assert idle_share() < 0.1


def test_the_first_of_many_queues_is_returned() -> None:
    """Also of queues on this host and others at once."""
    with ExitStack() as stack:
        ends = [stack.enter_context(make()) for make in (*QUEUES.values(), remote_queue) * 3]
        writers, readers = [w for w, _ in ends], [r[-1] for _, r in ends]
        with refuses(TimeoutError, match="none of 12 queues is ready"):
            first_ready(readers, 0.05)
        for number in (7, 2, 0, 11):
            threading.Timer(0.02, writers[number].enqueue, (number,)).start()
            assert first_ready(readers, PATIENCE) is readers[number]
            assert readers[number].dequeue(timeout=0) == number


def test_the_loop_goes_on_while_a_stopped_reader_holds_up_a_send(run: Callable[[Any], Any]) -> None:
    """A stopped reader holds up an awaited send, and the loop goes on meanwhile."""

    async def send(writer: MessageQueue) -> None:
        for number in range(4):
            await writer.aenqueue(number)
        waiting = asyncio.create_task(writer.aenqueue(4))
        for _ in range(20):
            await asyncio.sleep(0.001)
            assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with remote_writer(1, remote_window=4) as writer:
        there = start_remote_reader(writer)
        run(send(writer))
        assert [there.call("dequeue", PATIENCE) for _ in range(4)] == [0, 1, 2, 3]
        there.call("close")
