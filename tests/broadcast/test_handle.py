"""Handle: its documented fields, pickling, and that it keeps its secrets."""

import dataclasses
from typing import Any

import pytest

from memlane import Handle
from tests.support.queues import queue_of, ring_in

pytestmark = pytest.mark.unit

FIELDS: list[tuple[str, Any]] = [
    ("local_reader_ranks", []),
    ("buffer_handle", None),
    ("local_subscribe_addr", None),
    ("remote_subscribe_addr", None),
    ("remote_addr_ipv6", False),
]


def secrets_of(handle: Handle) -> list[tuple[str, Any]]:
    return [
        (field.name, getattr(handle, field.name))
        for field in dataclasses.fields(handle)
        if field.name.endswith(("_key", "_keys", "_secret", "_secrets"))
    ]


def test_documented_fields_come_first() -> None:
    """Names, order and defaults of the documented fields."""
    assert dataclasses.is_dataclass(Handle)
    assert [field.name for field in dataclasses.fields(Handle)][:5] == [name for name, _ in FIELDS]
    handle = Handle()
    for name, default in FIELDS:
        assert getattr(handle, name) == default
    assert Handle().local_reader_ranks is not Handle().local_reader_ranks


def test_documented_fields_can_be_given_by_position() -> None:
    """The documented fields can be given by position."""
    handle = Handle([3], (1, 2, 3, "memlane-x"), None, "tcp://[::1]:1", True)
    assert handle.local_reader_ranks == [3]
    assert handle.buffer_handle == (1, 2, 3, "memlane-x")
    assert handle.remote_subscribe_addr == "tcp://[::1]:1"
    assert handle.remote_addr_ipv6 is True


def test_a_handle_names_its_ring_and_local_readers() -> None:
    """A queue's handle names its ring and its local readers, and no address."""
    with queue_of(2) as (writer, _):
        for handle in (writer.handle, writer.export_handle(), writer.export_handle(1)):
            assert handle.local_reader_ranks == [0, 1]
            assert handle.buffer_handle == ring_in(writer).handle()
            assert isinstance(handle.buffer_handle, tuple)
            assert handle.remote_subscribe_addr is None
            assert handle.remote_addr_ipv6 is False


def test_changing_an_exported_handle_does_not_change_the_queue() -> None:
    """The exported handle is the caller's own."""
    with queue_of(2) as (writer, _):
        writer.export_handle().local_reader_ranks.append(9)
        assert writer.export_handle().local_reader_ranks == [0, 1]


def test_secrets_are_not_shown() -> None:
    """No repr shows the value of a field named key or secret."""
    with queue_of() as (writer, (reader,)):
        handle = writer.export_handle()
        shown = repr(handle) + repr(writer) + repr(reader) + repr(reader.handle)
        for name, value in secrets_of(handle):
            changes: dict[str, Any] = {name: "do-not-show-this"}
            marked = dataclasses.replace(handle, **changes)
            assert "do-not-show-this" not in repr(marked) + str(marked) + f"{marked!s}"
            for part in value.values() if isinstance(value, dict) else [value]:
                assert not part or str(part) not in shown


def test_repr_shows_the_rest() -> None:
    """The repr names the segment and the ranks."""
    with queue_of(2) as (writer, _):
        text = repr(writer.export_handle())
        assert ring_in(writer).shared_memory.name in text
        assert "Handle" in text
