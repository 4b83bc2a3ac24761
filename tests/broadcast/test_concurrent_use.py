"""One call at a time per end: a second one is refused and changes nothing."""

import threading
from collections.abc import Callable

import pytest

from memlane import ConcurrentUse, MessageQueue
from tests.support import PATIENCE, Aside
from tests.support.queues import drain, fill, queue_of, refuses

pytestmark = pytest.mark.unit

Call = Callable[[MessageQueue], object]
READ: dict[str, Call] = {
    "dequeue": lambda end: end.dequeue(),
    "poll": lambda end: end.dequeue(timeout=0),
    "acquire_read": lambda end: end.acquire_read().__enter__(),
    "broadcast_object": lambda end: end.broadcast_object(),
    "iteration": lambda end: next(iter(end)),
}
WRITE: dict[str, Call] = {
    "enqueue": lambda end: end.enqueue("second"),
    "enqueue at once": lambda end: end.enqueue("second", timeout=0),
    "acquire_write": lambda end: end.acquire_write().__enter__(),
    "broadcast_object": lambda end: end.broadcast_object("second"),
}


@pytest.mark.parametrize("second", READ.values(), ids=READ.keys())
def test_a_second_read_at_once_is_refused(second: Call) -> None:
    """The first call, in another thread, gets its message; the second one gets an error."""
    with queue_of() as (writer, (reader,)):
        first = Aside(reader.dequeue).until_blocked()
        with refuses(RuntimeError) as caught:
            second(reader)
        assert isinstance(caught.value, ConcurrentUse)
        writer.enqueue("for the first")
        assert first.result() == "for the first"
        assert drain(reader) == []
        writer.enqueue("next")
        assert drain(reader) == ["next"]


@pytest.mark.parametrize("second", WRITE.values(), ids=WRITE.keys())
def test_a_second_write_at_once_is_refused(second: Call) -> None:
    """The first call, in another thread, sends its message; the second one sends nothing."""
    with queue_of() as (writer, (reader,)):
        count = fill(writer)
        first = Aside(writer.enqueue, "first").until_blocked()
        with refuses(RuntimeError) as caught:
            second(writer)
        assert isinstance(caught.value, ConcurrentUse)
        assert reader.dequeue() == 0
        first.result()
        assert drain(reader) == [*range(1, count), "first"]


def test_different_ends_do_not_disturb_each_other() -> None:
    """Each end of one process has its own calls."""
    with queue_of(2) as (writer, readers):
        waits = [Aside(reader.dequeue).until_blocked() for reader in readers]
        writer.enqueue(1)
        assert [wait.result() for wait in waits] == [1, 1]


def test_taking_turns_is_allowed() -> None:
    """Several threads may use an end one after the other."""
    with queue_of() as (writer, (reader,)):
        for number in range(5):
            Aside(writer.enqueue, number).result()
            assert Aside(reader.dequeue).result() == number


def test_calls_of_two_threads_send_each_message_once() -> None:
    """Whatever is not refused arrives exactly once."""
    total = 2000
    with queue_of(max_chunks=3) as (writer, (reader,)):
        sent: list[tuple[int, int]] = []
        gate = threading.Barrier(2)

        def send(who: int) -> None:
            gate.wait()
            for number in range(total):
                try:
                    writer.enqueue((who, number), timeout=PATIENCE)
                except ConcurrentUse:
                    continue
                sent.append((who, number))

        def receive() -> list[tuple[int, int]]:
            return list(reader)

        reading = Aside(receive)
        senders = [Aside(send, who) for who in range(2)]
        for sender in senders:
            sender.result()
        writer.close()
        received = reading.result()
        assert sorted(received) == sorted(sent)
        for who in range(2):
            numbers = [number for sender, number in received if sender == who]
            assert numbers == sorted(numbers)
