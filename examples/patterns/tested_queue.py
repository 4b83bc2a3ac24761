"""Tests of a queue, for pytest or as a program: a stopped reader is named, a killed one raises."""

import multiprocessing

import pytest

from memlane import Handle, MessageQueue, ReaderDied, TimedOut
from memlane.testing import kill, no_leaks, stalls, stopped


def reader(handle: Handle) -> None:
    with MessageQueue.create_from_handle(handle, 0) as queue:
        list(queue)


def send(writer: MessageQueue[int]) -> None:
    for step in range(3):
        writer.enqueue(step, timeout=1)


def test_a_stopped_reader_is_named_and_a_killed_one_raises() -> None:
    with no_leaks(), MessageQueue(n_reader=1, max_chunks=1) as writer:
        process = multiprocessing.Process(target=reader, args=(writer.export_handle(),))
        process.start()
        pid = process.pid or 0
        writer.wait_until_ready(timeout=10)
        names = pytest.raises(TimedOut, match="stopped")
        with stopped(pid), stalls(after=0.2) as lines, names:  # collects warnings
            send(writer)
        assert "stopped" in lines[0]
        kill(pid)  # returns once others see its death
        with pytest.raises(ReaderDied) as death:
            send(writer)
        assert (death.value.rank, death.value.pid) == (0, pid)
        process.join()


if __name__ == "__main__":
    test_a_stopped_reader_is_named_and_a_killed_one_raises()
    print("passed")
