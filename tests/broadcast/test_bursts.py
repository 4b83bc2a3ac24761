"""Many messages by one call: in order, each once, whatever ends the call."""

import asyncio
import contextlib
import gc
import itertools
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memlane import (
    Cancelled,
    Closed,
    CorruptMessage,
    Gather,
    InvalidType,
    MessageQueue,
    ReaderDied,
    TimedOut,
    WriterClosed,
    WriterDied,
    WrongRole,
)
from memlane._native import Burst
from memlane.broadcast import gather
from tests.broadcast.test_decoding_failures import Bomb, Shy
from tests.support import PATIENCE, Aside, Link, alarms, start
from tests.support.gathers import gather_of
from tests.support.queues import drain, fill, queue_of, refuses, set_event, start_reader
from tests.support.remote_queues import remote_queue

SECONDS = float(os.environ.get("MEMLANE_SOAK_INTERRUPTS", "1"))
STEP = {"step": 1, "tokens": [1, 2, 3], "text": "x" * 40}


class Interrupted(Exception):
    pass


def test_a_burst_arrives_in_order() -> None:
    with queue_of(2, max_chunks=16) as (writer, readers):
        writer.enqueue_many({**STEP, "step": number} for number in range(10))
        for reader in readers:
            assert [one["step"] for one in reader.dequeue_many(100)] == [*range(10)]
        writer.enqueue_many([])
        assert writer.statistics().messages == 10


def test_a_batch_has_at_most_so_many() -> None:
    with queue_of(max_chunks=16) as (writer, (reader,)):
        writer.enqueue_many(range(10))
        assert reader.dequeue_many(3) == [0, 1, 2]
        assert reader.dequeue() == 3
        assert reader.dequeue_many(1) == [4]
        assert reader.statistics().messages == 5
        assert reader.dequeue_many(1 << 40) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("most", [0, -1])
def test_a_batch_of_none_is_refused(most: int) -> None:
    with queue_of() as (writer, (reader,)):
        writer.enqueue(1)
        with refuses(ValueError, match="max must be at least 1"):
            reader.dequeue_many(most)
        with refuses(TypeError):
            writer.enqueue_many(5)  # type: ignore[arg-type]
        assert reader.dequeue_many(2) == [1]


def test_a_batch_waits_for_one_message() -> None:
    with queue_of() as (writer, (reader,)):
        with pytest.raises(TimedOut):
            reader.dequeue_many(4, timeout=0)
        with pytest.raises(Cancelled):
            reader.dequeue_many(4, cancel=set_event())
        waiting = Aside(lambda: reader.dequeue_many(4, PATIENCE))
        writer.enqueue("late")
        assert waiting.result() == ["late"]
        writer.close()
        with pytest.raises(WriterClosed):
            reader.dequeue_many(4)


def test_a_burst_is_larger_than_the_ring() -> None:
    """Readers that sleep are woken before the writer waits for them."""
    with queue_of(2, max_chunks=3) as (writer, readers):
        taking = [Aside(lambda reader=reader: take(reader, 500)) for reader in readers]
        writer.enqueue_many(range(500), PATIENCE)
        assert [aside.result() for aside in taking] == [[*range(500)]] * 2


def take(reader: MessageQueue, count: int) -> list[object]:
    taken: list[object] = []
    while len(taken) < count:
        taken += reader.dequeue_many(7, PATIENCE)
    return taken


def test_bursts_are_refused_to_ends_without_that_role() -> None:
    with queue_of() as (writer, (reader,)):
        with pytest.raises(WrongRole):
            reader.enqueue_many([1])
        with pytest.raises(WrongRole):
            writer.dequeue_many(1)


