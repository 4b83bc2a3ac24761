"""release_reader: the queue continues without a reader that is dead or never attached."""

from typing import Any

import pytest

from memlane import MessageQueue
from tests.support import PATIENCE
from tests.support.queues import drain, fill, queue_of, refuses

pytestmark = [pytest.mark.wheel, pytest.mark.unit]


def test_a_living_reader_is_not_released() -> None:
    """It is refused as a ValueError, and the reader misses nothing."""
    with queue_of() as (writer, (reader,)):
        writer.enqueue(1)
        with refuses(ValueError):
            writer.release_reader(0)
        writer.enqueue(2)
        assert drain(reader) == [1, 2]


def test_an_absent_reader() -> None:
    """The writer stops waiting for it, and it can never attach."""
    with MessageQueue(2, 2, [4, 9], 64, 2) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(4), 4)
        assert fill(writer) == 2
        assert drain(reader) == [0, 1]
        with refuses(TimeoutError):
            writer.enqueue(2, timeout=0)
        writer.release_reader(9)
        for number in range(2, 8):
            writer.enqueue(number, timeout=0)
            assert reader.dequeue(timeout=0) == number
        with refuses(ValueError, FileNotFoundError):
            MessageQueue.create_from_handle(writer.export_handle(9), 9)
        writer.wait_until_ready(PATIENCE)
        reader.close()


@pytest.mark.parametrize("rank", [-1, 1, 2**70, "0", None, 0.0])
def test_ranks_that_do_not_exist(rank: Any) -> None:
    """Only a rank of the queue can be released."""
    with queue_of(ready=False) as (writer, _), refuses(ValueError, TypeError):
        writer.release_reader(rank)
