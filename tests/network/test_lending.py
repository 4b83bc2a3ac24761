"""Large bytes are sent from where they are, and everything this needs ends with the queue."""

import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import zmq
from zmq.utils.garbage import gc as collector

from memlane import MessageQueue
from memlane.broadcast.network import transport
from tests.support import PATIENCE, Aside, until
from tests.support.remote_queues import HERE, remote_queue, remote_writer, start_remote_reader

pytestmark = pytest.mark.wheel

LARGE = 3 << 20


def test_bytes_are_not_copied_and_let_go_when_read() -> None:
    """The queue holds the caller's object while it may be sent again, and no longer."""
    data = bytes(range(256)) * (LARGE // 256)
    alone = sys.getrefcount(data)
    with remote_queue(2) as (writer, (fast, slow)):
        writer.enqueue(data)
        assert sys.getrefcount(data) > alone
        assert fast.dequeue(PATIENCE) == data
        with pytest.raises(TimeoutError):
            fast.dequeue(0.1)
        assert sys.getrefcount(data) > alone
        assert slow.dequeue(PATIENCE) == data
        waits = Aside(slow.dequeue, PATIENCE)
        until(lambda: writer.statistics().readers[1].behind == 0)
        writer.enqueue("next")
        assert waits.result() == "next"
        until(lambda: sys.getrefcount(data) == alone)


@pytest.mark.parametrize("make", [bytearray, np.frombuffer], ids=["bytearray", "array"])
def test_what_can_change_is_copied(make: Callable[[bytes], object]) -> None:
    """Changes by the caller after enqueue never reach a reader (M20)."""
    data = bytearray(b"a" * LARGE)
    sent = np.frombuffer(data, np.uint8) if make is np.frombuffer else data
    with remote_writer(1) as writer:
        writer.enqueue(sent)
        data[:] = b"b" * LARGE
        reader = start_remote_reader(writer)
        assert bytes(reader.call("dequeue")) == b"a" * LARGE
        reader.call("close")


def threads() -> int:
    return threading.active_count()


def test_nothing_of_pyzmqs_stays() -> None:
    """pyzmq's collector of lent memory ends with the last writer that lent something."""
    before = threads()
    with remote_queue() as (first, (reader,)):
        with remote_queue() as (second, (other,)):
            for writer, end in ((first, reader), (second, other)):
                writer.enqueue(b"x" * LARGE)
                end.dequeue(PATIENCE)
            assert collector.is_alive()
        first.enqueue(b"y" * LARGE)
        assert len(reader.dequeue(PATIENCE)) == LARGE
        assert collector.is_alive()
    assert not collector.is_alive()
    assert threads() == before


def test_somebody_elses_collector_is_left_alone() -> None:
    """It belongs to the whole process: earlier users keep it."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as own:
        own.bind(f"tcp://{HERE}:*")
        lent = zmq.Frame(b"z" * LARGE, copy=False)
        try:
            with remote_queue() as (writer, (reader,)):
                writer.enqueue(b"x" * LARGE)
                reader.dequeue(PATIENCE)
            assert collector.is_alive()
            assert collector.refs
        finally:
            del lent
            until(lambda: not collector.refs)
            collector.stop()


def test_a_writer_that_closes_in_a_signal_handler_of_another_ones_start() -> None:
    """The handler ran with the lock held that it needs, by the same thread."""
    with remote_queue() as (writer, (reader,)):
        reader.close()
        Aside(close_in_begin, writer).result()


def close_in_begin(writer: MessageQueue) -> None:
    """As a handler would that runs in the middle of `begin`."""
    with transport._lending:
        writer.close()


# The finalizers of the whole process are called late: they came before pyzmq's collector.
LEAVE = """
import weakref
weakref.finalize(weakref, id, 0)
from memlane import MessageQueue
queue = MessageQueue(1, 0, connect_ip="127.0.0.1")
reader = MessageQueue.create_from_handle(queue.export_handle(0), 0)
for number in range(12):
    queue.enqueue(bytes(4 << 20))
print("full", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "queue.close()"])
def test_an_interpreter_with_lent_memory_exits_cleanly(end: str) -> None:
    """An interpreter exits cleanly while libzmq still has lent memory."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVE.format(end=end)], capture_output=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"full\n", b"")
