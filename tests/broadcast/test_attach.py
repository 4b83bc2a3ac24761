"""create_from_handle: who may attach, and with which rank."""

import copy
import mmap
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from memlane import Handle, MessageQueue, RankTaken, SegmentMissing
from memlane._native import RingGeometry, RingSegment
from tests.support.queues import name_in, queue_of, refuses, ring_in

pytestmark = pytest.mark.unit

PAGE = mmap.PAGESIZE
SPACE_EACH = 112
"""The header's field for it: native/core/layout.hpp."""


@pytest.mark.parametrize("rank", [-1, -(2**70)])
def test_negative_ranks_are_refused(rank: int) -> None:
    """A negative rank is a ValueError."""
    with MessageQueue(1, 1, None, 64, 2) as writer, refuses(ValueError):
        MessageQueue.create_from_handle(writer.export_handle(), rank)


@pytest.mark.parametrize("rank", [0.0, "0", [0], b"0"])
def test_ranks_that_are_no_integers(rank: Any) -> None:
    """A rank that is no integer is a TypeError."""
    with MessageQueue(1, 1, None, 64, 2) as writer, refuses(TypeError):
        MessageQueue.create_from_handle(writer.export_handle(), rank)


def test_subclasses_attach_as_themselves() -> None:
    """create_from_handle of a subclass makes an instance of it."""

    class Named(MessageQueue):
        """A queue of a subclass with attributes of its own."""

    with Named(1, 1) as writer, Named.create_from_handle(writer.export_handle(), 0) as reader:
        assert type(reader) is Named


@pytest.mark.parametrize("handle", [None, "memlane-x", (1, 64, 2, "memlane-x"), {}])
def test_what_is_no_handle(handle: Any) -> None:
    """Anything but a Handle is refused as such."""
    with refuses(TypeError, ValueError):
        MessageQueue.create_from_handle(handle, 0)


def test_text_in_place_of_a_handle_is_refused() -> None:
    """The error says what makes a handle of it."""
    with queue_of(ready=False) as (writer, _), refuses(TypeError, match=r"Handle\.from_json\(\)"):
        MessageQueue.create_from_handle(writer.export_handle().to_json(), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy])
def test_a_queue_travels_by_its_handle(send: Callable[[object], object]) -> None:
    """Neither end can be pickled or copied, and the error says what to send instead."""
    with queue_of() as (writer, (reader,)):
        for end in (writer, reader):
            with refuses(TypeError, match=r"send export_handle\(rank\)"):
                send(end)


def test_an_empty_handle_is_refused() -> None:
    """A handle that leads nowhere is an error, not a reader that waits for ever."""
    with pytest.raises((ValueError, NotImplementedError)):
        MessageQueue.create_from_handle(Handle(), 0)


RING: Any = (1, 64, 2, "memlane-nobody")
HAND_MADE: list[tuple[Any, ...]] = [
    (None,),
    (7,),
    ("0",),
    ([0], None),
    ([0], 5),
    ([0], ()),
    ([0], (1, 64)),
    ([0], (1, 64, 2, None)),
    ([0], (1.0, 64, 2, "memlane-nobody")),
    ([0.0], RING),
    ([None], RING),
    ([0, 1], RING),
    ([0], RING, None, 7),
    ([0], (1, 64, 2, "../etc/passwd")),
    ([0], RING),
]


@pytest.mark.parametrize("fields", HAND_MADE, ids=repr)
def test_handles_made_by_hand(fields: tuple[Any, ...]) -> None:
    """Whatever was put into the documented fields, attaching fails with an error of memlane."""
    with refuses(TypeError, ValueError, FileNotFoundError):
        MessageQueue.create_from_handle(Handle(*fields), 0)


