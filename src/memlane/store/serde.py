"""How objects become what lies in the object store, and objects again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

from memlane._native import ObjectMemory
from memlane.errors import CorruptMessage, InvalidArgument, MemlaneError
from memlane.store import _registered, _wire

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")


class ObjectSerde(ABC):
    """Turns values into bytes and back; a storage makes one instance of its class at each end.

    An instance may be used by several threads at once to deserialize.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A deserialize of its own reads another format than the deserialize_view that it inherits.
        for base in cls.__mro__:
            if "deserialize_view" in vars(base):
                break
            if "deserialize" in vars(base):
                cls.deserialize_view = ObjectSerde.deserialize_view  # type: ignore[method-assign]
                break

    @abstractmethod
    def serialize(self, value: Any) -> tuple[bytes | list[Buffer], int, bytes, int]:
        """`(data, its bytes, metadata, its bytes)`; the parts may refer to the memory of `value`.

        They are copied, metadata first, before anything else happens to `value`.
        """

    @abstractmethod
    def deserialize(self, data: memoryview) -> Any:
        """The value, in memory of its own; `data` is metadata and data one behind the other.

        Bytes may follow them. Another process may be writing to `data` meanwhile: what is parsed
        must be copied first.
        """

    def deserialize_view(self, data: memoryview) -> Any:
        """The value, whose arrays may refer to `data`, and keep it as long as they live."""
        return self.deserialize(data)


class MsgpackSerde(ObjectSerde):
    """Tensors, arrays and Python's own types, as they were; decoding executes nothing.

    Types are kept exactly: None, bool, int, float, complex, str, bytes, bytearray, list, tuple,
    set, frozenset, dict, datetime, date, time, timedelta, their time zones, numpy arrays and
    scalars without objects, torch CPU tensors (detached), and what was registered. Subclasses of
    them are other types. An object that occurs twice comes back as two.
    """

    allow_pickle: ClassVar[bool] = False

    def __init__(self) -> None:
        # msgspec and the tables of types cost as much as memlane, and not everybody has a store.
        from msgspec import DecodeError, msgpack

        from memlane.store._decode import value_of
        from memlane.store._encode import Encoding

        self._pack = msgpack.Encoder().encode
        self._unpack = msgpack.Decoder().decode
        self._decode_error = DecodeError
        self._value_of = value_of
        self._encoding = Encoding

    @staticmethod
    def register_type(cls: type[T], name: str | None = None) -> type[T]:
        """Lets a dataclass or msgspec Struct travel, as a map of its fields; returns it.

        To be called in the writer and in every reader. `name` (default: module and qualified name)
        is what travels; it is looked up among what is registered and never imported. A class may be
        registered again under a new name: it is written with that one, and read with all.

        A dataclass is made past its `__init__`, as pickle does, a Struct by its constructor.
        """
        return _registered.register(cls, name)

    def serialize(self, value: Any) -> tuple[bytes | list[Buffer], int, bytes, int]:
        """Like `ObjectSerde.serialize`: the bytes of arrays are referred to, not copied.

        Every array starts at a multiple of 64 from the start of the chunk, see `_wire.py`.
        `TypeError` for an object of a type that cannot travel.
        """
        try:
            try:
                encoding = self._encoding(self.allow_pickle)
                tree = self._pack(encoding.node(value))
            except (OverflowError, UnicodeEncodeError):
                encoding = self._encoding(self.allow_pickle, looks_closer=True)
                tree = self._pack(encoding.node(value))
        except RecursionError:
            raise InvalidArgument("it is nested too deeply, or contains itself") from None
        except ValueError as error:
            raise InvalidArgument(f"it cannot be serialized: {error}") from error
        head = _wire.HEADER.pack(_wire.MAGIC, len(tree))
        gap = _wire.gap_behind_metadata(len(head) + len(tree))
        metadata = b"".join((head, tree, _wire.PADDING[gap]))
        return encoding.pieces, encoding.nbytes, metadata, len(metadata)

    def deserialize(self, data: memoryview) -> Any:
        """The value; its arrays are writable and in memory of their own.

        `ValueError` for a type that is not registered here, and `CorruptMessage`, which is one,
        for what `serialize` has not written.
        """
        return self._deserialize(data, False)

    def deserialize_view(self, data: memoryview) -> Any:
        """The value; arrays and bytes are where they lie in `data`.

        Arrays are read-only, and bytes are read-only memoryviews, except keys and members of sets.
        All else is a copy; tensors, too, because torch knows no read-only memory.
        """
        return self._deserialize(data, True)

    def _deserialize(self, data: memoryview, is_view: bool) -> Any:
        memory = ObjectMemory(data, is_view, self.allow_pickle)
        try:
            return self._value_of(memory, self._unpack(memory.tree()))
        except MemlaneError:
            raise
        except (
            self._decode_error,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            raise CorruptMessage(f"the object cannot be decoded: {error}") from error
        finally:
            memory.release()  # the traceback of an error would keep it, and it the object


class PickleMsgpackSerde(MsgpackSerde):
    """MsgpackSerde for who trusts the writer: types that it does not know travel as pickle.

    Decoding executes what the writer wants. A reader with MsgpackSerde refuses such objects.
    """

    allow_pickle = True
