"""ShmRingBuffer: handles and pickling, with and without the segment."""

import os
import pickle

import pytest

from memlane import SegmentMissing, SegmentRefused, ShmRingBuffer
from tests.harness import Link, start
from tests.queues import path_of, refuses, ring_of


def scribble(_link: Link, ring: ShmRingBuffer) -> tuple[bytes, bool]:
    with ring.get_data(0) as data:
        before = bytes(data[:4])
        data[:4] = b"pong"
    return before, ring.is_creator


def handle_of(_link: Link, pickled: bytes) -> tuple[object, bytes]:
    ring = pickle.loads(pickled)
    return ring.handle(), pickle.dumps(ring)


def test_handle() -> None:
    """The handle is the three counts and the name, and it attaches."""
    with ring_of(2, 64, 3) as ring:
        assert ring.handle() == (2, 64, 3, ring.shared_memory.name)
        other = ShmRingBuffer(*ring.handle())
        assert other.handle() == ring.handle()
        other.close()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_unpickling_attaches(protocol: int) -> None:
    """Every protocol carries the handle and not the data; the copy sees the same bytes."""
    with ring_of(2, 1 << 20, 3) as ring:
        with ring.get_data(2) as data:
            data[:4] = b"here"
        pickled = pickle.dumps(ring, protocol)
        assert len(pickled) < 1000
        other = pickle.loads(pickled)
        assert not other.is_creator
        with other.get_data(2) as data:
            assert bytes(data[:4]) == b"here"
        other.close()
        assert path_of(ring).exists()


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


def test_unpickling_without_the_segment_does_not_raise() -> None:
    """Where the segment is missing the object is passed along; its first use raises."""
    with ring_of(2, 64, 3) as ring:
        handle, pickled, name = ring.handle(), pickle.dumps(ring), ring.shared_memory.name
    far = pickle.loads(pickled)
    assert far.handle() == handle
    assert name in repr(far)
    again = pickle.loads(pickle.dumps(far))
    assert again.handle() == handle
    for use in (far.get_data, far.get_metadata, again.get_data):
        with refuses(FileNotFoundError, match=name) as caught, use(0):
            pass
        assert isinstance(caught.value, SegmentMissing)
        assert caught.value.name == name
    far.close()
    far.close()


def test_passing_along_through_a_process(method: str) -> None:
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


def test_unpickling_a_refused_segment_does_not_raise() -> None:
    """A segment that must be refused is refused at the first use, not while unpickling."""
    with ring_of() as ring:
        pickled = pickle.dumps(ring)
        os.chmod(path_of(ring), 0o666)
        far = pickle.loads(pickled)
        assert far.handle() == ring.handle()
        with refuses(PermissionError) as caught, far.get_data(0):
            pass
        assert isinstance(caught.value, SegmentRefused)
        far.close()


def test_attaching_explicitly_raises_at_once() -> None:
    """M9: constructing with the name of a segment that is gone is an error there and then."""
    with ring_of(2, 64, 3) as ring:
        handle = ring.handle()
    with refuses(FileNotFoundError, match=handle[3]):
        ShmRingBuffer(*handle)