def test_a_rank_that_is_attached_already() -> None:
    """M15: the second reader of a rank is refused, the first continues."""
    with queue_of(2, ready=False) as (writer, readers):
        for rank in range(2):
            who = rf"reader {rank} cannot attach: .* held by pid {os.getpid()}\b"
            with refuses(ValueError, match=who) as caught:
                MessageQueue.create_from_handle(writer.export_handle(), rank)
            assert isinstance(caught.value, RankTaken)
        writer.enqueue("first")
        assert [reader.dequeue() for reader in readers] == ["first", "first"]


def test_a_reader_too_many_learns_that_all_have_attached() -> None:
    """M15: once the name is gone a late reader is told that all may have attached."""
    with queue_of(1) as (writer, _):
        with refuses(FileNotFoundError, match="(?i)attached") as caught:
            MessageQueue.create_from_handle(writer.export_handle(), 0)
        assert isinstance(caught.value, SegmentMissing)
        assert caught.value.name == ring_in(writer).shared_memory.name


def test_a_rank_that_is_not_local() -> None:
    """A rank that is not local has nothing to connect to: an error."""
    with MessageQueue(1, 1, [4], 64, 2) as writer:
        with pytest.raises((ValueError, NotImplementedError)):
            MessageQueue.create_from_handle(writer.export_handle(), 0)
        MessageQueue.create_from_handle(writer.export_handle(), 4).close()


def test_a_reader_that_comes_late_gets_everything() -> None:
    """The writer waits for an absent reader, which gets every message from the first."""
    with MessageQueue(2, 2, None, 4096, 3) as writer:
        early = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        for number in range(3):
            writer.enqueue(number)
            assert early.dequeue() == number
        with refuses(TimeoutError):
            writer.enqueue(3, timeout=0)
        late = MessageQueue.create_from_handle(writer.export_handle(1), 1)
        assert [late.dequeue() for _ in range(3)] == [0, 1, 2]
        writer.enqueue(3, timeout=0)
        assert (early.dequeue(), late.dequeue()) == (3, 3)
        early.close()
        late.close()


def test_a_reader_that_closed_does_not_come_back() -> None:
    """The place of a closed reader is not given to another."""
    with queue_of(2, ready=False) as (writer, readers):
        readers[1].close()
        with refuses(ValueError, FileNotFoundError):
            MessageQueue.create_from_handle(writer.export_handle(), 1)


def test_attaching_after_the_writer_closed_raises() -> None:
    """M9: the queue is gone, and attaching says so."""
    with MessageQueue(1, 1, None, 64, 2) as writer:
        handle = writer.export_handle()
    with refuses(FileNotFoundError, match=name_in(handle)):
        MessageQueue.create_from_handle(handle, 0)


def test_handles_are_exported_only_for_readers_that_exist() -> None:
    """Handles are exported only for readers that exist."""
    with MessageQueue(1, 1, None, 64, 2) as writer:
        ranks: list[Any] = [-1, "0", 0.5]
        for rank in ranks:
            with refuses(ValueError, TypeError):
                writer.export_handle(rank)


@pytest.mark.parametrize("reserved", [1, PAGE, 3 * PAGE, 1 << 20])
def test_what_a_chunk_has_from_the_beginning_says_the_header(reserved: int) -> None:
    """A reader takes the reserved size from the header, but does not trust more than there is."""
    geometry, queue_id = RingGeometry(1, 8 * PAGE, 4), os.urandom(16)
    name = f"memlane-{queue_id.hex()}"
    each = min(reserved, 8 * PAGE)
    made = RingSegment.create(geometry, queue_id, name, reserved)
    try:
        assert RingSegment.attach(geometry, name).reserved_bytes == each
        if each < 8 * PAGE:
            with open(f"/dev/shm/{name}", "r+b") as file:
                file.seek(-(-geometry.total_bytes // 4096) * 4096 + SPACE_EACH)
                file.write((8 * PAGE).to_bytes(8, "little"))
            assert RingSegment.attach(geometry, name).reserved_bytes == 0
    finally:
        made.close()
