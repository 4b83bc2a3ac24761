"""MessageQueue: what its constructor accepts and refuses."""

import math
from typing import Any

import pytest

from memlane import MessageQueue
from tests.support.queues import refuses, ring_in, segments

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _creates_nothing() -> Any:
    before = segments()
    yield
    assert segments() == before


@pytest.mark.parametrize(
    ("n_reader", "n_local"), [(-1, 0), (0, -1), (-1, -1), (1, 2), (0, 1), (2, 2**40), (2**64, -1)]
)
def test_counts_that_do_not_fit(n_reader: int, n_local: int) -> None:
    """Negative counts and more local readers than readers are refused."""
    with refuses(ValueError):
        MessageQueue(n_reader, n_local)


@pytest.mark.parametrize("bad", [1.0, 1.5, math.nan, "1", [1]])
def test_counts_that_are_no_integers(bad: Any) -> None:
    """Only integers count readers."""
    with refuses(TypeError, ValueError):
        MessageQueue(bad, 1)
    with refuses(TypeError, ValueError):
        MessageQueue(1, bad)


def test_all_readers_are_on_this_host_unless_told_otherwise() -> None:
    with MessageQueue(3) as queue:
        assert (queue.n_local_reader, queue.n_remote_reader) == (3, 0)
    with refuses(TypeError, ValueError):
        MessageQueue(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["max_chunk_bytes", "max_chunks"])
@pytest.mark.parametrize("bad", [0, -1, -(2**70), 1.0, "1", None, 2**62, 2**64, 2**100])
def test_absurd_sizes_are_refused(argument: str, bad: Any) -> None:
    """Sizes below one, absurd ones and non-integers are refused."""
    with refuses(ValueError, TypeError, MemoryError):
        MessageQueue(1, 1, **{argument: bad})


@pytest.mark.parametrize(
    "ranks", [[], [0], [0, 1, 2], [0, 0], [-1, 0], [0, 1.0], ["0", "1"], [None, 1], 2, "01"]
)
def test_invalid_local_reader_ranks_are_refused(ranks: Any) -> None:
    """Ranks are as many as local readers, different, integers, and not negative."""
    with refuses(ValueError, TypeError):
        MessageQueue(2, 2, local_reader_ranks=ranks)


def test_ranks_and_counts_must_match() -> None:
    """A list of the wrong length is a ValueError that states both numbers."""
    with refuses(ValueError, match=r"(?s)3.*2|2.*3"):
        MessageQueue(3, 3, local_reader_ranks=[0, 1])


def test_absurd_numbers_of_readers_are_refused() -> None:
    """More readers than there can be are refused before anything is reserved for them."""
    for local in (2**40, 1):
        with refuses(ValueError, MemoryError):
            MessageQueue(2**40, local)


def test_defaults_and_positions_are_those_of_vllms_class() -> None:
    """Positions and defaults are those that callers of vLLM's class rely on."""
    with MessageQueue(1, 1) as queue:
        assert ring_in(queue).max_chunk_bytes == 10 * 1024 * 1024
        assert ring_in(queue).max_chunks == 10
    with MessageQueue(2, 2, [5, 3], 512, 7, None) as queue:
        assert queue.handle.local_reader_ranks == [5, 3]
        assert ring_in(queue).handle()[:3] == (2, 512, 7)


@pytest.mark.parametrize("ranks", [range(2), (0, 1), [1, 0], [10, 2**31]])
def test_ranks_may_be_any_sequence(ranks: Any) -> None:
    """The ranks of the handle are a list of integers, whatever they were given as."""
    with MessageQueue(2, 2, ranks, 64, 2) as queue:
        assert queue.handle.local_reader_ranks == list(ranks)


def test_one_chunk_of_one_byte_is_a_queue() -> None:
    """One chunk of one byte is a queue, for those that fill chunks by hand."""
    with (
        MessageQueue(1, 1, None, 1, 1) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
    ):
        for value in range(5):
            with writer.acquire_write(0) as chunk:
                chunk[0] = value
            with reader.acquire_read(0) as chunk:
                assert bytes(chunk) == bytes([value])
