"""M7: readers of an idle queue sleep, and wake up at once.

Fails without the guard: readers that spin or poll use a core each; readers that sleep in slices
without being woken get the message at the end of a slice.
"""

import statistics
import time

import pytest

from memlane import MessageQueue, WriterDied
from tests.support import PATIENCE, Aside, Remote, assert_in_time, is_sanitized, late_since
from tests.support.queues import BOUND, start_reader, start_writer

IDLE = 2.0
SHARE = 0.005


def share_of_a_core(readers: list[Remote]) -> float:
    """Processor time of all of them, as a share of the idle time."""
    begun, before = time.monotonic(), sum(reader.peer.cpu_seconds() for reader in readers)
    time.sleep(IDLE)  # nothing happens
    used = sum(reader.peer.cpu_seconds() for reader in readers) - before
    return used / (time.monotonic() - begun)


def delays_of(writer: MessageQueue, readers: list[Remote]) -> list[float]:
    """Seconds from each of eight messages to its readers, but for what the control was late."""
    delays = []
    for _ in range(8):
        for reader in readers:
            reader.begin("dequeue").until_blocked()
        sent = time.monotonic()
        writer.enqueue("again")
        for reader in readers:
            assert reader.outcome() == "again"
        delays += [reader.ended - sent - late_since(sent, reader.ended) for reader in readers]
    return delays


@pytest.mark.slow
def test_four_idle_readers_use_almost_no_cpu() -> None:
    """Four blocked readers use less than 0.5 % of one core together, then wake at once."""
    with MessageQueue(4, 4, None, 256, 4) as writer:
        readers = [start_reader(writer.export_handle(rank), rank) for rank in range(4)]
        writer.wait_until_ready(PATIENCE)
        for reader in readers:
            reader.begin("dequeue").until_blocked()
        # What else the machine does makes waking dearer, never cheaper: the best of three counts.
        assert any(share_of_a_core(readers) < SHARE for _ in range(3))
        writer.enqueue("awake")
        assert [reader.outcome() for reader in readers] == ["awake"] * 4
        # Readers that are not woken but look every 100 ms would need 50 ms on average.
        assert any(statistics.median(delays_of(writer, readers)) < 0.02 for _ in range(5))
        for reader in readers:
            reader.call("close")


@pytest.mark.slow
@pytest.mark.skipif(is_sanitized(), reason="ThreadSanitizer has a thread that wakes, too")
def test_the_longer_nothing_happens_the_rarer_a_reader_looks() -> None:
    """Ten times a second at first, soon less than twice a second."""
    with MessageQueue(1, 1, None, 256, 4) as writer:
        reader = start_reader(writer.export_handle())
        reader.begin("dequeue").until_blocked()
        time.sleep(1.5)  # the time is what is tested
        began, before = time.monotonic(), reader.peer.sleeps()
        time.sleep(4)
        looks = reader.peer.sleeps() - before
        assert looks < 2 * (time.monotonic() - began)
        writer.enqueue("awake")
        assert reader.outcome() == "awake"
        reader.call("close")


@pytest.mark.slow
def test_a_death_after_a_long_silence_is_reported_in_a_second() -> None:
    """It is reported within a second, however rarely the reader checks by then."""
    for silence in (1.6, 1.75, 2.0):
        writer = start_writer()
        reader = MessageQueue.create_from_handle(writer.greeting, 0)
        blocked = Aside(reader.dequeue)
        time.sleep(silence)  # the time is what is tested
        killed = time.monotonic()
        writer.peer.kill()
        with pytest.raises(WriterDied):
            blocked.result()
        assert_in_time(BOUND, killed, blocked.ended)
        reader.close()


def test_a_blocked_writer_sleeps() -> None:
    """The same holds for a writer that waits for a slow reader, over one second."""
    with MessageQueue(1, 1, None, 256, 1) as writer:
        reader = start_reader(writer.export_handle())
        writer.enqueue(0)
        before = time.thread_time()
        with pytest.raises(TimeoutError):
            writer.enqueue(1, timeout=1.0)
        assert time.thread_time() - before < 0.05
        reader.call("close")
