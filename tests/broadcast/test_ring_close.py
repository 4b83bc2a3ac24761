"""ShmRingBuffer: close, the name, and who removes it."""

import gc
import weakref

import pytest

from memlane import Closed, ShmRingBuffer
from tests.support.queues import path_of, refuses, ring_of

pytestmark = pytest.mark.unit


def test_close_is_idempotent_and_final() -> None:
    """After any number of closes, use raises Closed."""
    ring = ShmRingBuffer(2, 64, 3)
    path = path_of(ring)
    for _ in range(3):
        ring.close()
        assert not path.exists()
    with refuses(Closed), ring.get_data(0):
        pass
    with refuses(Closed), ring.get_metadata(0):
        pass
    with refuses(Closed), ring:
        pass
    with refuses(Closed):
        _ = ring.shared_memory


def test_ring_is_a_context_manager() -> None:
    """Leaving the block closes, also by an exception."""
    with ShmRingBuffer(2, 64, 3) as ring:
        path = path_of(ring)
        assert path.exists()
    assert not path.exists()
    ring = ShmRingBuffer(2, 64, 3)
    path = path_of(ring)
    with pytest.raises(KeyError), ring:
        raise KeyError
    assert not path.exists()


def test_name_stays_until_the_creator_closes() -> None:
    """Attached rings come and go; the creator removes the name."""
    with ring_of(2, 64, 3) as ring:
        for _ in range(3):
            other = ShmRingBuffer(*ring.handle())
            other.close()
            other.close()
            assert path_of(ring).exists()


def test_an_attached_ring_outlives_the_creator() -> None:
    """The memory stays with attached rings when the name is gone."""
    ring = ShmRingBuffer(2, 64, 3)
    other = ShmRingBuffer(*ring.handle())
    with ring.get_data(0) as data:
        data[:2] = b"ok"
    ring.close()
    with other.get_data(0) as data:
        assert bytes(data[:2]) == b"ok"
    other.close()


def test_dropping_the_last_reference_frees_everything() -> None:
    """A ring without references is closed, and its name removed."""
    ring = ShmRingBuffer(2, 64, 3)
    path, gone = path_of(ring), weakref.ref(ring)
    del ring
    gc.collect()
    assert gone() is None
    assert not path.exists()


def test_names_of_others_are_never_removed() -> None:
    """A ring whose name was taken over by another file leaves that file alone."""
    ring = ShmRingBuffer(2, 64, 3)
    path = path_of(ring)
    path.unlink()
    path.write_bytes(b"another")
    try:
        ring.close()
        assert path.read_bytes() == b"another"
    finally:
        path.unlink(missing_ok=True)


def test_failed_creations_leave_nothing() -> None:
    """A refused creation leaves no descriptor and no mapping (checked after the test)."""
    for _ in range(50):
        with refuses(ValueError):
            ShmRingBuffer(1, 0, 1)
        with refuses(FileNotFoundError):
            ShmRingBuffer(1, 1, 1, name="memlane-nobody")
    with ring_of(2, 64, 3) as ring:
        for _ in range(50):
            with refuses(ValueError):
                ShmRingBuffer(3, 64, 3, name=ring.shared_memory.name)
