"""Placeholder until the serializers of the store arrive: plain MessagePack, arrays not included."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

Parts = list[bytes | bytearray | memoryview]


class ObjectSerde(ABC):
    """How a storage's values become bytes, and values again."""

    @abstractmethod
    def serialize(self, value: Any) -> tuple[bytes | Parts, int, bytes, int]:
        """(data, its bytes, metadata, its bytes)."""

    @abstractmethod
    def deserialize(self, data: memoryview) -> Any:
        """The value of `data`: metadata and data, read-only."""

    def deserialize_view(self, data: memoryview) -> Any:
        """The same, its arrays aliasing `data`."""
        return self.deserialize(data)


class MsgpackSerde(ObjectSerde):
    """MessagePack: decoding executes nothing."""

    def serialize(self, value: Any) -> tuple[bytes | Parts, int, bytes, int]:
        from msgspec import msgpack

        data = msgpack.encode(value)
        return data, len(data), b"", 0

    def deserialize(self, data: memoryview) -> Any:
        from msgspec import msgpack

        return msgpack.decode(bytes(data))


class PickleMsgpackSerde(MsgpackSerde):
    """The same, with pickle for what MessagePack has no type for."""

    allow_pickle = True
