"""ShmRingBuffer: what its constructor refuses."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from memlane import (
    LayoutMismatch,
    SegmentMissing,
    SharedOffloadRegion,
    ShmRingBuffer,
    SingleWriterShmRingBuffer,
)
from tests.support.queues import refuses, ring_of, segments

pytestmark = pytest.mark.unit

NAMES = ["n_reader", "max_chunk_bytes", "max_chunks"]
GOOD: dict[str, Any] = {"n_reader": 2, "max_chunk_bytes": 64, "max_chunks": 3}


@pytest.mark.parametrize("argument", NAMES)
@pytest.mark.parametrize("value", [0, -1, -(2**63), -(2**100)])
def test_counts_below_one_are_refused(argument: str, value: int) -> None:
    """Anything below 1 is a ValueError, and creates nothing."""
    before = segments()
    with refuses(ValueError):
        ShmRingBuffer(**{**GOOD, argument: value})
    assert segments() == before


@pytest.mark.parametrize("argument", NAMES)
@pytest.mark.parametrize("value", [1.5, 4.0, math.nan, "4", b"4", None, [4]])
def test_counts_that_are_no_integers(argument: str, value: Any) -> None:
    """Anything but an integer is refused, and creates nothing."""
    before = segments()
    with refuses(TypeError, ValueError):
        ShmRingBuffer(**{**GOOD, argument: value})
    assert segments() == before


@pytest.mark.parametrize("argument", NAMES)
@pytest.mark.parametrize("value", [2**40, 2**61, 2**62, 2**63 - 1, 2**63, 2**64, 2**64 + 1, 2**100])
def test_counts_that_are_absurd(argument: str, value: int) -> None:
    """Sizes that no machine has are refused without overflow, and create nothing."""
    before = segments()
    with refuses(ValueError, MemoryError):
        ShmRingBuffer(**{**GOOD, argument: value})
    assert segments() == before


def test_counts_whose_product_wraps_are_refused() -> None:
    """A total that is small only modulo 2**64 is refused."""
    with refuses(ValueError, MemoryError):
        ShmRingBuffer(1, 2**32, 2**32)
    with refuses(ValueError, MemoryError):
        ShmRingBuffer(2**32, 1, 2**32)


@pytest.mark.parametrize("name", ["memlane-nobody", "memlane-" + "0" * 32])
def test_attaching_to_a_missing_name_raises(name: str) -> None:
    """M9: attaching to a missing name raises at once and says why it may be missing."""
    with refuses(FileNotFoundError, match=name) as caught:
        ShmRingBuffer(2, 64, 3, name=name)
    assert isinstance(caught.value, SegmentMissing)
    assert caught.value.name == name


@pytest.mark.parametrize(
    "name", ["", "/", ".", "..", "a/b", "../../etc/passwd", "/etc/passwd", "nul\0nul", "x" * 300]
)
def test_attach_to_names_that_are_none(name: str) -> None:
    """A name that is a path, empty, over-long or contains NUL is refused as such."""
    with refuses(ValueError, FileNotFoundError, PermissionError):
        ShmRingBuffer(2, 64, 3, name=name)


@pytest.mark.parametrize("name", [7, b"memlane-nobody", ["memlane-nobody"]])
def test_attach_to_what_is_no_text(name: Any) -> None:
    """A name that is no text is refused as such."""
    with refuses(TypeError, ValueError):
        ShmRingBuffer(2, 64, 3, name=name)


@pytest.mark.parametrize("other", [(3, 64, 3), (2, 32, 3), (2, 64, 4), (2, 66, 3), (5, 61, 3)])
def test_attaching_with_another_geometry_is_refused(other: tuple[int, int, int]) -> None:
    """A layout mismatch is refused with both sides stated, even if the totals agree."""
    with ring_of(2, 64, 3) as ring:
        with refuses(ValueError) as caught:
            ShmRingBuffer(*other, name=ring.shared_memory.name)
        assert isinstance(caught.value, LayoutMismatch)
        differing = {
            n
            for mine, yours in zip((2, 64, 3), other, strict=True)
            if mine != yours
            for n in (mine, yours)
        }
        assert all(str(number) in str(caught.value) for number in differing)
        ShmRingBuffer(2, 64, 3, name=ring.shared_memory.name).close()


@pytest.mark.parametrize("argument", NAMES)
@pytest.mark.parametrize("value", [0, -1, 2.0, 2**70])
def test_attaching_with_bad_numbers_is_refused(argument: str, value: Any) -> None:
    """An attaching process gets the same checks as the creator."""
    with ring_of(2, 64, 3) as ring, refuses(ValueError, TypeError, MemoryError):
        ShmRingBuffer(**{**GOOD, argument: value}, name=ring.shared_memory.name)


def test_names_that_are_not_utf8() -> None:
    """They are no names of segments, rings or regions, and the error says that."""
    makers: list[Callable[[str], object]] = [
        lambda name: ShmRingBuffer(1, 1, 1, name),
        lambda name: SingleWriterShmRingBuffer(4096, name, True),
        lambda name: SharedOffloadRegion(name, 4096, 1, 0, 1, 4096),
    ]
    for make in makers:
        with refuses(ValueError, match="cannot be"):
            make("not utf-8: \udcff")
