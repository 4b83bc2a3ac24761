"""Objects as they are stored in the ring, decoded by copy and by view.

Each gives a value, or a MemlaneError that is a ValueError. `change` exchanges nodes of the tree.
"""

from __future__ import annotations

import dataclasses
import datetime
import random
import struct
import sys
from contextlib import suppress
from typing import Any

import numpy as np
from msgspec import msgpack

from memlane import MemlaneError
from memlane.store import _wire
from memlane.store.serde import MsgpackSerde
from tests.fuzz import engine
from tests.support.serdes import exact, in_chunk, laid

SERDE = MsgpackSerde()


@dataclasses.dataclass
class Step:
    number: int
    parts: Any


SERDE.register_type(Step, "step")

VALUES: list[Any] = [
    {"a": [1, 2.5, "x", None, True], "b": {"c": b"bytes"}},
    [np.arange(12, dtype=">i4").reshape(3, 4, order="F"), np.zeros((0, 3)), np.array(1.5)],
    np.zeros(2, [("a", "M8[s]"), ("b", "S3", (2,)), ("c", [("d", "<f2")])]),
    {(1, b"k"): {(2,), "y"}, 2**70: frozenset([1, "a", (None,)])},
    [b"b" * 1500, bytearray(b"owned"), 1j, -(2**80), "\ud800"],
    (datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC), datetime.date(1, 1, 1), datetime.time(1)),
    (datetime.timedelta(1, 2, 3), datetime.timezone(datetime.timedelta(hours=1), "x")),
    [np.float32(1), np.str_("t"), np.bytes_(b"v"), np.void(b"v"), np.datetime64(1, "ms")],
    [Step(1, [np.ones(3)]), Step(2, None)],
]
with suppress(ImportError):
    from zoneinfo import ZoneInfo

    import torch

    torch.set_num_threads(1)
    VALUES += [[torch.arange(6).reshape(2, 3), torch.zeros(2, dtype=torch.bfloat16)]]
    VALUES += [datetime.datetime(2024, 1, 1, tzinfo=ZoneInfo("UTC"))]

GENUINE = [bytes(laid(SERDE, value)) for value in VALUES]

TEXTS = ["<f4", "|b1", ">M8[s]", "<m8", "|S3", "|S0", "<U1", "|V0", "<f16", "|O", "i4,O", "(2,)f4"]
TEXTS += ["<M8[999s]", "<M8[0s]", "|V2147483647", "<U536870912", "=f4", "<q", "<c32", "float32"]
TEXTS += ["bfloat16", "float8_e4m3fn", "bool", "qint8", "uint64", "complex128", "step", "F", "C"]
TEXTS += ["UTC", "Europe/Berlin", "Europe", "../../etc/passwd", "/dev/zero", "posixrules", "\0", ""]


def attempt(content: bytes) -> object:
    lying = in_chunk(content)
    kinds = []
    for deserialize in (SERDE.deserialize, SERDE.deserialize_view):
        try:
            value = deserialize(lying)
        except MemlaneError as error:
            assert isinstance(error, ValueError), error  # noqa: PT017
            kinds.append((type(error), type(error.__cause__)))
        else:
            with suppress(RecursionError):  # Python 3.13 decodes what is too deep for functions
                exact(value)
                _use(value)
            kinds.append(type(value).__name__)
    return tuple(kinds)


def _use(value: Any) -> None:
    """A decoded value can be printed, and tensors computed with."""
    if isinstance(value, (list, tuple)):
        for item in value:
            _use(item)
    elif isinstance(value, np.ndarray) and 0 < value.size < 1000:
        # A letter or time that Python has not; numpy has a SystemError for some letters.
        with suppress(ValueError, OverflowError, SystemError):
            value.tolist()
        np.array_equal(value, value)
    elif "torch" in sys.modules and isinstance(value, torch.Tensor) and value.numel() < 1000:
        value.clone()


def change(content: bytes, dice: random.Random) -> bytes:
    if dice.random() < 0.2:
        return engine.change(content, dice)
    try:
        _, length = _wire.HEADER.unpack_from(content)
        tree = msgpack.decode(content[_wire.HEADER.size : _wire.HEADER.size + length])
        data = content[_wire.HEADER.size + length :]
    except (ValueError, TypeError, OverflowError, RecursionError, struct.error):
        return engine.change(content, dice)
    for _ in range(dice.randint(1, 3)):
        tree = _changed(tree, dice, dice.randint(0, 6))
    data = _changed_data(data, dice)
    try:
        packed = msgpack.encode(tree)  # may be huge: parts of it stand in it many times
        head = _wire.HEADER.pack(_wire.MAGIC, len(packed)) + packed
        return head + bytes(_wire.gap_behind_metadata(len(head))) + data
    except (TypeError, OverflowError, RecursionError, ValueError, MemoryError, struct.error):
        return engine.change(content, dice)


def _changed_data(data: bytes, dice: random.Random) -> bytes:
    match dice.randrange(6):
        case 0:
            return data[: dice.randrange(len(data) + 1)]
        case 1:
            return data + bytes(dice.choice([1, 64, 4096]))
        case _:
            return data


def _changed(tree: Any, dice: random.Random, depth: int) -> Any:
    """The tree with one node changed, deeper down while `depth` lasts."""
    if depth and isinstance(tree, list) and tree:
        changed = list(tree)
        at = dice.randrange(len(changed))
        match dice.randrange(8):
            case 0:
                del changed[at]
            case 1:
                changed.insert(at, _leaf(dice))
            case 2:
                changed[at:at] = [changed[at]] * dice.choice([1, 2, 70, 300])
            case _:
                changed[at] = _changed(changed[at], dice, depth - 1)
        return changed
    if depth and isinstance(tree, dict) and tree:
        key = dice.choice(list(tree))
        changed_dict = {**tree, key: _changed(tree[key], dice, depth - 1)}
        if dice.random() < 0.2:
            changed_dict[dice.choice([1, b"k", (1, 2), "k", None, float("nan")])] = tree[key]
        return changed_dict
    match dice.randrange(8):
        case 0:
            return [dice.randrange(-1, 25), tree]
        case 1:
            return [dice.randrange(4), dice.choice([True, False]), [tree, *[_leaf(dice)] * 2]]
        case 2:
            return [
                16,
                dice.choice(TEXTS),
                [dice.choice(engine.NUMBERS) for _ in range(dice.randrange(4))],
            ]
        case 3:
            return [
                20,
                dice.choice(TEXTS),
                [dice.choice([0, 1, 2, 3, 2**62]) for _ in range(dice.randrange(4))],
            ]
        case 4:
            for _ in range(dice.choice([1, 10, 200, 1100])):
                tree = [dice.choice([0, 1, 0.0]), False, [tree]]
            return tree
        case 5:
            shape = [dice.choice([0, 1, 2, 2**31, 2**62, -1]) for _ in range(dice.randrange(3))]
            return [tree, shape]
        case _:
            return _leaf(dice)


def _leaf(dice: random.Random) -> Any:
    number = dice.choice(engine.NUMBERS)
    return dice.choice(
        [
            *(number, -min(number, 2**63), float(number), float("nan"), [number], None, True),
            *(dice.choice(TEXTS), dice.choice(TEXTS), [], {}, b"\xff" * 4, msgpack.Ext(5, b"ext")),
            dice.randbytes(dice.choice([0, 1, 4, 8, 9])),
            datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC),
        ]
    )
