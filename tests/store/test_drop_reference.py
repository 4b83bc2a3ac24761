"""drop_reference: an aborted request takes back its reference."""

import pytest

from memlane import InvalidArgument, StoreFull, WrongRole
from tests.support.queues import refuses
from tests.support.stores import fill, store_of

pytestmark = pytest.mark.unit

ONE = bytes(52)


def test_an_aborted_request_blocks_nobody() -> None:
    """Without its last reference the object may be evicted, though no reader has read it."""
    with store_of(2, size=640, max_object_size=64) as (writer, (one, two)):
        places = fill(writer, ONE)
        for place in places[1:]:
            one.get(*place)
            two.get(*place)
        with refuses(StoreFull):
            writer.put("new", ONE)
        writer.drop_reference("0")
        writer.put("new", ONE)
        assert "0" not in writer.key_index


def test_one_reference_is_dropped_and_the_others_count() -> None:
    """The others are still outstanding for every reader."""
    with store_of(1, size=640, max_object_size=64) as (writer, (reader,)):
        place = writer.put("a", ONE)
        assert writer.get_cached("a") == place
        writer.drop_reference("a")
        assert writer.writer_flag[place[1]] == 1
        writer.free_unused()
        assert writer.is_cached("a")
        reader.get(*place)
        writer.free_unused()
        assert not writer.is_cached("a")


def test_what_a_reader_has_read_cannot_be_taken_back() -> None:
    """Nor a reference that was never given; nothing changes."""
    with store_of(2, size=640, max_object_size=64) as (writer, (one, two)):
        place = writer.put("a", ONE)
        one.get(*place)
        with refuses(InvalidArgument, match="has already read .*'a'"):
            writer.drop_reference("a")
        assert writer.writer_flag[place[1]] == 1
        writer.free_unused()
        two.get(*place)
        writer.free_unused()
        assert not writer.is_cached("a")
        writer.put("b", ONE)
        writer.drop_reference("b")
        with refuses(InvalidArgument, match="'b' has no reference"):
            writer.drop_reference("b")


def test_an_object_without_references_can_be_referenced_again() -> None:
    with store_of(1, size=640, max_object_size=64) as (writer, (reader,)):
        place = writer.put("a", ONE)
        writer.drop_reference("a")
        writer.get_cached("a")
        writer.free_unused()
        assert reader.get(*place) == ONE


def test_unknown_keys_and_readers_are_refused() -> None:
    with store_of() as (writer, (reader,)):
        with pytest.raises(KeyError):
            writer.drop_reference("nothing")
        with refuses(WrongRole):
            reader.drop_reference("nothing")
