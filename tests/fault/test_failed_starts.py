"""A start that fails half-way, for want of descriptors or for a signal, leaves nothing.

Fails without the guard: every early return of a constructor is a leak of what came before.
"""

import os
import resource
import signal

import pytest

from memlane import MessageQueue, ShmRingBuffer
from tests.harness import Link, holdings, start, surplus


def fill_gaps() -> int:
    """Take all free numbers below the highest descriptor; the first one that is free then."""
    highest = max(int(number) for number in os.listdir("/proc/self/fd"))
    while (taken := os.dup(0)) < highest:
        pass
    os.close(taken)
    return taken


def with_few_descriptors(_link: Link, kind: str) -> tuple[int, int]:
    """Try with room for 0, 1, 2 ... more descriptors; how often that failed and succeeded."""
    failed = succeeded = 0
    writer = MessageQueue(1, 1, None, 64, 2)
    ring = ShmRingBuffer(1, 64, 2)
    first = fill_gaps()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = holdings("memlane-")
    for spare in range(12):
        resource.setrlimit(resource.RLIMIT_NOFILE, (first + spare, hard))
        made: MessageQueue | ShmRingBuffer | None = None
        try:
            match kind:
                case "writer":
                    made = MessageQueue(1, 1, None, 64, 2)
                case "reader":
                    if succeeded:
                        break  # a rank can be taken once
                    made = MessageQueue.create_from_handle(writer.export_handle(), 0)
                case "ring":
                    made = ShmRingBuffer(1, 64, 2)
                case "attached ring":
                    made = ShmRingBuffer(*ring.handle())
        except OSError:
            failed += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if made is not None:
            succeeded += 1
            made.close()
        left = surplus(before, holdings("memlane-"))
        assert not left, left
    writer.close()
    ring.close()
    return failed, succeeded


@pytest.mark.parametrize("kind", ["writer", "reader", "ring", "attached ring"])
def test_without_descriptors(kind: str) -> None:
    """However few descriptors there are: an OSError and nothing left, or success."""
    failed, succeeded = start(with_few_descriptors, kind).result()
    assert failed > 0
    assert succeeded > 0


def test_a_reader_that_failed_can_try_again() -> None:
    """A failed attach does not take the rank."""

    def role(_link: Link) -> bool:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with MessageQueue(1, 1, None, 64, 2) as writer:
            handle = writer.export_handle()
            first = fill_gaps()
            for spare in range(10):
                resource.setrlimit(resource.RLIMIT_NOFILE, (first + spare, hard))
                try:
                    reader = MessageQueue.create_from_handle(handle, 0)
                except OSError:
                    continue
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                writer.enqueue(1)
                assert reader.dequeue(timeout=0) == 1
                reader.close()
                return True
        return False

    assert start(role).result() is True


def test_a_limit_of_file_size() -> None:
    """A limit of the size of files is an error of the constructor, not the end of the process."""

    def role(_link: Link) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = holdings("memlane-")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises((OSError, MemoryError)):
            ShmRingBuffer(1, 1 << 20, 2)
        with pytest.raises((OSError, MemoryError)):
            MessageQueue(1, 1)
        assert not surplus(before, holdings("memlane-"))

    start(role).result()
