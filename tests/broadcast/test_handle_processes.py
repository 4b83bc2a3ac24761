"""Handle: passed to another process, it attaches there."""

import pickle

from memlane import Handle, MessageQueue
from tests.support import Link, start
from tests.support.queues import queue_of, start_reader


def pass_on(_link: Link, handle: Handle) -> Handle:
    return handle


def test_a_pickled_handle_comes_back_equal(method: str) -> None:
    """A handle comes back equal through any protocol and another process."""
    with queue_of(2) as (writer, _):
        handle = writer.export_handle()
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(handle, protocol)) == handle
        assert start(pass_on, handle, method=method).result() == handle


def test_a_handle_works_in_another_process(method: str) -> None:
    """A reader in another process attaches by a pickled handle."""
    with MessageQueue(1, 1, None, 4096, 2) as writer:
        reader = start_reader(writer.export_handle(0), 0, method)
        writer.enqueue("over there")
        assert reader.call("dequeue") == "over there"
        reader.call("close")
