"""Registered types, pickle by choice, and no code that a sender could execute."""

import dataclasses
import datetime
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from memlane import CorruptMessage, InvalidArgument, InvalidType, MemlaneError
from memlane.store import _registered
from memlane.store.serde import MsgpackSerde, PickleMsgpackSerde
from tests.support.serdes import MSGPACK, PICKLE, both_ways, exact, laid

pytestmark = pytest.mark.unit


@dataclasses.dataclass
class Image:
    pixels: Any
    size: tuple[int, int]
    tags: dict[str, Any] = dataclasses.field(default_factory=dict)
    made: datetime.datetime | None = dataclasses.field(default=None, init=False)
    COUNT: ClassVar[int] = 0


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Key:
    name: str
    content: bytes = b""

    def __post_init__(self) -> None:
        if self.name == "never":
            raise AssertionError("made by __init__")


class Request(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag="request"):
    request_id: str
    image: Image | None = None
    keys: tuple[Key, ...] = ()


class Checked(msgspec.Struct):
    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("it is negative")


@pytest.fixture(autouse=True)
def _registered_types() -> Iterator[None]:
    """Registers these four for every test; a test's own registrations end with it."""
    tables = (_registered._by_name, _registered._by_type)
    before: list[dict[Any, Any]] = [dict(table) for table in tables]  # type: ignore[call-overload]
    for cls in (Image, Key, Request, Checked):
        MsgpackSerde.register_type(cls)
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()  # type: ignore[attr-defined]
        table.update(content)  # type: ignore[attr-defined]


def image() -> Image:
    made = Image(np.arange(12).reshape(3, 4), (3, 4), {"k": [1, (2,)], "b": b"b" * 2000})
    made.made = datetime.datetime(2024, 1, 1)
    return made


def test_registered_types_come_back() -> None:
    """Dataclasses and Structs: frozen, slots, fields unknown to __init__, nested."""
    request = Request(request_id="r", image=image(), keys=(Key("a"), Key("b", b"c")))
    for value in (
        image(),
        Key("k"),
        request,
        [request, {"in": (image(),)}],
        {Key("k"): {Key("m")}},
    ):
        for serde in (MSGPACK, PICKLE):
            by_copy, by_view = both_ways(value, serde)
            assert exact(by_copy) == exact(by_view) == exact(value)
    pixels = MSGPACK.deserialize_view(laid(MSGPACK, image())).pixels
    assert not pixels.flags.writeable


def test_dataclasses_are_made_past_init() -> None:
    """Like pickle: changes made after __init__ arrive."""
    key = Key("k")
    object.__setattr__(key, "name", "never")
    assert both_ways(key)[0].name == "never"


def test_a_constructor_that_refuses() -> None:
    """Its error is the cause."""
    checked = Checked(1)
    checked.number = -1
    with pytest.raises(CorruptMessage, match="it is negative") as caught:
        MSGPACK.deserialize(laid(MSGPACK, checked))
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_field_that_was_never_set() -> None:
    """An error that names it."""
    with pytest.raises(InvalidArgument, match="'name'"):
        MSGPACK.serialize(object.__new__(Key))


class Unregistered(Image):
    """A subclass is another type."""


def test_unregistered_types_are_refused_by_name() -> None:
    """A TypeError when encoding, a ValueError when decoding, with the name."""
    with pytest.raises(InvalidType, match=r"Unsupported object type .*Unregistered"):
        MSGPACK.serialize(Unregistered(1, (1, 1)))
    MsgpackSerde.register_type(Unregistered, name="short-lived")
    lying = laid(MSGPACK, [Unregistered(1, (1, 1))])
    del _registered._by_name["short-lived"]
    for read in (MSGPACK.deserialize, MSGPACK.deserialize_view, PICKLE.deserialize):
        with pytest.raises(InvalidArgument, match="Unsupported object type 'short-lived'"):
            read(lying)


def test_registered_types_have_names() -> None:
    """Module and qualified name, or a chosen one; a renamed class still reads old names."""
    assert _registered._by_type[Key].name == f"{__name__}.Key"
    old = laid(MSGPACK, Key("old"))
    assert MsgpackSerde.register_type(Key, "key/2") is Key
    new = laid(MSGPACK, Key("new"))
    assert b"key/2" in bytes(new)
    assert __name__.encode() not in bytes(new)
    assert MSGPACK.deserialize(old) == Key("old")
    assert MSGPACK.deserialize(new) == Key("new")


