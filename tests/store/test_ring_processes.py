"""The store's ring between processes."""

import os

from tests.support import Link, start
from tests.support.queues import refuses, segments
from tests.support.stores import Ring, ring_of_bytes


def first_bytes(_link: Link, handle: tuple[int, str], address: int) -> bytes:
    ring = Ring(*handle)
    with ring.access_buf(address) as (data, _):
        found = bytes(data[:5])
    ring.close()
    return found


def test_another_process_reads_what_the_writer_wrote(method: str) -> None:
    """Another process reads the bytes that the writer wrote."""
    with ring_of_bytes(100) as ring:
        address, _ = ring.allocate_buf(20)
        with ring.access_buf(address) as (data, _):
            data[:5] = b"there"
        assert start(first_bytes, ring.handle(), address, method=method).result() == b"there"


def die_with_a_ring(link: Link, name: str) -> None:
    ring = Ring(300, name, create=True)
    link.tell()
    link.hear()
    del ring


def test_a_name_that_the_dead_left() -> None:
    """A restart after a crash gets the name, even with another size."""
    name = f"memlane-test-{os.getpid()}"
    peer = start(die_with_a_ring, name)
    peer.hear()
    with refuses(FileExistsError):
        Ring(100, name, create=True)
    peer.kill()
    assert name in segments()
    ring = Ring(100, name, create=True)
    assert ring.allocate_buf(92) == (0, 0)
    ring.close()
