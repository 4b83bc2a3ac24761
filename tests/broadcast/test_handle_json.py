"""Handle as JSON text: it round-trips, and other text is refused."""

import json
from typing import Any

import pytest

from memlane import Handle, MessageQueue
from tests.support import holdings, surplus
from tests.support.queues import queue_of, refuses, ring_in, segments

pytestmark = pytest.mark.unit


def test_round_trip() -> None:
    """A handle comes back equal, types included, from plain JSON text."""
    with queue_of(2) as (writer, _):
        handle = writer.export_handle()
        text = handle.to_json()
        assert isinstance(text, str)
        assert isinstance(json.loads(text), dict)
        again = Handle.from_json(text)
        assert again == handle
        assert type(again.buffer_handle) is tuple
        assert Handle.from_json(json.dumps(json.loads(text), indent=2)) == handle


def test_a_reader_attaches_by_json() -> None:
    """A reader attaches by a handle that was text."""
    with MessageQueue(1, 1, None, 4096, 2) as writer:
        handle = Handle.from_json(writer.export_handle(0).to_json())
        with MessageQueue.create_from_handle(handle, 0) as reader:
            writer.enqueue(1)
            assert reader.dequeue() == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "null",
        "1",
        '"text"',
        "[]",
        "{}",
        "{",
        "NaN",
        "Handle()",
        "\0",
        "\ud800",
        "[" * 200_000,
        '{"a":' * 200_000,
        "9" * 100_000,
        '{"local_reader_ranks": [0], "buffer_handle": null, "local_subscribe_addr": null,'
        ' "remote_subscribe_addr": null, "remote_addr_ipv6": false}',
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_text_that_is_no_handle(text: str) -> None:
    """Anything but a handle with its version is a ValueError."""
    with refuses(ValueError):
        Handle.from_json(text)


@pytest.mark.parametrize("text", [None, 7, {}, []])
def test_what_is_no_text(text: Any) -> None:
    """Anything but text is refused as such."""
    with refuses(TypeError, ValueError):
        Handle.from_json(text)


def documented() -> dict[str, Any]:
    with MessageQueue(2, 2, None, 64, 2) as writer:
        facts: dict[str, Any] = json.loads(writer.export_handle().to_json())
    return facts


def test_every_prefix_is_refused() -> None:
    """Truncated text is a ValueError, wherever it was cut."""
    text = json.dumps(documented())
    for end in range(len(text)):
        with refuses(ValueError):
            Handle.from_json(text[:end])


def test_the_format_version_counts() -> None:
    """Text without a format version, or with an unknown one, is refused."""
    facts = documented()
    versions = [name for name in facts if "version" in name]
    assert versions
    for name in versions:
        without = {key: value for key, value in facts.items() if key != name}
        with refuses(ValueError):
            Handle.from_json(json.dumps(without))
        versions_unknown: list[Any] = [-1, 999, 2**70, "x", None, [], 1.5]
        for value in versions_unknown:
            with refuses(ValueError):
                Handle.from_json(json.dumps({**facts, name: value}))


FORGED: dict[str, list[Any]] = {
    "local_reader_ranks": [None, "01", 7, {}, ["0"], [None], [[0]], [0.5], {"0": 1}],
    "buffer_handle": [
        7,
        "text",
        {},
        [],
        [2, 64, 2],
        [2, 64, 2, "memlane-x", 5],
        ["2", 64, 2, "memlane-x"],
        [2, 64.5, 2, "memlane-x"],
        [2, 64, None, "memlane-x"],
        [2, 64, 2, 7],
        [2, 64, 2, None],
    ],
    "remote_subscribe_addr": [7],
    "local_subscribe_addr": [["tcp://a:1"]],
    "remote_addr_ipv6": ["yes"],
}
FORGERIES = [(field, value) for field, values in FORGED.items() for value in values]


@pytest.mark.parametrize(("field", "value"), FORGERIES, ids=repr)
def test_fields_of_the_wrong_type_are_refused(field: str, value: Any) -> None:
    """A field with an impossible value is a ValueError."""
    with refuses(ValueError):
        Handle.from_json(json.dumps({**documented(), field: value}))


@pytest.mark.parametrize(
    "buffer",
    [
        [-1, 64, 2],
        [0, 64, 2],
        [2, -64, 2],
        [2, 0, 2],
        [2, 64, 0],
        [3, 64, 2],
        [2, 65, 2],
        [2, 64, 3],
        [2, 2**62, 2],
        [2, 64, 2**80],
    ],
    ids=repr,
)
def test_a_forged_geometry_is_refused(buffer: list[int]) -> None:
    """Numbers that do not fit the segment are refused at the latest when attaching."""
    with MessageQueue(2, 2, None, 64, 2) as writer:
        facts = json.loads(writer.export_handle().to_json())
        facts["buffer_handle"] = [*buffer, ring_in(writer).shared_memory.name]
        before = holdings("memlane-")
        with refuses(ValueError, MemoryError):
            MessageQueue.create_from_handle(Handle.from_json(json.dumps(facts)), 0)
        assert not surplus(before, holdings("memlane-"))
        # the place that was refused is still free
        MessageQueue.create_from_handle(writer.export_handle(), 0).close()


@pytest.mark.parametrize(
    "name", ["", "/", "..", "../shm/memlane-x", "/etc/passwd", "a/b", "nul\0", "x" * 300, "nobody"]
)
def test_forged_names_are_refused(name: str) -> None:
    """A forged name is refused at the latest when attaching, and creates nothing."""
    facts = documented()
    facts["buffer_handle"] = [2, 64, 2, name]
    before = segments()
    with refuses(ValueError, FileNotFoundError, PermissionError):
        MessageQueue.create_from_handle(Handle.from_json(json.dumps(facts)), 0)
    assert segments() == before


def test_a_handle_of_another_queue_does_not_fit() -> None:
    """The ring of one queue under the identity of another is refused."""
    with MessageQueue(2, 2, None, 64, 2) as one, MessageQueue(2, 2, None, 64, 2) as other:
        facts = json.loads(one.export_handle().to_json())
        facts["buffer_handle"] = list(ring_in(other).handle())
        with refuses(ValueError, PermissionError, FileNotFoundError):
            MessageQueue.create_from_handle(Handle.from_json(json.dumps(facts)), 0)