def test_names_are_taken_once() -> None:
    """Never by another class; again by the same class of a module that was re-executed."""
    with pytest.raises(InvalidArgument, match="belongs to"):
        MsgpackSerde.register_type(Image, f"{__name__}.Key")
    again = dataclasses.make_dataclass("Key", ["name", "content"], frozen=True)
    again.__module__, again.__qualname__ = Key.__module__, Key.__qualname__
    MsgpackSerde.register_type(again)
    assert type(MSGPACK.deserialize(laid(MSGPACK, again("k", b"")))) is again


@dataclasses.dataclass
class Mapping(dict):  # type: ignore[type-arg]
    """Has more than its fields."""

    field: int = 0


@pytest.mark.parametrize(
    ("cls", "name", "error"),
    [
        (int, None, InvalidType),
        (Mapping, None, InvalidType),
        (Key("instance"), None, InvalidType),
        (Path, None, InvalidType),
        (Key, "", InvalidArgument),
        (Key, 7, InvalidArgument),
        (Key, "\ud800", InvalidArgument),
    ],
    ids=str,
)
def test_what_cannot_be_registered(cls: Any, name: Any, error: type[Exception]) -> None:
    """Refused, and nothing has changed."""
    before = dict(_registered._by_name)
    with pytest.raises(error):
        MsgpackSerde.register_type(cls, name)
    assert _registered._by_name == before


def test_other_fields_than_the_writers_are_named() -> None:
    """Named, on both sides; never filled in."""
    lying = laid(MSGPACK, Key("k"))
    other = dataclasses.make_dataclass("Key", ["name", "length"])
    other.__module__, other.__qualname__ = Key.__module__, Key.__qualname__
    MsgpackSerde.register_type(other)
    with pytest.raises(CorruptMessage, match="name, length here, not name, content"):
        MSGPACK.deserialize(lying)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


class Anything:
    """Unregistered, with arrays in it."""

    def __init__(self) -> None:
        self.big = np.arange(100_000)
        self.few = np.arange(3)
        self.texts = ["text"]


def test_unregistered_types_are_pickled_by_choice() -> None:
    """Unregistered types are stored as pickle, also inside others; large arrays beside it."""
    by_copy, by_view = both_ways({"n": np.ones(3), "any": (Anything(), range(3))}, PICKLE)
    for got in (by_copy, by_view):
        assert got["any"][1] == range(3)
        assert got["any"][0].texts == ["text"]
        assert np.array_equal(got["any"][0].big, np.arange(100_000))
        assert got["any"][0].big.flags.writeable
    data, _, metadata, _ = PICKLE.serialize([Anything(), np.array([{}]), Unregistered(1, (1, 1))])
    assert len(metadata) < 1000
    assert b"Anything" not in metadata
    assert any(memoryview(part).nbytes == 800_000 for part in data)
    objects = both_ways([np.array([{}, None]), np.ma.ones(2)], PICKLE)[0]
    assert objects[0].tolist() == [{}, None]
    assert isinstance(objects[1], np.ma.MaskedArray)


def test_what_cannot_be_pickled() -> None:
    """A TypeError, as without pickle."""
    with pytest.raises(InvalidType, match="Unsupported object type"):
        PICKLE.serialize({"f": lambda: 0})


def test_pickles_are_refused(tmp_path: Path) -> None:
    """A reader without PickleMsgpackSerde executes nothing; one with it does."""
    file = tmp_path / "made"
    lying = laid(PICKLE, {"bomb": [Bomb(file)]})
    for read in (MSGPACK.deserialize, MSGPACK.deserialize_view):
        with pytest.raises(InvalidArgument, match="only PickleMsgpackSerde"):
            read(lying)
    assert not file.exists()
    PICKLE.deserialize(lying)
    assert file.exists()
    assert not MsgpackSerde.allow_pickle
    assert PickleMsgpackSerde.allow_pickle


NAMES = ["os.system", "builtins.eval", "wsgiref.util.guess_scheme", "antigravity.webbrowser", ""]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_not_imported(name: str) -> None:
    """A type's name is looked up, never imported."""
    before = set(sys.modules)
    _registered._by_type[Key] = _registered._by_type[Key]._replace(name=name)
    lying = laid(MSGPACK, Key("k"))
    with pytest.raises(MemlaneError, match="Unsupported object type"):
        MSGPACK.deserialize(lying)
    assert not {"wsgiref", "antigravity"} & (set(sys.modules) - before)


def test_a_pickle_is_no_object(tmp_path: Path) -> None:
    """Bytes that are entirely a pickle are not even parsed."""
    with pytest.raises(CorruptMessage):
        PICKLE.deserialize(memoryview(pickle.dumps(Bomb(tmp_path / "made"))))
    assert not (tmp_path / "made").exists()
