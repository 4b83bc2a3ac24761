"""release_reader: the queue continues without a reader that is dead or never attached."""

from typing import Any

import pytest

from memlane import InvalidArgument, MessageQueue
from tests.support import PATIENCE
from tests.support.queues import drain, fill, queue_of, refuses
from tests.support.remote_queues import remote_writer

pytestmark = [pytest.mark.wheel, pytest.mark.unit]


def test_a_living_reader_is_not_released() -> None:
    """It is refused as a ValueError, and the reader misses nothing."""
    with queue_of() as (writer, (reader,)):
        writer.enqueue(1)
        with refuses(ValueError):
            writer.release_reader(0)
        writer.enqueue(2)
        assert drain(reader) == [1, 2]


def test_an_absent_reader_can_be_released() -> None:
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
            MessageQueue.create_from_handle(writer.export_handle(), 9)
        writer.wait_until_ready(PATIENCE)
        reader.close()


@pytest.mark.parametrize("n_remote", [0, 1])
@pytest.mark.parametrize("is_released", [False, True], ids=["closed", "released"])
def test_a_place_that_is_free_has_no_handle(is_released: bool, n_remote: int) -> None:
    """Until it is readmitted: nobody could attach with one."""
    with remote_writer(n_remote, 1) as writer:
        if is_released:
            writer.release_reader(0)
        else:
            MessageQueue.create_from_handle(writer.export_handle(0), 0).close()
        with refuses(InvalidArgument, match=r"reader 0 has closed or was released.* readmit\(0\)"):
            writer.export_handle(0)
        with MessageQueue.create_from_handle(writer.readmit(0), 0) as reader:
            writer.enqueue("here")
            assert reader.dequeue(PATIENCE) == "here"
        if n_remote:
            writer.release_reader(1)


@pytest.mark.parametrize("rank", [-1, 1, 2**70, "0", None, 0.0])
def test_ranks_that_do_not_exist(rank: Any) -> None:
    """Only a rank of the queue can be released."""
    with queue_of(ready=False) as (writer, _), refuses(ValueError, TypeError):
        writer.release_reader(rank)
