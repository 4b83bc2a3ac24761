"""A remote reader that is stopped for a while, in the middle of many messages (M4).

``MEMLANE_SOAK_REMOTE`` is the number of messages of 20 kB (default 2,000); from 20,000 on the
reader is stopped for 5 s, else for half a second.
"""

import os
import random
import time

import pytest

from tests.support import Aside
from tests.support.remote_queues import remote_writer, start_remote_reader
from tests.support.traffic import read_numbered, write_numbered

MESSAGES = int(os.environ.get("MEMLANE_SOAK_REMOTE", "2000"))
STOP = 5.0 if MESSAGES >= 20_000 else 0.5
pytestmark = pytest.mark.soak(seconds=60 + MESSAGES // 100)


def test_one_long_stop_loses_nothing() -> None:
    """With the default bound of 3 s: nothing is lost."""
    with remote_writer(remote_liveness=3.0) as writer:
        reader = start_remote_reader(writer)
        reader.begin(read_numbered)
        writes = Aside(write_numbered, writer, MESSAGES)
        time.sleep(0.05)
        reader.peer.stop()
        time.sleep(STOP)
        reader.peer.resume()
        writes.result(timeout=60 + MESSAGES / 100)
        writer.close()
        read, error, _ = reader.outcome()
        assert (read, type(error).__name__) == (MESSAGES, "WriterClosed")
        reader.call("close")


def test_many_stops_of_two_readers() -> None:
    """At random, for nothing, a moment, or longer than the bound."""
    dice = random.Random(MESSAGES)
    with remote_writer(2, remote_window=64, remote_liveness=0.5) as writer:
        readers = [start_remote_reader(writer, rank) for rank in range(2)]
        for reader in readers:
            reader.begin(read_numbered)
        writes = Aside(write_numbered, writer, MESSAGES)
        for _ in range(max(8, MESSAGES // 200)):
            late = dice.choice(readers)
            time.sleep(dice.uniform(0, 0.02))
            late.peer.stop()
            time.sleep(dice.choice([0, 0.001, 0.02, 0.7]))
            late.peer.resume()
        writes.result(timeout=60 + MESSAGES / 100)
        writer.close()
        for reader in readers:
            read, error, _ = reader.outcome()
            assert (read, type(error).__name__) == (MESSAGES, "WriterClosed")
            reader.call("close")
