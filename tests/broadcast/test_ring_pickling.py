"""ShmRingBuffer: handles and pickling, with and without the segment."""

import os
import pickle

import pytest

from memlane import SegmentMissing, SegmentRefused, ShmRingBuffer
from tests.support.queues import path_of, refuses, ring_of

pytestmark = pytest.mark.unit


def test_a_handle_has_the_counts_and_the_name() -> None:
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


def test_unpickling_without_the_segment_does_not_raise() -> None:
    """If the segment is missing the object is passed along; its first use raises."""
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
