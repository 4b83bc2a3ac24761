"""Serialization of the objects in a store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

from memlane._importing import fork_waits
from memlane._native import ObjectMemory
from memlane.errors import CorruptMessage, InvalidArgument, MemlaneError
from memlane.store import _registered, _wire

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")


class ObjectSerde(ABC):
    """Converts values to bytes and back; a storage makes one instance at each end.

    Several threads may deserialize with one instance at once.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A class that overrides only deserialize must not inherit another format's view.
        for base in cls.__mro__:
            if "deserialize_view" in vars(base):
                break
            if "deserialize" in vars(base):
                cls.deserialize_view = ObjectSerde.deserialize_view  # type: ignore[method-assign]
                break

    @abstractmethod
    def serialize(self, value: Any) -> tuple[bytes | list[Buffer], int, bytes, int]:
        """Returns `(data, bytes of data, metadata, bytes of metadata)`.

        The parts may refer to the memory of `value`: they are copied, metadata first, before the
        call that stores `value` returns. If it raises, nothing is stored.
        """

    @abstractmethod
    def deserialize(self, data: memoryview) -> Any:
        """Returns the value, in its own memory; `data` is the metadata followed by the data.

        More bytes may follow. Another process may write to `data` meanwhile: copy what you parse
        before you parse it. If it raises, the read is not counted.
        """

    def deserialize_view(self, data: memoryview) -> Any:
        """Returns the value; its arrays may refer to `data`, and then keep it alive.

        Raises as `deserialize`, which it calls unless a subclass overrides it.
        """
        return self.deserialize(data)


class MsgpackSerde(ObjectSerde):
    """Tensors, arrays and plain Python types, kept exactly; decoding executes no code.

    Supported are None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set,
    frozenset, dict, datetime, date, time, timedelta and their time zones, numpy arrays and scalars
    without objects, torch CPU tensors (detached), and registered types; not subclasses of these,
    dtypes with metadata, or tensors with attributes.
    An object that occurs twice is decoded as two.

    Attributes:
        allow_pickle: False; `PickleMsgpackSerde` sets it.

    Example::

        @dataclass
        class Request:
            prompt: str

        MsgpackSerde.register_type(Request)  # in the writer, and in every reader
    """

    allow_pickle: ClassVar[bool] = False

    def __init__(self) -> None:
        # Importing these costs as much as importing memlane, and not every process has a store.
        with fork_waits:
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
        """Registers a dataclass or msgspec Struct, stored as a map of its fields; returns `cls`.

        Call it in the writer and in every reader. `name` (default: module and qualified name) is
        stored; readers look it up among registered names and never import it. A class registered
        under several names is written with the latest and read with any.

        Decoding creates a dataclass without calling `__init__`, as pickle does, and a Struct with
        its constructor.

        Raises:
            InvalidType: `cls` is neither a plain dataclass nor a Struct.
            InvalidArgument: the name is not text, or belongs to another class.
        """
        return _registered.register(cls, name)

    def serialize(self, value: Any) -> tuple[bytes | list[Buffer], int, bytes, int]:
        """Like `ObjectSerde.serialize`; refers to the memory of arrays instead of copying it.

        Every array starts at a multiple of 64 bytes from the allocation's start; see `_wire.py`.
        Raises `TypeError` for a type that is not supported.
        """
        try:
            try:
                encoding = self._encoding(self.allow_pickle)
                tree = self._pack(encoding.node(value))
            except (OverflowError, UnicodeEncodeError):
                encoding = self._encoding(self.allow_pickle, looks_closer=True)
                tree = self._pack(encoding.node(value))
        except RecursionError:
            raise InvalidArgument("the object is nested too deeply, or contains itself") from None
        except ValueError as error:
            raise InvalidArgument(f"the object cannot be serialized: {error}") from error
        head = _wire.HEADER.pack(_wire.MAGIC, len(tree))
        gap = _wire.gap_behind_metadata(len(head) + len(tree))
        metadata = b"".join((head, tree, _wire.PADDING[gap]))
        return encoding.pieces, encoding.nbytes, metadata, len(metadata)

    def deserialize(self, data: memoryview) -> Any:
        """Returns the value; its arrays are writable and have their own memory.

        Raises `ValueError` for a type that is not registered here, and `CorruptMessage` (also a
        `ValueError`) for bytes that `serialize` did not write.
        """
        return self._deserialize(data, False)

    def deserialize_view(self, data: memoryview) -> Any:
        """Returns the value; its arrays and bytes alias `data`.

        Arrays are read-only, and bytes are read-only memoryviews, except keys and members of sets.
        Everything else is a copy, including tensors, because torch has no read-only memory. Raises
        as `deserialize`.
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
            memory.release()  # an error's traceback would keep it, and with it the object


class PickleMsgpackSerde(MsgpackSerde):
    """MsgpackSerde for readers that trust the writer: pickles all other types.

    Decoding executes whatever code the writer chose. A reader with MsgpackSerde refuses pickles.
    """

    allow_pickle = True
