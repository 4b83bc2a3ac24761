"""Iterating over a reader whose writer dies."""

from memlane import MessageQueue, WriterDied
from tests.support.queues import refuses, start_writer, sweep


def test_a_death_is_no_end() -> None:
    """A writer that dies ends the loop with WriterDied, after all complete messages."""
    remote = start_writer()
    with MessageQueue.create_from_handle(remote.greeting, 0) as reader:
        for number in range(3):
            remote.call("enqueue", number)
        remote.peer.kill()
        received = []
        with refuses(WriterDied) as caught:
            for message in reader:
                received.append(message)
        assert received == [0, 1, 2]
        assert caught.value.pid == remote.pid
    sweep()
