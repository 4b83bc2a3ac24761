"""MsgpackSerde: supported types come back exactly, in the storage's own layout."""

import datetime
import io
import struct
import threading
import zoneinfo
from typing import Any

import numpy as np
import pytest

from memlane import CorruptMessage, InvalidArgument, InvalidType
from memlane.store.serde import MsgpackSerde, ObjectSerde
from tests.support.serdes import MSGPACK, PREAMBLE, both_ways, exact, in_chunk, laid

pytestmark = [pytest.mark.wheel, pytest.mark.unit]

UTC = datetime.timezone.utc  # noqa: UP017
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
VALUES: list[Any] = [
    *[None, True, False, 0, -1, 1.5, -0.0, float("nan"), float("-inf"), 1j, complex(-0.0, 2)],
    *[2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**5000, [1, 2**64, "x"]],
    *["", "text", "t" * 100_000, "\ud800", {"\udcff": "\ud800"}, "\N{SNOWMAN}"],
    *[b"", b"bytes", b"b" * 1023, b"b" * 1024, b"b" * 100_000],
    *[bytearray(), bytearray(b"array"), bytearray(100_000)],
    *[[], [1, "a", None], [[]], (), (1,), (1, (2, [3, ()])), [b"in", (b"side",)]],
    *[set(), {1, "a"}, {(1, b"x")}, frozenset(), frozenset({frozenset({1}), 2}), [{b"y"}]],
    *[{}, {"a": 1}, {"a": {"b": [1, (2,)]}}, {1: 2}, {None: 1, (1, 2): {True: "x"}, b"k": b"v"}],
    *[{1.5: [1], frozenset({1}): (), "text": 0, 2**70: -(2**70)}],
    datetime.datetime(2024, 2, 29, 23, 59, 59, 999_999),
    datetime.datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=1),
    datetime.datetime(1, 1, 1, tzinfo=UTC),
    datetime.datetime(2, 2, 2, tzinfo=datetime.timezone(datetime.timedelta(seconds=3601), "odd")),
    *[datetime.date.max, datetime.time(1, 2, 3, 4, UTC, fold=1), datetime.timedelta(-1, 2, 3)],
    *[UTC, BERLIN],
    *[np.bool_(True), np.int8(-1), np.uint64(2**64 - 1), np.longlong(1), np.ulonglong(2)],
    *[np.float16(0.1), np.float64("nan"), np.longdouble(1) / 3, np.complex64(1j)],
    *[np.datetime64("2024-01-01T00:00", "m"), np.datetime64("NaT"), np.timedelta64(25, "D")],
    *[np.str_("text"), np.str_(""), np.str_("\ud800"), np.bytes_(b"bytes"), np.bytes_(b"")],
    *[np.void(b"raw"), np.zeros(1, [("a", "i4"), ("b", ">f8", (2,))])[0]],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:40])
def test_types_come_back_exactly(value: object) -> None:
    """By copy, and by view (bytes as memoryviews), alone and inside others."""
    for sent in (value, [value, value], {"k": (value,)}, {3: [value]}):
        by_copy, by_view = both_ways(sent)
        assert exact(by_copy) == exact(sent)
        assert exact(by_view) == exact(sent)


def test_bytes_are_read_only_memory_by_view() -> None:
    """They are read-only memoryviews whatever their size, but not as keys and members of sets."""
    key = (b"k", frozenset({b"member"}))
    value = {"few": b"few", "many": b"m" * 5000, "keyed": {key: b"v"}, "set": {b"s" * 5000}}
    got = MSGPACK.deserialize_view(laid(MSGPACK, value))
    for part in (got["few"], got["many"], got["keyed"][key]):
        assert type(part) is memoryview
        assert part.readonly
    assert got["set"] == value["set"]
    assert [type(one) for one in got["set"]] == [bytes]


def test_everything_is_aligned() -> None:
    """Every array starts at a multiple of 64 in memory, and is written without a copy."""
    value = [np.zeros(n, np.uint8) for n in (1, 63, 64, 65, 1000, 4096, 70_000)] + [b"b" * 2000]
    for text in ("", "a", "ab" * 40):
        data, _, metadata, _ = MSGPACK.serialize([text, *value])
        assert (PREAMBLE + len(metadata)) % 64 == 0
        at = 0
        for part in data:
            assert isinstance(part, bytes) or at % 64 == 0
            at += memoryview(part).nbytes
        got = MSGPACK.deserialize_view(laid(MSGPACK, [text, *value]))
        for array in map(np.asarray, got[1:]):
            assert array.ctypes.data % 64 == 0


def test_arrays_are_referred_to() -> None:
    """The pieces handed to the ring are the array's own memory."""
    array, big = np.zeros(1000), b"b" * 5000
    data, _, _, _ = MSGPACK.serialize({"array": array, "bytes": big})
    assert isinstance(data, list)
    array[:] = 7
    assert bytes(data[0]) == array.tobytes()
    assert any(part is big for part in data)


