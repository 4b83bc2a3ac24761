"""How objects become the bytes of a message, and objects again.

A codec has `encode`, which fills its `outgoing`; `decode` for a message that is one small stream;
and `decode_parts` for a large stream (then a file) and for buffers that travelled beside it.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any, Protocol

from memlane._native import Incoming, Outgoing, PooledBuffer


class Codec(Protocol):
    """What the native ends call. An end takes one call at a time, so a codec may keep state."""

    outgoing: Outgoing

    def encode(self, obj: object) -> None: ...
    def decode(self, stream: bytes) -> Any: ...
    def decode_parts(self, stream: bytes | Incoming, buffers: list[PooledBuffer]) -> Any: ...


class PickleCodec:
    """Pickle, protocol 5: any picklable object. Arrays travel beside the stream, uncopied.

    The Pickler hands bytes of 64 KiB and more to `outgoing.write` as they are; it is used again for
    every message, because making one costs more than pickling a small dict. Decoding executes what
    the writer wants.
    """

    def __init__(self) -> None:
        self.outgoing = Outgoing()
        self._pickler = pickle.Pickler(
            self.outgoing, protocol=5, buffer_callback=self.outgoing.add_buffer
        )
        self._knows_torch = False

    def encode(self, obj: object) -> None:
        if not self._knows_torch and "torch" in sys.modules:
            from memlane._torch import tensor_reducers

            self._pickler.dispatch_table = tensor_reducers()
            self._knows_torch = True
        try:
            self._pickler.dump(obj)
        finally:
            self._pickler.clear_memo()  # the memo would keep the object alive

    decode = staticmethod(pickle.loads)

    @staticmethod
    def decode_parts(stream: bytes | Incoming, buffers: list[PooledBuffer]) -> Any:
        if isinstance(stream, bytes):
            return pickle.loads(stream, buffers=buffers)
        return pickle.Unpickler(stream, buffers=buffers).load()
