"""SIGSTOP and SIGCONT of every role at random moments, many times over.

``MEMLANE_SOAK_STOPS`` is the number of stops (default 60). A stopped process is late, never dead:
everybody waits for it, nobody raises, and in the end every reader has every message.
"""

import itertools
import os
import random
import time

import pytest

from memlane import Closed, MessageQueue
from tests.support import PATIENCE, Link, start
from tests.support.traffic import leaving_nothing, message, reading

STOPS = int(os.environ.get("MEMLANE_SOAK_STOPS", "60"))
STOPS_OF_A_QUEUE = 20
pytestmark = pytest.mark.soak(seconds=60 + STOPS)


def writing(link: Link) -> int:
    """Role: writes until told to end; returns the number of messages."""
    with MessageQueue(2, 2, None, 256, 3) as queue:
        link.tell(queue.export_handle())
        queue.wait_until_ready(PATIENCE)
        for number in itertools.count():
            if number > 0 and link.has_word():
                return number
            queue.enqueue(message(number), PATIENCE)
    raise AssertionError


def test_ends_that_are_stopped_at_random_lose_nothing() -> None:
    """For nothing, for a moment, or for longer than the 100 ms after which a wait looks around."""
    for number in range(max(1, STOPS // STOPS_OF_A_QUEUE)):
        dice = random.Random(number)
        with leaving_nothing():
            writer = start(writing)
            handle = writer.hear()
            readers = [start(reading, handle, rank) for rank in range(2)]
            for reader in readers:
                reader.hear()
            for _ in range(STOPS_OF_A_QUEUE):
                time.sleep(dice.uniform(0, 0.01))  # at any moment
                late = dice.choice([writer, *readers])
                late.stop()
                time.sleep(dice.choice([0, 0.001, 0.02, 0.25]))  # the time is what is tested
                late.resume()
            writer.tell()
            sent = writer.result()
            for reader in readers:
                count, error, _ = reader.result()
                assert isinstance(error, Closed), error
                assert count == sent