def test_what_follows_is_ignored() -> None:
    """A chunk is rounded up, and its content need not be aligned or read-only."""
    value = {"array": np.arange(5000), "text": "x", "bytes": b"b" * 2000}
    longer = laid(MSGPACK, value, behind=100)
    shifted = memoryview(bytearray(b"x" + longer))[1:]
    for lying in (longer, shifted, np.frombuffer(longer, np.uint8).data):
        assert exact(MSGPACK.deserialize(lying)) == exact(value)
        viewed = MSGPACK.deserialize_view(lying)
        assert exact(viewed) == exact(value)
        assert not viewed["array"].flags.writeable
        assert viewed["bytes"].readonly


class Own:
    """Not registered."""


class Text(str):
    """A subclass is another type."""

    __slots__ = ()


class Number(np.float64):
    """A subclass of a scalar."""


def endless() -> list[Any]:
    inside: list[Any] = []
    inside.append(inside)
    return inside


@pytest.mark.parametrize(
    "value",
    [Own(), Own, Text("t"), Number(1), lambda: 0, [1, {2: (Own(),)}], range(3), memoryview(b"m")],
    ids=lambda value: type(value).__name__,
)
def test_what_it_has_no_type_for(value: object) -> None:
    """A TypeError that names the type and what to do."""
    with pytest.raises(InvalidType, match=r"Unsupported object type .*: (register|only numpy's)"):
        MSGPACK.serialize(value)


def test_time_zones_without_a_name_are_refused() -> None:
    """A zone read from a file cannot be found again by the reader."""
    counts = struct.pack(">6l", 0, 0, 0, 0, 1, 4)
    file = io.BytesIO(b"TZif" + bytes(16) + counts + bytes(6) + b"UTC\0")
    zone = zoneinfo.ZoneInfo.from_file(file)
    with pytest.raises(InvalidType, match="without a key"):
        MSGPACK.serialize(datetime.datetime(2024, 1, 1, tzinfo=zone))


def test_containers_that_contain_themselves_are_refused() -> None:
    """An error, and the serde still works."""
    with pytest.raises(InvalidArgument, match="contains itself"):
        MSGPACK.serialize(endless())
    assert both_ways(1) == (1, 1)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "0 bytes are too few for an object"),
        (b"mls\3" + bytes(7), "11 bytes are too few for an object"),
        (b"mlr\2" + b"\1" + bytes(64), "not written by MsgpackSerde"),
        (b"mls\1" + b"\1" + bytes(64), "format version 1, this memlane reads version 3"),
        (b"mls\3" + b"\xff" * 8 + bytes(64), "its tree has 18446744073709551615 bytes"),
        (b"mls\3" + bytes(64), "cannot be decoded"),
    ],
    ids=["nothing", "short", "magic", "version", "length", "empty"],
)
def test_what_is_no_object(content: bytes, why: str) -> None:
    """Detected by its first bytes."""
    with pytest.raises(CorruptMessage, match=why):
        MSGPACK.deserialize(in_chunk(content))


def test_one_serde_serves_several_threads() -> None:
    """One serde deserializes for all threads of a reader."""
    values = [{"n": n, "array": np.full(50_000, n), "deep": [(n,)] * 50} for n in range(4)]
    wrong: list[int] = []

    def read(value: dict[str, Any], lying: memoryview) -> None:
        for _ in range(50):
            if exact(MSGPACK.deserialize(lying)) != exact(value):
                wrong.append(value["n"])

    threads = [threading.Thread(target=read, args=(v, laid(MSGPACK, v))) for v in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Wrapped(MsgpackSerde):
    """Adds something to what is sent."""

    def serialize(self, value: object) -> Any:
        return super().serialize({"version": 1, "value": value})


class Unwrapped(Wrapped):
    """And removes it again."""

    def deserialize(self, data: memoryview) -> Any:
        return super().deserialize(data)["value"]


class Plain(ObjectSerde):
    """A format of its own: one bytes object, no metadata."""

    def serialize(self, value: bytes) -> tuple[bytes, int, bytes, int]:
        return value, len(value), b"", 0

    def deserialize(self, data: memoryview) -> bytes:
        return bytes(data)


class Upper:
    """A mixin that is not a serde by itself."""

    def deserialize(self, data: memoryview) -> str:
        return bytes(data).decode().upper()


class Mixed(Upper, Plain):
    """Decodes in the same way for get and view."""


def test_views_use_what_a_subclass_overrides() -> None:
    """Views, too, use an overridden serialize or deserialize."""
    assert both_ways("x", Wrapped())[0] == {"version": 1, "value": "x"}
    assert both_ways("x", Wrapped())[1] == {"version": 1, "value": "x"}
    assert both_ways((1,), Unwrapped()) == ((1,), (1,))
    assert both_ways(b"raw", Plain()) == (b"raw", b"raw")
    assert both_ways(b"raw", Mixed()) == ("RAW", "RAW")
    with pytest.raises(TypeError):
        ObjectSerde()  # type: ignore[abstract]
