"""A cable that is pulled, and one that loses packets, between two network stacks.

``MEMLANE_SOAK_CABLES`` is the number of rounds with stops, delays and losses (default 1; each sends
1,000 messages).
"""

import os
import random
import time

import pytest

from memlane import MessageQueue, ReaderDied, ReaderGivenUp, WriterDied
from tests.support import PATIENCE, Aside, Remote, assert_in_time, until
from tests.support.hosts import Neighbour, neighbour
from tests.support.queues import refuses, start_reader
from tests.support.remote_queues import remote_writer
from tests.support.traffic import numbered, read_numbered, write_numbered

ROUNDS = int(os.environ.get("MEMLANE_SOAK_CABLES", "1"))
LIVENESS = 1.5
pytestmark = [
    pytest.mark.hosts,
    pytest.mark.soak(seconds=60 + 20 * ROUNDS),
]


def reader_over(there: Neighbour, writer: MessageQueue) -> Remote:
    return start_reader(writer.export_handle(0), 0, "spawn", there.command)


def test_a_cable_that_is_pulled() -> None:
    """For less than the bound: nothing is lost. For good: both sides raise, each on its own."""
    with (
        neighbour() as there,
        remote_writer(connect_ip=there.here, remote_liveness=LIVENESS) as writer,
    ):
        reader = reader_over(there, writer)
        assert writer.statistics().readers[0].address is not None
        reader.begin(read_numbered)
        writer.enqueue(numbered(0))
        until(lambda: writer.statistics().readers[0].behind == 0)
        lost = there.cable.counts().lost
        there.pull()
        writer.enqueue(numbered(1))
        until(lambda: there.cable.counts().lost > lost)
        there.plug()
        until(lambda: writer.statistics().readers[0].behind == 0)
        there.pull()
        pulled = time.monotonic()
        with refuses(ReaderDied, match="has not answered"):
            for number in range(2, 100_000):
                writer.enqueue(numbered(number), PATIENCE)
        assert time.monotonic() - pulled >= LIVENESS * 0.7
        assert_in_time(LIVENESS + 3.0, pulled)
        read, error, moment = reader.outcome()
        assert read == 2
        assert isinstance(error, WriterDied), error
        assert_in_time(LIVENESS + 3.0, pulled, moment)
        there.plug()
        with refuses(WriterDied):
            reader.call("dequeue")
        reader.call("close")


def test_attaching_while_the_cable_is_pulled() -> None:
    """TCP repeats its first packet after one second and after three, which is beyond the bound."""
    with (
        neighbour() as there,
        remote_writer(connect_ip=there.here, remote_liveness=1.5) as writer,
    ):
        there.pull()
        mends = Aside(mend, there, 1.6)
        reader = reader_over(there, writer)
        mends.result()
        writer.enqueue(numbered(0))
        writer.close()
        assert reader.call(read_numbered)[0] == 1
        reader.call("close")


def mend(there: Neighbour, after: float) -> None:
    time.sleep(after)
    there.plug()


def test_a_reader_that_comes_back_too_late() -> None:
    """It made no call meanwhile, and its connection survived: it is told, and raises; what it says
    then does not hide that it had died.

    Fails without the guard: it waited for ever, and with its close the death was forgotten.
    """
    with (
        neighbour() as there,
        remote_writer(connect_ip=there.here, remote_liveness=LIVENESS) as writer,
    ):
        reader = reader_over(there, writer)
        there.pull()
        writer.enqueue("on its way")
        until(lambda: writer.statistics().readers[0].state == "dead")
        there.plug()
        came = []
        with refuses(ReaderGivenUp, match="is dead"):
            for _ in range(2):
                came.append(reader.call("dequeue", PATIENCE))
        assert came in ([], ["on its way"])  # its writer has ended the connection
        reader.call("close")
        reader.leave()
        with refuses(ReaderDied):
            for _ in range(20):
                time.sleep(0.05)  # a wait for what must not happen
                writer.enqueue("nobody there")


def test_stops_delays_and_losses() -> None:
    """Everything arrives once, in order, whatever happens on the way."""
    for number in range(ROUNDS):
        dice = random.Random(number)
        with (
            neighbour(seed=number) as there,
            remote_writer(connect_ip=there.here, remote_window=100) as writer,
        ):
            there.lose(1, dice.choice([0, 1, 5]), jitter_ms=0.5)
            reader = reader_over(there, writer)
            reader.begin(read_numbered)
            writes = Aside(write_numbered, writer, 1000)
            for _ in range(3):
                time.sleep(dice.uniform(0, 0.05))
                reader.peer.stop()
                time.sleep(dice.choice([0, 0.01, 0.3]))
                reader.peer.resume()
            writes.result()
            writer.close()
            read, error, _ = reader.outcome()
            assert (read, type(error).__name__) == (1000, "WriterClosed")
            assert there.cable.counts().lost > 0
            reader.call("close")
