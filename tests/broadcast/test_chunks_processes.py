"""acquire_write and acquire_read, by processes."""

from memlane import MessageQueue
from tests.support.queues import first_byte, start_reader


def test_a_chunk_that_one_process_filled_is_read_in_another(method: str) -> None:
    """A chunk filled in one process is read in another."""
    with MessageQueue(1, 1, None, 64, 2) as writer:
        reader = start_reader(writer.export_handle(), 0, method)
        reader.begin(first_byte).until_blocked()
        with writer.acquire_write() as chunk:
            chunk[0] = 42
        assert reader.outcome() == 42
        reader.call("close")
