"""Messages that do not fit a chunk, between processes."""

from contextlib import suppress

import numpy as np
import pytest

from memlane import MessageQueue, TimedOut
from tests.support import PATIENCE, Link, pass_time, start
from tests.support.queues import file_of, queue_of

pytestmark = pytest.mark.wheel

CHUNK = 4096
KIB, MIB = 1 << 10, 1 << 20


def test_a_timeout_consumes_nothing() -> None:
    """M2: a large message in flight, and a reader with tiny timeouts: the order holds."""

    def send(link: Link, writer_handle: object) -> None:
        del writer_handle
        queue = MessageQueue(1, 1, max_chunk_bytes=CHUNK, max_chunks=2)
        link.tell(queue.export_handle())
        queue.wait_until_ready(PATIENCE)
        for number in range(40):
            if number % 2 == 0:
                link.hear()
            queue.enqueue((number, np.full(2 * MIB, number, np.uint8)))
        queue.close()

    sender = start(send, None)
    with MessageQueue.create_from_handle(sender.hear(), 0) as reader:
        reader.wait_until_ready(PATIENCE)
        for expected in range(40):
            if expected % 2 == 0:  # the reader comes first, however busy the machine is
                with pytest.raises(TimedOut):
                    reader.dequeue(timeout=0.0001)
                sender.tell()
            while True:
                with suppress(TimedOut):
                    number, array = reader.dequeue(timeout=0.0001)
                    break
            assert number == expected
            assert (array == number).all()
    sender.result()


def left_after_a_while(_link: Link) -> int:
    """Role: bytes of a queue's file, once its last large message is ten seconds old."""
    with queue_of(max_chunk_bytes=CHUNK) as (writer, (reader,)):
        writer.enqueue(bytes(8 * MIB))
        reader.dequeue()
        writer.enqueue("soon")
        assert file_of(writer).st_blocks * 512 > 8 * MIB
        pass_time(11)
        writer.enqueue("late")
        return file_of(writer).st_blocks * 512


def test_what_is_kept_goes_back_after_a_while() -> None:
    """After ten seconds without a large message the next small one frees the space."""
    assert start(left_after_a_while).result() < MIB