def test_a_burst_that_times_out_says_how_many_were_sent() -> None:
    with queue_of(max_chunks=4) as (writer, (reader,)):
        with pytest.raises(TimedOut) as caught:
            writer.enqueue_many(range(9), timeout=0)
        assert caught.value.sent == 4
        with pytest.raises(TimedOut) as caught:
            writer.enqueue_many(range(9), timeout=0)
        assert caught.value.sent == 0
        assert drain(reader) == [0, 1, 2, 3]
        assert pickle.loads(pickle.dumps(caught.value)).sent == 0


def test_a_burst_ends_before_what_cannot_be_pickled() -> None:
    with queue_of(max_chunks=8) as (writer, (reader,)):
        with pytest.raises(InvalidType) as caught:
            writer.enqueue_many([1, 2, lambda: 0, 4])
        assert caught.value.sent == 2
        with pytest.raises(ZeroDivisionError) as raised:
            writer.enqueue_many([3, Shy(ZeroDivisionError())])
        assert raised.value.sent == 1  # type: ignore[attr-defined]
        assert drain(reader) == [1, 2, 3]


def test_the_number_is_on_errors_that_refuse_attributes() -> None:
    class Frozen(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    with queue_of(max_chunks=8) as (writer, _):
        with pytest.raises(Frozen) as caught:
            writer.enqueue_many([1, Shy(Frozen())])
        assert caught.value.sent == 1  # type: ignore[attr-defined]


def test_a_dead_reader_ends_a_burst() -> None:
    with MessageQueue(1, max_chunk_bytes=4096, max_chunks=4) as writer:
        reader = start_reader(writer.export_handle(), 0)
        writer.wait_until_ready(PATIENCE)
        sending = Aside(lambda: writer.enqueue_many(range(9), PATIENCE))
        reader.peer.kill()
        with pytest.raises(ReaderDied) as caught:
            sending.result()
        assert caught.value.sent <= 4
        writer.release_reader(0)


@pytest.mark.parametrize("kind", ["queue", "gather"])
def test_a_killed_writer_s_bursts_are_read_first(kind: str) -> None:
    with Gather(1, max_chunk_bytes=4096, max_chunks=8) as collected:
        writer = start(sends_a_burst, collected.export_handle(0) if kind == "gather" else None)
        handle = writer.hear()
        reader: Any = collected
        if kind == "queue":
            reader = MessageQueue.create_from_handle(handle, 0)
            writer.tell("attached")
            writer.hear()
        reader.wait_until_ready(PATIENCE)
        writer.kill()
        assert take(reader, 7) == [*range(7)]
        with pytest.raises(WriterDied):
            reader.dequeue_many(4, PATIENCE)
        reader.close()


def sends_a_burst(link: Link, handle: Any) -> None:
    """Role: sends seven messages, and waits to be killed."""
    if handle is not None:
        gather: Gather = Gather.create_from_handle(handle)
        gather.enqueue_many(range(7))
        link.tell(None)
        link.hear()
    queue: MessageQueue = MessageQueue(1, max_chunk_bytes=4096, max_chunks=8)
    link.tell(queue.export_handle())
    link.hear()
    queue.enqueue_many(range(7))
    link.tell(None)
    link.hear()


def test_large_messages_come_alone_and_in_order() -> None:
    """Each array that is lent has a lease of its own."""
    objects = [1, np.arange(1 << 18), b"two", np.arange(600), "x" * 70_000, 3, {"a": [4]}]
    with queue_of(max_chunk_bytes=1 << 17, max_chunks=8) as (writer, (reader,)):
        for _ in range(5):
            writer.enqueue_many(objects)
            received: list[Any] = []
            sizes = []
            while len(received) < len(objects):
                batch = reader.dequeue_many(8, PATIENCE)
                sizes.append(len(batch))
                received += batch
            assert sizes == [1, 1, 1, 1, 1, 2]
            for sent, got in zip(objects, received, strict=True):
                np.testing.assert_array_equal(sent, got)
            received[1][0] = 7  # private
            del received, batch


def test_a_view_that_is_open_ends_a_batch_before_its_chunk() -> None:
    with queue_of(max_chunk_bytes=1 << 16, max_chunks=3) as (writer, (reader,)):
        writer.enqueue(np.arange(1000))
        with reader.dequeue_view() as view:
            writer.enqueue_many([1, 2])
            assert reader.dequeue_many(9) == [1, 2]
            with pytest.raises(TimedOut):
                writer.enqueue(3, timeout=0)
            assert view[999] == 999
            del view
        writer.enqueue_many([3, 4, 5])
        assert reader.dequeue_many(9) == [3, 4, 5]


def test_what_cannot_be_decoded_ends_a_batch_and_is_the_next() -> None:
    with queue_of(max_chunks=8) as (writer, (reader,)):
        writer.enqueue_many([1, 2, Bomb(ZeroDivisionError()), 3])
        assert reader.dequeue_many(9) == [1, 2]
        assert reader.statistics().messages == 2
        with pytest.raises(ZeroDivisionError):
            reader.dequeue_many(9)
        assert reader.dequeue_many(9) == [3]
        assert reader.statistics().messages == 4
        writer.enqueue_many([Bomb(ZeroDivisionError()), 4])
        with pytest.raises(ZeroDivisionError):
            reader.dequeue_many(9)
        assert drain(reader) == [4]


def test_a_chunk_that_was_filled_by_hand_is_corrupt_when_it_is_due() -> None:
    with queue_of(max_chunks=8) as (writer, (reader,)):
        writer.enqueue(1)
        with writer.acquire_write():
            pass
        writer.enqueue(2)
        assert reader.dequeue_many(9) == [1]
        with pytest.raises(CorruptMessage):
            reader.dequeue_many(9)
        assert reader.dequeue_many(9) == [2]


class Looks:
    """Calls `look` where it is unpickled."""

    look: Callable[[], object] = staticmethod(lambda: None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _look, ()


def _look() -> str:
    Looks.look()
    return "looked"


def test_nothing_counts_as_read_before_it_is_returned() -> None:
    seen = []
    with queue_of(max_chunks=4) as (writer, (reader,)):

        def look() -> None:
            row = writer.statistics().readers[0]
            seen.append((row.behind, reader.statistics().messages, reader.current_idx))
            with pytest.raises(TimedOut):  # no chunk is free
                writer.enqueue(5, timeout=0)

        Looks.look = look
        writer.enqueue_many([1, 2, Looks(), 4])
        assert reader.dequeue_many(9) == [1, 2, "looked", 4]
        assert seen == [(4, 0, 0)]
        assert writer.statistics().readers[0].behind == 0


def test_closed_while_a_batch_is_decoded() -> None:
    with queue_of(max_chunks=4) as (writer, (reader,)):
        Looks.look = reader.close
        writer.enqueue_many([1, Looks(), 3])
        assert reader.dequeue_many(9) == [1, "looked"]
        with pytest.raises(Closed):
            reader.dequeue_many(9)


def test_forked_while_a_batch_is_decoded() -> None:
    """The child is refused, and changes nothing of its parent's."""

    def fork() -> None:
        pids.append(os.fork())

    pids: list[int] = []
    with queue_of(max_chunks=4) as (writer, (reader,)):
        Looks.look = fork
        writer.enqueue_many([1, Looks(), 3])
        batch: list[object] = []
        try:
            batch = reader.dequeue_many(9)
        finally:
            if pids[0] == 0:
                os._exit(len(batch))
        assert os.waitpid(pids[0], 0)[1] == 0
        assert batch == [1, "looked", 3]
        assert reader.statistics().messages == 3


def test_the_latest_comes_alone() -> None:
    with queue_of(mode="latest", max_chunks=4) as (writer, (reader,)):
        writer.enqueue_many(range(9))
        assert reader.dequeue_many(9) == [8]
        assert reader.skipped == 8


def test_without_readers_a_burst_is_discarded() -> None:
    with MessageQueue(0) as writer:
        writer.enqueue_many(range(9))


def test_bursts_reach_other_hosts() -> None:
    with remote_queue(2, n_local=1) as (writer, readers):
        writer.enqueue_many(range(4), PATIENCE)
        for reader in readers:
            taken: list[object] = []
            while len(taken) < 4:
                taken += reader.dequeue_many(4, PATIENCE)
            assert taken == [*range(4)]


def test_awaited_calls_return_what_plain_calls_do() -> None:
    async def call(reader: MessageQueue) -> list[object]:
        with pytest.raises(TimedOut):
            await reader.adequeue_many(3, timeout=0)
        cancelled = asyncio.ensure_future(reader.adequeue_many(3))
        await asyncio.sleep(0)
        cancelled.cancel()
        taken = asyncio.ensure_future(reader.adequeue_many(3))
        await asyncio.sleep(0)
        writer.enqueue_many(range(3))
        return await taken

    with queue_of() as (writer, (reader,)):
        assert asyncio.run(call(reader)) == [0, 1, 2]


def test_bursts_are_gathered_in_the_order_of_each_writer() -> None:
    with gather_of(3, max_chunks=16) as (reader, writers):
        for writer in writers:
            writer.enqueue_many((id(writer), number) for number in range(5))
        taken: list[Any] = []
        while len(taken) < 15:
            batch = reader.dequeue_many(4, PATIENCE)
            assert 1 <= len(batch) <= 4
            taken += batch
        for writer in writers:
            assert [n for who, n in taken if who == id(writer)] == [*range(5)]


def test_one_call_returns_a_message_of_each_writer() -> None:
    with gather_of(4) as (reader, writers):
        for number, writer in enumerate(writers):
            writer.enqueue(number)
        assert sorted(reader.dequeue_many(9)) == [0, 1, 2, 3]
        with pytest.raises(TimedOut):
            reader.dequeue_many(9, timeout=0)


def test_a_gather_forgets_no_writer_whose_message_comes_alone() -> None:
    with gather_of(3, max_chunk_bytes=1 << 17, max_chunks=32) as (reader, writers):
        writers[0].enqueue_many(["small"] * 20)
        writers[2].enqueue_many(["small"] * 20)
        writers[1].enqueue(np.arange(1 << 17))
        batches = [reader.dequeue_many(1, PATIENCE) for _ in range(3)]
        assert sum(isinstance(batch[0], np.ndarray) for batch in batches) == 1
        taken: list[object] = []
        while len(taken) < 38:
            taken += reader.dequeue_many(5, PATIENCE)


def test_a_gather_s_writer_that_closed_or_whose_message_is_broken() -> None:
    with gather_of(2) as (reader, (one, other)):
        one.enqueue(1)
        other.enqueue(Bomb(ZeroDivisionError()))
        one.close()
        seen: list[object] = []
        for _ in range(3):
            try:
                seen += reader.dequeue_many(9, timeout=0)
            except (ZeroDivisionError, TimedOut) as error:
                seen.append(type(error))
        assert sorted(map(str, seen)) == sorted(map(str, [1, ZeroDivisionError, TimedOut]))
        other.enqueue_many([2, 3])
        assert reader.dequeue_many(9) == [2, 3]
        other.close()
        with pytest.raises(WriterClosed):
            reader.dequeue_many(9)


@pytest.mark.parametrize("kind", ["large", "broken"])
def test_a_busy_writer_whose_messages_come_alone_leaves_the_others_their_turn(kind: str) -> None:
    busy = b"x" * 70_000 if kind == "large" else Bomb(ZeroDivisionError())
    with gather_of(3, max_chunk_bytes=1 << 17, max_chunks=16) as (reader, writers):
        writers[0].enqueue_many(["small"] * 3)
        writers[2].enqueue_many(["small"] * 3)
        small = 0
        writers[1].enqueue_many([busy] * 12)
        for _ in range(12):
            with contextlib.suppress(ZeroDivisionError):
                small += reader.dequeue_many(1, PATIENCE) == ["small"]
        assert small == 6


class Looking:
    """Looks into every list that the collector knows while it is decoded."""

    def __reduce__(self) -> Any:
        return look_into_lists, ()


def look_into_lists() -> int:
    return sum(type(one) is list and [*map(type, one)].count(int) for one in gc.get_objects())


def _look_while_decoding(link: Link) -> None:
    with queue_of(max_chunk_bytes=1 << 18) as (writer, (reader,)):
        writer.enqueue((Looking(), b"x" * 100_000))
        assert len(reader.dequeue_many(4)) == 1


def test_a_batch_is_whole_whenever_the_collector_shows_it() -> None:
    assert start(_look_while_decoding).join() == 0


def test_the_number_is_of_this_queue_though_its_objects_send_to_another() -> None:
    with queue_of(max_chunks=4) as (writer, _), queue_of(max_chunks=4) as (other, _):

        def objects() -> Any:
            yield 1
            other.enqueue_many(range(10), 0)

        with pytest.raises(TimedOut) as caught:
            writer.enqueue_many(objects())
        assert caught.value.sent == 0
        assert writer.statistics().messages == 0


def test_a_handler_s_error_in_place_of_a_death_has_the_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(pid: int) -> ReaderDied:
        raise Interrupted

    class Native:
        def send_many(self, objects: object, timeout: object, burst: Burst) -> None:
            burst.sent = 2
            raise ReaderDied(None, 1)

    with gather_of(1) as (_, (writer,)), monkeypatch.context() as patch:
        patch.setattr(gather, "_reader_died", interrupted)
        patch.setattr(writer._writer, "native", Native())
        with pytest.raises(Interrupted) as caught:
            writer.enqueue_many(range(9))
    assert caught.value.sent == 2  # type: ignore[attr-defined]


def test_a_burst_of_a_handler_changes_no_answer_about_the_call_before() -> None:
    with queue_of(max_chunks=4) as (writer, (reader,)):
        native = writer._writer.native  # type: ignore[union-attr]
        native.send(1, None)
        writer.enqueue_many([2])
        assert native.has_sent
        assert reader.dequeue_many(4) == [1, 2]


# Signals ------------------------------------------------------------------------------------------


@pytest.mark.soak(seconds=60 + 4 * SECONDS)
@pytest.mark.parametrize("kind", ["queue", "gather", "remote"])
def test_an_interrupted_burst_says_how_many_were_sent(kind: str) -> None:
    """At whatever moment the handler raises. What it raises after the last one was sent is raised
    in the caller's own code, after the return."""
    state = {"is_armed": False}

    def handler(_number: int, _frame: object) -> None:
        if state["is_armed"]:
            state["is_armed"] = False
            raise Interrupted

    previous, counts = signal.signal(signal.SIGALRM, handler), set[int]()
    with (
        queue_of(max_chunk_bytes=256, max_chunks=8) as (writer, (reader,)),
        gather_of(1, max_chunks=8) as (collected, (of_gather,)),
        remote_queue(1) as (far, (remote,)),
    ):
        ends: dict[str, tuple[Any, Any]] = {
            "queue": (writer, reader),
            "gather": (of_gather, collected),
            "remote": (far, remote),
        }
        send, receive = ends[kind]
        spread = 10e-6 if kind == "remote" else 1e-6
        objects = [0, (1, 2), {"a": 3}, Looks, b"5", 6]
        end = time.monotonic() + SECONDS
        for number in itertools.count():
            if time.monotonic() > end and len(counts) > 2:
                break
            sent = has_returned = None
            try:
                state["is_armed"] = True
                signal.setitimer(signal.ITIMER_REAL, 5e-6 + number % 60 * spread)
                send.enqueue_many(objects)
                has_returned = True
                os.getpid()
                state["is_armed"] = False
            except Interrupted as error:
                sent = getattr(error, "sent", None)
            finally:
                state["is_armed"] = False
            if sent is not None:
                counts.add(sent)
                assert not has_returned
            send.enqueue("end")
            received: list[object] = []
            while "end" not in received:
                received += receive.dequeue_many(2, PATIENCE)
            received.pop()
            if sent is None:  # before the first one, or after the last
                assert len(received) in (0, 6)
            else:
                assert received == objects[:sent]
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.soak(seconds=60 + 4 * SECONDS)
@pytest.mark.parametrize("kind", ["queue", "gather", "remote"])
def test_a_reader_of_batches_loses_nothing_to_a_handler(kind: str) -> None:
    """The messages that `dequeue_many` took are in the caller's variable before a handler can
    raise."""
    is_armed = False

    def handler() -> None:
        if is_armed:
            raise Interrupted

    with (
        queue_of(max_chunk_bytes=1 << 16, max_chunks=8) as (first, (second,)),
        gather_of(2, max_chunk_bytes=1 << 16, max_chunks=8) as (collected, writers),
        remote_queue(1) as (far, (remote,)),
        alarms(handler, every=0.0003),
    ):
        ends: dict[str, tuple[list[Any], Any]] = {
            "queue": ([first], second),
            "gather": (writers, collected),
            "remote": ([far], remote),
        }
        senders, reader = ends[kind]
        end = time.monotonic() + SECONDS
        raised = 0
        next_of = [0] * len(senders)
        for number in itertools.count():
            if time.monotonic() > end and raised > 20:
                break
            left = 0
            for at, sender in enumerate(senders):
                # Some are decoded by C alone, some by Python, one has an array beside it.
                objects = [(at, number, 0), [at, number, 1], (at, number, 2, np.zeros(2000))]
                sender.enqueue_many([*objects[: 2 + number % 2], [at, number, 3]])
                left += 3 + number % 2
            received: list[Any] = []
            while len(received) < left:
                batch = None
                try:
                    is_armed = True
                    batch = reader.dequeue_many(8)
                    is_armed = False
                except Interrupted:
                    is_armed = False
                    raised += 1
                received += batch or []
            for at in range(len(senders)):
                mine = [(one[1], one[2]) for one in received if one[0] == at]
                steps = [0, 1, 2, 3] if number % 2 else [0, 1, 3]
                assert mine == [(number, step) for step in steps]
                next_of[at] += len(mine)


def reads_batches(link: Link, handle: Any) -> None:
    """Role: takes batches until the writer closes."""
    reader = MessageQueue.create_from_handle(handle, 0)
    reader.wait_until_ready(PATIENCE)
    taken: list[object] = []
    try:
        while True:
            taken += reader.dequeue_many(5, PATIENCE)
    except WriterClosed:
        link.tell(taken)


def test_bursts_reach_another_process() -> None:
    with MessageQueue(1, max_chunk_bytes=4096, max_chunks=6) as writer:
        reader = start(reads_batches, writer.export_handle())
        writer.wait_until_ready(PATIENCE)
        sent: list[object] = []
        for number in range(300):
            burst = [(number, at) for at in range(number % 13)]
            writer.enqueue_many(burst, PATIENCE)
            sent += burst
        writer.close()
        assert reader.hear() == sent


def test_a_thread_has_its_turn_beside_long_bursts() -> None:
    with queue_of(max_chunks=4096, max_chunk_bytes=64) as (writer, (reader,)):
        is_over = threading.Event()
        turns = 0

        def count() -> None:
            nonlocal turns
            while not is_over.is_set():
                turns += 1

        counting = Aside(count)
        for _ in range(20):
            writer.enqueue_many(range(4000))
            while reader.dequeue_many(4000)[-1] != 3999:
                pass
        is_over.set()
        counting.result()
        assert turns > 0
        fill(writer)
