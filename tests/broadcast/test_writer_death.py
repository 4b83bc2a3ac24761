"""M5: the writer dies; readers get what was complete, then WriterDied within 1 s.

Fails without the guard: a reader that only waits for flags would wait for ever.
"""

import signal
import time
from collections.abc import Callable

import pytest

from memlane import MessageQueue, WriterDied
from tests.support import PATIENCE, Aside, Remote, assert_in_time
from tests.support.queues import BOUND, fill, refuses, start_reader, start_writer, sweep


def write_half(queue: MessageQueue) -> None:
    """Announce a chunk, deliver a part of it, and stay there."""
    with queue.acquire_write() as chunk:
        chunk[:8] = b"unwhole!"
        signal.pause()


def read_to_the_end(queue: MessageQueue) -> list[object]:
    """Everything up to the error, and the error with its time."""
    received: list[object] = []
    try:
        while True:
            received.append(queue.dequeue())
    except Exception as error:
        return [*received, error, time.monotonic()]


def check_end(end: list[object], pid: int, killed: float) -> list[object]:
    """WriterDied with that pid came within the bound; what was received before."""
    *received, error, moment = end
    assert isinstance(error, WriterDied), error
    assert isinstance(error, RuntimeError)
    assert error.pid == pid
    assert str(pid) in str(error)
    assert isinstance(moment, float)
    assert_in_time(BOUND, killed, moment)
    return received


def test_a_death_between_announcing_and_delivering_loses_no_whole_message(method: str) -> None:
    """Readers here and there get the complete messages, nothing of the half one, then the end."""
    writer = start_writer(3, method, max_chunks=8)
    others = [start_reader(writer.greeting, rank, method) for rank in (1, 2)]
    reader = MessageQueue.create_from_handle(writer.greeting, 0)
    for number in range(3):
        writer.call("enqueue", number)
    writer.begin(write_half).until_blocked()
    others[0].begin(read_to_the_end).until_blocked()
    killed = writer.peer.kill()
    others[1].begin(read_to_the_end)
    ends = [read_to_the_end(reader), *(other.outcome() for other in others)]
    for end in ends:
        assert check_end(end, writer.pid, killed) == [0, 1, 2]
    reader.close()
    for other in others:
        other.call("close")
    sweep()


CALLS: dict[str, Callable[[MessageQueue], object]] = {
    "dequeue": lambda reader: reader.dequeue(),
    "dequeue with a timeout": lambda reader: reader.dequeue(timeout=PATIENCE),
    "acquire_read": lambda reader: reader.acquire_read().__enter__(),
    "broadcast_object": lambda reader: reader.broadcast_object(),
    "iteration": lambda reader: next(iter(reader)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_every_blocked_call_ends(call: Callable[[MessageQueue], object]) -> None:
    """Whatever call waits, it raises within 1 s, and every later one raises again."""
    writer = start_writer()
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        waits = Aside(call, reader).until_blocked()
        killed = writer.peer.kill()
        with refuses(WriterDied):
            waits.result()
        assert_in_time(BOUND, killed, waits.ended)
        for again in CALLS.values():
            with refuses(WriterDied) as caught:
                again(reader)
            assert caught.value.pid == writer.pid
    sweep()


def test_polling_finds_the_death() -> None:
    """A reader that never waits learns of the death within 1 s, too."""
    writer = start_writer()
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        killed = writer.peer.kill()
        begun = killed
        while True:
            try:
                begun = time.monotonic()
                reader.dequeue(timeout=0)
            except TimeoutError:
                assert_in_time(BOUND, killed, begun)
            except WriterDied as error:
                died = error
                break
        assert died.pid == writer.pid
    sweep()


def test_a_full_ring_is_read_to_its_end() -> None:
    """The writer dies while it is blocked: all that fitted arrives, and what did not is gone."""
    writer = start_writer(max_chunks=5)
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        assert writer.call(fill) == 5
        writer.begin("enqueue", "did not fit").until_blocked()
        killed = writer.peer.kill()
        assert check_end(read_to_the_end(reader), writer.pid, killed) == [0, 1, 2, 3, 4]
    sweep()


def test_the_writer_dies_before_a_reader_comes(method: str) -> None:
    """A reader that attaches to what a dead writer left is told, and does not wait for ever."""
    writer = start_writer(1, method)
    writer.call("enqueue", "left behind")
    writer.peer.kill()
    with (
        refuses(WriterDied, FileNotFoundError),
        MessageQueue.create_from_handle(writer.greeting, 0) as reader,
    ):
        assert reader.dequeue() == "left behind"
        reader.dequeue()
    sweep()


def test_a_large_group_learns_of_the_writers_death() -> None:
    """Eight blocked readers in eight processes all learn of it within 1 s."""
    writer = start_writer(8)
    readers: list[Remote] = [start_reader(writer.greeting, rank) for rank in range(8)]
    writer.call("wait_until_ready", 30)
    for reader in readers:
        reader.begin(read_to_the_end).until_blocked()
    killed = writer.peer.kill()
    for reader in readers:
        assert check_end(reader.outcome(), writer.pid, killed) == []
