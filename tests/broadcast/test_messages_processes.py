"""enqueue and dequeue between processes: every reader gets every message, in order, once."""

import pytest

from memlane import MessageQueue
from tests.support import PATIENCE
from tests.support.queues import start_reader

pytestmark = pytest.mark.wheel


def test_many_messages_reach_other_processes_in_order(method: str) -> None:
    """Two readers in processes of their own get all of twenty thousand messages in order."""
    with MessageQueue(2, 2, None, 4096, 8) as writer:
        readers = [start_reader(writer.export_handle(rank), rank, method) for rank in range(2)]
        writer.wait_until_ready(PATIENCE)
        for reader in readers:
            reader.begin(count_up, 20_000)
        for number in range(20_000):
            writer.enqueue((number, b"." * (number % 300)))
        assert [reader.outcome() for reader in readers] == [20_000, 20_000]
        for reader in readers:
            reader.call("close")


def count_up(queue: MessageQueue, total: int) -> int:
    for number in range(total):
        assert queue.dequeue(PATIENCE) == (number, b"." * (number % 300))
    return total
