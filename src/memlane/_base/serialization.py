"""Serialization of messages.

A codec has three methods: `encode` fills its `outgoing`, `decode` decodes a message that is one
small stream, and `decode_parts` one with a large stream (then a file) or buffers beside it.

`encode_plain` and `decode_plain` are a fast path for small trees of dicts, lists, strings, bytes
and numbers of exactly these types. MessagePack restores them exactly, in half the time of pickle;
`native/bindings/messages/plain.hpp` defines which. The receiver sees a difference only if it
compares equal strings or bytes with `is`: one object that occurs twice arrives as two.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from memlane._importing import fork_waits
from memlane._native import Buffer, Incoming, Outgoing, beyond_message_pack, bytes_at
from memlane.errors import CorruptMessage, InvalidArgument, InvalidType, MemlaneError


class Codec(Protocol):
    """Called by the native ends. An end takes one call at a time, so a codec may keep state."""

    outgoing: Outgoing

    @property
    def encode_plain(self) -> Callable[[object], bytes] | None: ...
    @property
    def decode_plain(self) -> Callable[[bytes], Any]: ...

    def encode(self, obj: object) -> None: ...
    def decode(self, stream: bytes) -> Any: ...
    def decode_parts(self, stream: bytes | Incoming, buffers: Sequence[Buffer]) -> Any: ...


def _msgpack() -> tuple[Callable[[object], bytes], Callable[[bytes], Any]]:
    with fork_waits:  # imported late: not every process has a queue
        from msgspec import msgpack

    return msgpack.Encoder().encode, msgpack.Decoder().decode


Reducer = Callable[[Any], Any]


class Pickler(pickle.Pickler):
    """Protocol 5, with `reducers` for objects of exactly these types."""

    def __init__(self, file: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.reducers: dict[type, Reducer] = {}
        self._tensor: type | None = None
        self._reduce_subclass: Reducer | None = None

    # Not a dispatch_table, which would have to ask copyreg's for each object of another type.
    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        reducer = self.reducers.get(kind)
        if reducer is None and self._tensor in kind.__mro__:  # half the time of issubclass
            reducer = self._reduce_subclass
        return NotImplemented if reducer is None else reducer(obj)

    def use_torch(self) -> bool:
        """Sends CPU tensors with a single copy. False if torch has not been imported."""
        tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        if tensor is None:
            return False
        with fork_waits:
            from memlane._base.tensors import REDUCERS, reduce_subclass

        self.reducers.update(REDUCERS)
        self._tensor, self._reduce_subclass = tensor, reduce_subclass
        return True


def _reduce_array(array: npt.NDArray[Any]) -> Any:
    """Sends a read-only array as a writable one: the memory that readers get is their own."""
    if array.flags.writeable:
        return NotImplemented
    reduced: Any = array.__reduce_ex__(5)
    function, arguments, *others = reduced
    if isinstance(arguments[0], pickle.PickleBuffer):
        memory = np.frombuffer(arguments[0].raw(), np.uint8)
        writable = bytes_at(array, memory.ctypes.data, memory.nbytes)
        arguments = (pickle.PickleBuffer(writable), *arguments[1:])
    return function, arguments, *others


class PickleCodec:
    """Pickle, protocol 5: any picklable object. Arrays are sent beside the stream, uncopied.

    The Pickler passes bytes of 64 KiB and more to `outgoing.write` uncopied. It is reused for every
    message, because making one costs more than pickling a small dict. Decoding executes whatever
    code the writer chose.
    """

    def __init__(self, *, keep_readonly: bool = False) -> None:
        self.outgoing = outgoing = Outgoing()
        self._pickler = Pickler(outgoing, outgoing.add_buffer)
        if not keep_readonly:
            self._pickler.reducers[np.ndarray] = _reduce_array
        self._knows_torch = False
        self.encode_plain, self.decode_plain = _msgpack()

    def encode(self, obj: object) -> None:
        self._knows_torch = self._knows_torch or self._pickler.use_torch()
        try:
            self._pickler.dump(obj)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            if isinstance(error, MemlaneError):  # raised by a __reduce__ of memlane
                raise
            raise _unpicklable(type(error))(
                f"the message cannot be pickled and was not sent: {error}; send its contents "
                f"instead, or give its class a __reduce__"
            ) from error
        finally:
            self._pickler.clear_memo()  # the memo would keep the object alive

    decode = staticmethod(pickle.loads)

    @staticmethod
    def decode_parts(stream: bytes | Incoming, buffers: Sequence[Buffer]) -> Any:
        views = [memoryview(buffer) for buffer in buffers]  # type: ignore[arg-type]
        try:
            if isinstance(stream, bytes):
                return pickle.loads(stream, buffers=views)
            return pickle.Unpickler(stream, buffers=views).load()
        finally:
            del views, buffers  # an error's traceback would keep them, and perhaps a chunk


def _unpicklable(raised: type[Exception]) -> type[InvalidType]:
    """InvalidType that is also of the type that pickle raised, for callers that catch that."""
    if issubclass(InvalidType, raised):
        return InvalidType
    plain = {"__module__": InvalidType.__module__, "__reduce__": lambda e: (InvalidType, e.args)}
    return type(InvalidType.__name__, (InvalidType, raised), plain)


class MsgpackCodec:
    """MessagePack: only types that arrive unchanged, except that tuples become lists. Decoding
    executes no code.
    """

    def __init__(self) -> None:
        with fork_waits:
            from msgspec import DecodeError
            from msgspec.msgpack import Ext

        self._extension, self._decode_error = Ext, DecodeError
        self.outgoing = Outgoing()
        self._encode, self._decode = _msgpack()
        self.encode_plain, self.decode_plain = None, self.decode

    def encode(self, obj: object) -> None:
        try:
            if (part := beyond_message_pack(obj, self._extension)) is not None:
                raise TypeError(
                    f"MessagePack has no type for {type(part).__module__}.{type(part).__name__}"
                )
            self.outgoing.write(self._encode(obj))
        except TypeError as error:
            raise InvalidType(f"the msgpack serializer cannot send this: {error}") from None
        except (OverflowError, UnicodeError, BufferError) as error:
            raise InvalidArgument(f"the msgpack serializer cannot send this: {error}") from None
        except RecursionError:
            raise InvalidArgument(
                "the msgpack serializer cannot send this: it is nested too deeply or in itself"
            ) from None

    def decode(self, stream: bytes) -> Any:
        try:
            return self._decode(stream)
        # TypeError: msgspec 0.18 raises it for a map with an unhashable key.
        except (self._decode_error, UnicodeError, RecursionError, TypeError) as error:
            raise CorruptMessage(
                f"the message is not valid MessagePack and was skipped: {error}"
            ) from None

    def decode_parts(self, stream: bytes | Incoming, buffers: Sequence[Buffer]) -> Any:
        if buffers:
            raise CorruptMessage("the message has out-of-band buffers, which MessagePack lacks")
        return self.decode(stream if isinstance(stream, bytes) else stream.read())


def codec_of(serializer: object, *, keep_readonly: bool = False) -> Codec:
    """A new codec for `serializer`; each end of a queue has its own."""
    if serializer == "pickle":
        return PickleCodec(keep_readonly=keep_readonly)
    if serializer != "msgpack":
        raise InvalidArgument(f"serializer must be 'pickle' or 'msgpack', not {serializer!r}")
    if keep_readonly:
        raise InvalidArgument("keep_readonly=True needs serializer='pickle': msgpack has no arrays")
    return MsgpackCodec()
