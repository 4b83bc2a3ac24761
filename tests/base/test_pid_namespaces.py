"""Peers in another PID namespace: their pids mean nothing here, but their locks do.

Fails without the guard: liveness by pid takes them for dead, or another process for them.
"""

import pytest

from memlane import Handle, MessageQueue, ReaderDied, WriterDied
from tests.support import PATIENCE, Aside, assert_in_time, own_pid_namespace, unshare_refusal
from tests.support.queues import BOUND, fill, refuses, start_reader, start_writer, sweep

pytestmark = pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())


def test_a_reader_in_another_pid_namespace_is_watched() -> None:
    """It gets its messages, is never called dead or stopped while it lives, and dies in time."""
    with MessageQueue(1, 1, None, 256, 2) as writer:
        reader = start_reader(writer.export_handle(), 0, "spawn", own_pid_namespace())
        writer.wait_until_ready(PATIENCE)
        for number in range(10):
            writer.enqueue(number)
            assert reader.call("dequeue") == number
        (entry,) = writer.statistics().readers
        assert entry.state not in ("absent", "dead", "closed", "stopped")
        sent = fill(writer)
        with refuses(TimeoutError):
            writer.enqueue("full", timeout=1.5 * BOUND)
        assert [reader.call("dequeue") for _ in range(sent)] == list(range(sent))
        fill(writer)
        blocked = Aside(writer.enqueue, "never").until_blocked()
        killed = reader.peer.kill()
        with refuses(ReaderDied) as caught:
            blocked.result()
        assert_in_time(BOUND, killed, blocked.ended)
        assert caught.value.rank == 0
        assert "in its own pid namespace, which is not this one" in str(caught.value)


def test_a_writer_in_another_pid_namespace_is_watched() -> None:
    """Its reader gets its messages, waits for it, and notices its death in time."""
    writer = start_writer(1, "spawn", command=own_pid_namespace())
    assert isinstance(writer.greeting, Handle)
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        writer.call("enqueue", "from afar")
        assert reader.dequeue() == "from afar"
        with refuses(TimeoutError):
            reader.dequeue(timeout=1.5 * BOUND)
        blocked = Aside(reader.dequeue).until_blocked()
        killed = writer.peer.kill()
        with refuses(WriterDied):
            blocked.result()
        assert_in_time(BOUND, killed, blocked.ended)
    sweep()
