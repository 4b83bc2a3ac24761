"""Stopped is not dead: nothing is taken from a process that may continue.

Fails without the guard: liveness by heartbeats or timeouts would declare a stopped process dead.
"""

from memlane import MessageQueue
from tests.support import PATIENCE, Aside
from tests.support.queues import BOUND, fill, refuses, start_reader, start_writer

LONGER = 1.5 * BOUND


def test_a_stopped_reader_is_waited_for_and_loses_nothing(method: str) -> None:
    """The writer waits, says who is stopped when it gives up, and nothing is lost."""
    with MessageQueue(2, 2, [3, 8], 256, 4) as writer:
        other = MessageQueue.create_from_handle(writer.export_handle(3), 3)
        reader = start_reader(writer.export_handle(8), 8, method)
        reader.peer.stop()
        sent = fill(writer)
        assert [other.dequeue() for _ in range(sent)] == list(range(sent))
        with refuses(TimeoutError) as caught:
            writer.enqueue("too late", timeout=LONGER)
        for fact in ("8", str(reader.pid), "stopped"):
            assert fact in str(caught.value)
        waits = Aside(writer.enqueue, sent).until_blocked()
        reader.peer.resume()
        assert [reader.call("dequeue") for _ in range(sent + 1)] == list(range(sent + 1))
        waits.result()
        assert other.dequeue() == sent
        reader.call("close")
        other.close()


def test_a_stopped_reader_that_holds_a_chunk() -> None:
    """It is not overtaken: the chunk that it was given is not written over."""
    with MessageQueue(1, 1, None, 256, 1) as writer:
        reader = start_reader(writer.export_handle())
        writer.enqueue("before")
        reader.peer.stop()
        with refuses(TimeoutError):
            writer.enqueue("after", timeout=LONGER)
        reader.peer.resume()
        assert reader.call("dequeue") == "before"
        writer.enqueue("after", timeout=PATIENCE)
        assert reader.call("dequeue") == "after"
        reader.call("close")


def test_a_stopped_writer_is_waited_for(method: str) -> None:
    """Readers wait for it, and get the next message when it goes on."""
    writer = start_writer(1, method)
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        writer.call("enqueue", 1)
        writer.peer.stop()
        assert reader.dequeue() == 1
        with refuses(TimeoutError):
            reader.dequeue(timeout=LONGER)
        waits = Aside(reader.dequeue).until_blocked()
        writer.peer.resume()
        writer.call("enqueue", 2)
        assert waits.result() == 2
        writer.call("close")


def test_a_stopped_reader_that_should_attach_is_not_dead() -> None:
    """wait_until_ready does not take a stopped reader for a dead one."""
    with MessageQueue(2, 2, None, 256, 2) as writer:
        reader = start_reader(writer.export_handle(0), 0)
        reader.peer.stop()
        with refuses(TimeoutError):
            writer.wait_until_ready(LONGER)
        late = MessageQueue.create_from_handle(writer.export_handle(1), 1)
        writer.wait_until_ready(PATIENCE)
        reader.peer.resume()
        writer.enqueue(1)
        assert (reader.call("dequeue"), late.dequeue()) == (1, 1)
        reader.call("close")
        late.close()
