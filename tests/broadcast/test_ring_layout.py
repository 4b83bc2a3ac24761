"""ShmRingBuffer: the documented numbers, and the bytes they describe."""

import os
import stat

import pytest

from memlane import ShmRingBuffer
from tests.support.queues import flags, path_of, refuses, ring_of

pytestmark = pytest.mark.unit

GEOMETRIES = [(1, 1, 1), (2, 64, 3), (8, 10, 7), (3, 4096, 2), (300, 5, 2)]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_attributes_have_their_documented_values(geometry: tuple[int, int, int]) -> None:
    """The attributes follow from the three counts."""
    n_reader, chunk_bytes, chunks = geometry
    with ring_of(*geometry) as ring:
        assert (ring.n_reader, ring.max_chunk_bytes, ring.max_chunks) == geometry
        assert ring.metadata_size == 1 + n_reader
        assert ring.total_bytes_of_buffer == (chunk_bytes + 1 + n_reader) * chunks
        assert ring.data_offset == 0
        assert ring.metadata_offset == chunk_bytes * chunks
        assert ring.is_creator
        assert ring.shared_memory.size >= ring.total_bytes_of_buffer
        assert len(ring.shared_memory.buf) == ring.shared_memory.size
        assert path_of(ring).stat().st_size >= ring.total_bytes_of_buffer


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_chunks_and_flags_lie_where_documented(geometry: tuple[int, int, int]) -> None:
    """get_data and get_metadata are the documented bytes of the file, and nothing else."""
    n_reader, chunk_bytes, chunks = geometry
    with ring_of(*geometry) as ring:
        for chunk in range(chunks):
            with ring.get_data(chunk) as data:
                assert (len(data), data.readonly, data.format) == (chunk_bytes, False, "B")
                data[:] = bytes([chunk + 1]) * chunk_bytes
            with ring.get_metadata(chunk) as metadata:
                assert (len(metadata), metadata.readonly) == (1 + n_reader, False)
                metadata[:] = bytes([101 + chunk]) * (1 + n_reader)
        expected = b"".join(bytes([chunk + 1]) * chunk_bytes for chunk in range(chunks))
        expected += b"".join(bytes([101 + chunk]) * (1 + n_reader) for chunk in range(chunks))
        assert path_of(ring).read_bytes()[: len(expected)] == expected
        assert bytes(ring.shared_memory.buf[: len(expected)]) == expected


def test_fresh_flags_are_zero() -> None:
    """All flags, and all data, are 0 at creation."""
    with ring_of(3, 16, 5) as ring:
        assert [flags(ring, chunk) for chunk in range(5)] == [[0, 0, 0, 0]] * 5
        assert not any(ring.shared_memory.buf[: ring.total_bytes_of_buffer])


@pytest.mark.parametrize("index", [-1, 3, 2**31, 2**63, 2**64, -(2**63)])
def test_chunks_that_do_not_exist(index: int) -> None:
    """An index outside the ring is refused and touches nothing."""
    with ring_of(2, 64, 3) as ring:
        with refuses(ValueError, IndexError), ring.get_data(index):
            pass
        with refuses(ValueError, IndexError), ring.get_metadata(index):
            pass


def test_segment_is_private_and_named_at_random() -> None:
    """The file is regular, of mode 0600, ours, and its name has 128 random bits."""
    with ring_of() as one, ring_of() as other:
        facts = path_of(one).lstat()
        assert stat.S_ISREG(facts.st_mode)
        assert stat.S_IMODE(facts.st_mode) == 0o600
        assert facts.st_uid == os.geteuid()
        assert path_of(one) != path_of(other)
        name = one.shared_memory.name
        assert name.startswith("memlane-")
        assert len(name.removeprefix("memlane-")) >= 22


def test_mode_does_not_depend_on_the_umask() -> None:
    """Neither a permissive nor a restrictive umask changes the segment's mode."""
    for umask in (0o000, 0o377):
        previous = os.umask(umask)
        try:
            with ring_of() as ring:
                assert stat.S_IMODE(path_of(ring).stat().st_mode) == 0o600
        finally:
            os.umask(previous)


def test_space_is_reserved_at_creation() -> None:
    """A ring used alone has all its pages before its first use."""
    with ring_of(1, 1 << 20, 4) as ring:
        assert path_of(ring).stat().st_blocks * 512 >= ring.total_bytes_of_buffer


def test_attached_ring_shares_the_bytes() -> None:
    """Each sees the other's writes; only one of them is the creator."""
    with ring_of(2, 64, 3) as ring:
        other = ShmRingBuffer(2, 64, 3, name=ring.shared_memory.name)
        assert not other.is_creator
        assert other.shared_memory.name == ring.shared_memory.name
        with ring.get_data(1) as mine:
            mine[:5] = b"hello"
        with other.get_data(1) as yours:
            assert bytes(yours[:5]) == b"hello"
            yours[0:1] = b"j"
        with ring.get_data(1) as mine:
            assert bytes(mine[:5]) == b"jello"
        other.close()


def test_repr_says_what_it_is() -> None:
    """The repr has the class, the name and the three counts, also after close."""
    ring = ShmRingBuffer(2, 77, 3)
    name = ring.shared_memory.name
    text = repr(ring)
    assert "ShmRingBuffer" in text
    assert name in text
    assert "77" in text
    ring.close()
    assert "ShmRingBuffer" in repr(ring)
