"""A call during which Python code forks does not continue in the child.

Fails without the guard: two processes write to one ring, and the reader gets messages that nobody
sent, or a chunk that changes while it is read.
"""

import os
import signal
import threading
from collections.abc import Callable

import pytest

from memlane import Closed, MessageQueue, WrongProcess
from tests.support import PATIENCE, Aside, until_asleep
from tests.support.queues import queue_of


class ForksWhenPickled:
    """Pickles as 0 in the process that it was made in."""

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        return int, (0,)


def fork_and_wait() -> int:
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    return 0


class ForksWhenDecoded:
    def __reduce__(self) -> tuple[Callable[[], int], tuple[()]]:
        return fork_and_wait, ()


class ForksAsTimeout:
    def __float__(self) -> float:
        return 5.0 + fork_and_wait()


def in_child_ends_with_wrong_process(parent: int, call: Callable[[], object]) -> object:
    """The call's value in the parent; the child that it forks reports by its exit code."""
    try:
        value = call()
    except (WrongProcess, Closed):
        if os.getpid() == parent:
            raise
        os._exit(7)
    if os.getpid() != parent:
        os._exit(1)
    return value


@pytest.mark.parametrize("size", [0, 200_000])
def test_a_fork_while_pickling_sends_the_message_once(size: int) -> None:
    """The parent's message arrives once, the child sends nothing."""
    with queue_of(max_chunk_bytes=64_000) as (writer, (reader,)):
        message = [ForksWhenPickled(), bytes(size)]
        in_child_ends_with_wrong_process(os.getpid(), lambda: writer.enqueue(message))
        writer.enqueue("next")
        assert [reader.dequeue(), reader.dequeue()] == [[0, bytes(size)], "next"]


def test_fork_while_a_large_stream_is_decoded() -> None:
    """The child does not decode from a chunk that is not its own."""
    with queue_of(max_chunk_bytes=1 << 20, max_chunks=1) as (writer, (reader,)):
        writer.enqueue([bytes(70_000), ForksWhenDecoded(), bytes(100_000)])
        got = in_child_ends_with_wrong_process(os.getpid(), reader.dequeue)
        assert got == [bytes(70_000), 0, bytes(100_000)]


def test_a_fork_in_the_value_of_a_timeout_does_no_harm() -> None:
    """Even while a timeout is converted, Python code may fork."""
    with queue_of() as (writer, (reader,)):
        timeout: object = ForksAsTimeout()
        in_child_ends_with_wrong_process(
            os.getpid(),
            lambda: writer.enqueue(1, timeout),  # type: ignore[arg-type]
        )
        assert reader.dequeue(timeout=0) == 1


@pytest.mark.parametrize("close", [False, True])
def test_a_fork_in_a_signal_handler_ends_the_childs_call(close: bool) -> None:
    """The child's call ends, even if the handler closes the queue there, which is allowed."""
    parent = os.getpid()
    with queue_of(max_chunks=2) as (writer, (reader,)):
        handled = threading.Event()

        def handler(*_: object) -> None:
            fork_and_wait()
            handled.set()
            if close and os.getpid() != parent:
                writer.close()

        previous = signal.signal(signal.SIGUSR1, handler)
        try:
            writer.enqueue("a")
            writer.enqueue("b")
            rescue = Aside(_signal_then_read, reader, handled)
            in_child_ends_with_wrong_process(parent, lambda: writer.enqueue("c"))
            assert rescue.result() == ["a", "b"]
            assert reader.dequeue() == "c"
        finally:
            signal.signal(signal.SIGUSR1, previous)


def _signal_then_read(reader: MessageQueue, handled: threading.Event) -> list[object]:
    until_asleep(os.getpid())  # the main thread: the writer is blocked
    os.kill(os.getpid(), signal.SIGUSR1)
    assert handled.wait(PATIENCE)
    return [reader.dequeue(), reader.dequeue()]
