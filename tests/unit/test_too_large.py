"""A message that does not fit one chunk is refused as a whole."""

import numpy as np
import pytest

from memlane import MessageTooLarge
from tests.queues import queue_of, refuses

MESSAGES = [bytes(1025), bytes(2000), "x" * 100_000, list(range(5000)), np.zeros(200_000)]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_too_large(message: object) -> None:
    """It is a ValueError, nothing is sent, and the queue goes on."""
    with queue_of(max_chunk_bytes=1024, max_chunks=2) as (writer, (reader,)):
        for number in range(5):
            with refuses(ValueError, match="1024") as caught:
                writer.enqueue(message)
            assert isinstance(caught.value, MessageTooLarge)
            with refuses(TimeoutError):
                reader.dequeue(timeout=0)
            writer.enqueue(number)
            assert reader.dequeue() == number


def test_every_size_is_sent_or_refused() -> None:
    """There is one limit: all below it arrive, all above it are refused, none is cut."""
    with queue_of(max_chunk_bytes=512) as (writer, (reader,)):
        refused = []
        for size in range(600):
            message = bytes([size % 255 + 1]) * size
            try:
                writer.enqueue(message)
            except MessageTooLarge:
                refused.append(size)
            else:
                assert reader.dequeue() == message
        assert refused == list(range(refused[0], 600))
        assert 300 < refused[0] <= 512
