"""A ring, pickled and used in another process."""

import pickle

from memlane import ShmRingBuffer
from tests.support import Link, start
from tests.support.queues import ring_of


def scribble(_link: Link, ring: ShmRingBuffer) -> tuple[bytes, bool]:
    with ring.get_data(0) as data:
        before = bytes(data[:4])
        data[:4] = b"pong"
    return before, ring.is_creator


def handle_of(_link: Link, pickled: bytes) -> tuple[object, bytes]:
    ring = pickle.loads(pickled)
    return ring.handle(), pickle.dumps(ring)


def test_a_pickled_ring_works_in_another_process(method: str) -> None:
    """A ring that is passed to a process shares its memory there."""
    with ring_of() as ring:
        with ring.get_data(0) as data:
            data[:4] = b"ping"
        copy = pickle.loads(pickle.dumps(ring))
        before, creator = start(scribble, copy, method=method).result()
        copy.close()
        assert (before, creator) == (b"ping", False)
        with ring.get_data(0) as data:
            assert bytes(data[:4]) == b"pong"


def test_a_ring_is_passed_along_through_a_process(method: str) -> None:
    """Another process can unpickle, ask for the handle and pickle again, for a third to use."""
    with ring_of(2, 64, 3) as ring:
        gone = ShmRingBuffer(2, 64, 3)
        pickled, handle = pickle.dumps(gone), gone.handle()
        gone.close()
        assert start(handle_of, pickled, method=method).result() == (handle, pickled)
        there, onward = start(handle_of, pickle.dumps(ring), method=method).result()
        assert there == ring.handle()
        third = pickle.loads(onward)
        with third.get_data(0) as data:
            assert len(data) == 64
        third.close()
