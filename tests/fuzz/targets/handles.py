"""Handles as text, and with fields as a pickle may have filled them.

Text gives a handle, or a MemlaneError that is a ValueError; attaching raises only MemlaneErrors.
"""

from __future__ import annotations

import dataclasses
import json
import random
from contextlib import suppress
from typing import Any

from memlane import (
    Handle,
    MemlaneError,
    MessageQueue,
    MsgpackSerde,
    ShmObjectStorageHandle,
    SingleWriterShmObjectStorage,
)
from tests.fuzz import engine

_ID = "00112233445566778899aabbccddeeff"
_NAME = "memlane-fuzz-no-such-segment"
QUEUE = Handle([4, 7], (2, 64, 3, _NAME), queue_id=_ID)
STORE = ShmObjectStorageHandle(1000, 2, (8192, _NAME), MsgpackSerde)
GENUINE = [QUEUE.to_json().encode(), STORE.to_json().encode()]

# What no JSON has, but a pickle: chosen by the input, in the place of a field's value.
STRANGE: list[Any] = [
    b"bytes", (), (1,), {}, {"a": 1}, {1, 2}, 1.5, float("nan"), 2**63, -1, 2**200, "", "\ud800",
    "a/b", list(_ID), [_ID], range(2), iter([1]), object(), int, Handle, [[]], [True], ["1"],
    (2, 64, 3), (2, 64, 3, 4), (2, 2**61, 3, _NAME),
    (2**16, 1, 2**22, _NAME), ([], {}, None, _NAME), (1.0, 2.0, 3.0, _NAME),
]  # fmt: skip


def attempt(content: bytes) -> object:
    outcomes = [_read(kind, content) for kind in (Handle, ShmObjectStorageHandle)]
    if content:
        outcomes.append(_with_strange_field(QUEUE, content))
        outcomes.append(_with_strange_field(STORE, content))
    return tuple(outcomes)


def _read(kind: Any, content: bytes) -> str:
    texts: list[Any] = [content]
    with suppress(UnicodeDecodeError):
        texts.append(content.decode())
    outcome = ""
    for text in texts:
        try:
            handle = kind.from_json(text)
        except MemlaneError as error:
            assert isinstance(error, ValueError), error  # noqa: PT017
            outcome = type(error).__name__
        else:
            assert kind.from_json(handle.to_json()) == handle
            outcome = "taken " + _attach(handle)
    return outcome


def _attach(handle: Handle | ShmObjectStorageHandle) -> str:
    try:
        if isinstance(handle, Handle):
            MessageQueue.create_from_handle(handle, 4).close()
        else:
            SingleWriterShmObjectStorage.create_from_handle(handle).close()
    except MemlaneError as error:
        return type(error).__name__
    return "attached"


def _with_strange_field(handle: Any, content: bytes) -> str:
    fields = [field.name for field in dataclasses.fields(handle) if field.name != "serde_class"]
    name = fields[content[0] % len(fields)]
    return _attach(dataclasses.replace(handle, **{name: STRANGE[content[-1] % len(STRANGE)]}))


def change(content: bytes, dice: random.Random) -> bytes:
    if dice.random() < 0.3:
        return engine.change(content, dice)
    try:
        fields = json.loads(content)
        return json.dumps(_changed(fields, dice, dice.randint(1, 3))).encode()
    except (ValueError, RecursionError):
        return engine.change(content, dice)


def _changed(value: Any, dice: random.Random, depth: int) -> Any:
    if depth and isinstance(value, dict) and value:
        key = dice.choice(list(value))
        changed = {**value, key: _changed(value[key], dice, depth - 1)}
        if dice.random() < 0.1:
            del changed[key]
        return changed
    if depth and isinstance(value, list) and value:
        items = list(value)
        at = dice.randrange(len(items))
        items[at] = _changed(items[at], dice, depth - 1)
        return items * dice.choice([1, 1, 1, 2])
    number = dice.choice(engine.NUMBERS)
    return dice.choice(
        [
            *(number, -number, float(number), [number], True, None, 1, 2, 3),
            *("", "x" * dice.choice([31, 32, 255, 256]), _ID, "a/b", "..", "\0", "\ud800"),
            *([], {}, [value], {"a": value}, "msgpack", "PickleMsgpackSerde"),
            *([number, _NAME], [2, number, 3, _NAME], [2, 64, number, _NAME]),
        ]
    )
