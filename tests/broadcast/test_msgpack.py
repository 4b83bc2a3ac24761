"""serializer="msgpack": decoding executes nothing."""

import collections
import dataclasses
import datetime
import decimal
import enum
import pickle
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from memlane import CorruptMessage, Handle, MessageQueue
from tests.support.queues import refuses

pytestmark = [pytest.mark.wheel, pytest.mark.unit]


@contextmanager
def msgpack_queue() -> Iterator[tuple[MessageQueue, MessageQueue]]:
    with (
        MessageQueue(1, 1, max_chunk_bytes=4096, serializer="msgpack") as writer,
        MessageQueue.create_from_handle(
            Handle.from_json(writer.export_handle().to_json()), 0
        ) as reader,
    ):
        yield writer, reader


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 1


class Name(str, enum.Enum):  # noqa: UP042 - as most are written
    OWN = "own"


class Point(msgspec.Struct):
    x: int


@dataclasses.dataclass
class Step:
    number: int
    tokens: list[int]


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        (None, None),
        ({"a": [1, 2.5, "x", b"y", True]}, {"a": [1, 2.5, "x", b"y", True]}),
        ((1, (2, 3)), [1, [2, 3]]),
        ({1: "integer keys"}, {1: "integer keys"}),
        ({(1, "a"): 2, None: 3, b"k": 4}, {(1, "a"): 2, None: 3, b"k": 4}),
        (b"z" * 1_000_000, b"z" * 1_000_000),
        (list(range(100_000)), list(range(100_000))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_round_trip(sent: object, got: object) -> None:
    """Types of MessagePack arrive, at any size; readers learn the serializer from the handle."""
    with msgpack_queue() as (writer, reader):
        writer.enqueue(sent)
        assert reader.dequeue() == got


Pair = collections.namedtuple("Pair", "a b")


def itself() -> list[object]:
    value: list[object] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "obj",
    [
        object(),
        1 + 2j,
        lambda: 0,
        [1, {2: object()}],
        2**70,
        "half a character: \ud800",
        memoryview(b"not contiguous")[::2],
        memoryview(b"bytes"),
        bytearray(b"bytes"),
        Pair(1, 2),
        [Pair(1, 2)],
        collections.OrderedDict(a=1),
        collections.defaultdict(int, a=1),
        collections.Counter("aab"),
        Step(3, [4, 5]),
        [{"deep": Step(3, [])}],
        {1, 2},
        frozenset("a"),
        Colour.RED,
        Level.HIGH,
        Name.OWN,
        {Colour.RED: 1},
        {(1, Level.HIGH): 1},
        uuid.UUID(int=7),
        {uuid.UUID(int=7): 1},
        decimal.Decimal("1.5"),
        datetime.datetime(2026, 1, 1),
        datetime.date(2026, 1, 1),
        datetime.timedelta(1),
        Point(1),
        itself(),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_what_it_has_no_type_for(obj: object) -> None:
    """Refused at enqueue, nothing sent, and the queue still works."""
    with msgpack_queue() as (writer, reader):
        with refuses(TypeError, ValueError) as caught:
            writer.enqueue(obj)
        if type(obj).__module__ not in ("builtins",):
            assert isinstance(caught.value, TypeError)
            assert type(obj).__name__ in str(caught.value)
        writer.enqueue("next")
        assert reader.dequeue(timeout=0) == "next"


def test_pickles_are_not_executed() -> None:
    """A msgpack reader treats a pickle as corrupt, whatever the writer's handle said."""
    with MessageQueue(1, 1, max_chunk_bytes=4096) as writer:
        handle = writer.export_handle()
        handle.serializer = "msgpack"
        with MessageQueue.create_from_handle(handle, 0) as reader:
            for obj in (Bomb(), [Bomb(), bytes(200_000)]):
                writer.enqueue(obj)
                with pytest.raises(CorruptMessage):
                    reader.dequeue()
            assert Bomb.exploded == 0
    pickle.loads(pickle.dumps(Bomb()))
    assert Bomb.exploded == 1


class Bomb:
    exploded = 0

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return explode, ()


def explode() -> int:
    Bomb.exploded += 1
    return 0


@pytest.mark.parametrize("name", ["json", "", None, 7])
def test_unknown_serializers_are_refused(name: object) -> None:
    """Refused before anything is made, in the writer and in a handle."""
    with refuses(ValueError, match="serializer"):
        MessageQueue(1, 1, serializer=name)  # type: ignore[arg-type]
    with MessageQueue(1, 1, max_chunk_bytes=64) as writer:
        handle = writer.export_handle()
        handle.serializer = name  # type: ignore[assignment]
        with refuses(ValueError):
            MessageQueue.create_from_handle(handle, 0)
