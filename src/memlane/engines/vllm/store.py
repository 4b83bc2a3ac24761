"""Replaces vLLM's object store (`distributed/device_communicators/shm_object_storage.py`).

Holds only what vLLM's callers use: readers' `touch` and `clear`, names, and, from 0.32 on, signed
handles. Values are still serialized by vLLM's serde.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import warnings
from contextlib import suppress
from typing import Any

from vllm.distributed.device_communicators import shm_object_storage as vllms_own

import memlane
from memlane.engines._replacing import Replacement
from memlane.engines.vllm._engine import VLLM, store_name
from memlane.errors import InvalidArgument, SegmentMissing, UnknownKey


class SingleWriterShmRingBuffer(memlane.SingleWriterShmRingBuffer):
    """A ring in memlane's segments, so that a sweep removes what a killed engine leaves."""

    def __init__(
        self, data_buffer_size: int, name: str | None = None, create: bool = False
    ) -> None:
        try:
            super().__init__(data_buffer_size, name and store_name(name), create)
        except SegmentMissing:
            if not os.path.exists(f"/dev/shm/{name}"):
                raise
            raise InvalidArgument(VLLM.not_switched(f"/dev/shm/{name}", "store")) from None


class SingleWriterShmObjectStorage(memlane.SingleWriterShmObjectStorage):
    """The constructor and the calls of vLLM's caches until 0.31.

    There a `touch` counts as one more reference, which the workers' `touch` takes back. Here it
    pins the object until the next `get_cached`, and a worker's counts nothing.
    """

    def __init__(
        self,
        max_object_size: int,
        n_readers: int,
        ring_buffer: memlane.SingleWriterShmRingBuffer,
        serde_class: type[Any] = vllms_own.MsgpackSerde,
        reader_lock: Any = None,
    ) -> None:
        given = (max_object_size, n_readers, ring_buffer, serde_class, reader_lock)
        super().__init__(*given, unlink_when_complete=True, name="vllm.mm_cache")

    def touch(  # type: ignore[override]
        self, key: str, address: int = 0, monotonic_id: int = 0
    ) -> None:
        """On the writer as memlane's, but unknown keys are ignored. On a reader, checks that the
        object can still be read, without counting a read."""
        if self.is_writer:
            with suppress(UnknownKey):
                super().touch(key)
        else:
            self._pin(address, monotonic_id).release()

    def clear(self) -> None:
        """Does as memlane's on the writer, and nothing on a reader."""
        if self.is_writer:
            super().clear()


class SignedObjectStorage(SingleWriterShmObjectStorage):
    """The calls of vLLM's caches from 0.32 on.

    Handles are signed with HMAC-SHA256 and a secret that only the storage's ends know. Readers
    accept no other handles; the writer only those of objects that are stored now.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._secret = self._end.secret

    def get_signature(self, key: str) -> list[int]:
        """The signature of the handle under which an object is stored now."""
        return list(self._signature_of(key, *self._find(key)))

    def _signature_of(self, key: str, address: int, number: int) -> bytes:
        signed = hashlib.sha256(key.encode()).digest()
        signed += address.to_bytes(8, "little") + number.to_bytes(4, "little")
        return hmac.digest(self._secret, signed, "sha256")

    def verify_signature(
        self, key: str | None, address: int, monotonic_id: int, signature: list[int] | None
    ) -> None:
        """Raises InvalidArgument unless the handle was issued for that key."""
        if key is None or signature is None:
            raise InvalidArgument("a key and an SHM handle signature are needed to read an object")
        try:
            given = bytes(signature) if isinstance(signature, list) else b""
            is_right = hmac.compare_digest(given, self._signature_of(key, address, monotonic_id))
        except (AttributeError, TypeError, ValueError, OverflowError):
            is_right = False  # of a wrong type, or out of range
        if is_right and self.is_writer:
            is_right = self.key_index.get(key) == (address, monotonic_id)
        if not is_right:
            raise InvalidArgument(
                f"the SHM handle signature is not that of {key!r} at address {address!r} with id "
                f"{monotonic_id!r}"
            )

    def get(
        self, address: int, monotonic_id: int, signature: Any = None, key: str | None = None
    ) -> Any:
        """Is memlane's; readers need a signed handle."""
        if not self.is_writer:
            self.verify_signature(key, address, monotonic_id, signature)
        return super().get(address, monotonic_id)

    def touch(  # type: ignore[override]
        self, key: str, address: int = 0, monotonic_id: int = 0, signature: Any = None
    ) -> None:
        """Needs a signed handle on a reader."""
        if not self.is_writer:
            self.verify_signature(key, address, monotonic_id, signature)
        super().touch(key, address, monotonic_id)


def replacements() -> list[Replacement]:
    """The replacements for this process; vLLM's serde and handle stay."""
    # vLLM's serde has never seen read-only memory; it copies it, so the warning does not apply.
    warnings.filterwarnings("ignore", "The given buffer is not writable", module="vllm.v1.seri")
    storage = SingleWriterShmObjectStorage
    if hasattr(vllms_own.SingleWriterShmObjectStorage, "verify_signature"):
        storage = SignedObjectStorage
    return [
        Replacement(vllms_own.__name__, "SingleWriterShmRingBuffer", SingleWriterShmRingBuffer),
        Replacement(vllms_own.__name__, "SingleWriterShmObjectStorage", storage),
    ]
