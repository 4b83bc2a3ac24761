"""Reading objects, as copies or in place; the same for a storage's writer and its readers."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from memlane._base.diagnosis import view_in_use
from memlane._base.survivors import drop_finished, survivor
from memlane.errors import InvalidType, ObjectGone, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from memlane._native import PinnedObject, StoreReader, StoreWriter
    from memlane.store.serde import ObjectSerde


class ObjectReads:
    """The calls of a storage that take an address and an id; several threads may make them."""

    ser_de: ObjectSerde
    _end: StoreWriter | StoreReader
    _does_count: bool

    @property
    def is_closed(self) -> bool:
        """True if this storage was closed."""
        return self._end.is_closed

    def get(self, address: int, monotonic_id: int) -> Any:
        """Returns a copy of the object with that id at that address, and counts the read.

        Raises:
            ObjectGone: a ValueError; no object of that id is stored there (any more).
            Exception: whatever decoding raised; the read is not counted.
        """
        pinned = self._pin(address, monotonic_id)
        try:
            value = self._decoded(self.ser_de.deserialize, pinned)
            if not self._finish(pinned):
                raise self._gone(address, monotonic_id)
        finally:
            pinned.release()
        return value

    def view(self, address: int, monotonic_id: int) -> ObjectView:
        """Like `get`, but does not copy arrays; use `with storage.view(address, id) as value`.

        Arrays are read-only, `bytes` are read-only memoryviews, and both keep the object from
        eviction. Tensors are copies, because torch has no read-only memory. The read is counted
        when the block ends, even by an exception. Keeping a reference to an array past the block,
        other than the name of `with ... as name`, raises `ViewInUse`; the object is kept until that
        reference is dropped.

        If a GPU reads the object, keep the block itself and pass it the stream:
        `with (block := storage.view(address, id)) as value: ...; block.release_after(stream)`.
        """
        return ObjectView(self, address, monotonic_id)

    def lend(self, address: int, monotonic_id: int) -> Any:
        """Like `view` without a block: an object stays stored while an array or a memoryview of it
        exists. The read is counted at once. Raises as `get`.
        """
        pinned = self._pin(address, monotonic_id)
        try:
            value = self._decoded_view(pinned)
            if not self._finish(pinned):
                raise self._gone(address, monotonic_id)
        finally:
            pinned.release()
        return value

    def _pin(self, address: int, monotonic_id: int) -> PinnedObject:
        pinned = self._end.pin(address, monotonic_id)
        if pinned is None:
            raise self._gone(address, monotonic_id)
        return pinned

    def _decoded_view(self, pinned: PinnedObject) -> Any:
        try:
            decode = self.ser_de.deserialize_view
        except AttributeError:  # a serde written for vLLM's storage does not have it
            decode = self.ser_de.deserialize
        return self._decoded(decode, pinned)

    @staticmethod
    def _decoded(decode: Callable[[memoryview], Any], pinned: PinnedObject) -> Any:
        data = pinned.data()
        try:
            return decode(data)
        except BaseException:  # the traceback would keep the object from eviction
            with suppress(BufferError):
                data.release()
            pinned.release()
            raise

    def _finish(self, pinned: PinnedObject) -> bool:
        """Counts the read; returns False, uncounted, if the bytes read were not the object's."""
        if type(self).increment_reader_flag is ObjectReads.increment_reader_flag:
            return self._end.finish_read(pinned, self._does_count)
        if not self._end.is_valid(pinned):
            return False
        if self._does_count:
            self.increment_reader_flag(pinned.count())
        self._end.note_progress()
        return True

    def _gone(self, address: int, number: int) -> ObjectGone:
        return ObjectGone(
            f"Data for address:id '{address}:{number}' has been modified or is invalid"
        )

    def increment_reader_flag(self, data_view: memoryview) -> None:
        """Counts a read by this reader of the object whose 4 count bytes are `data_view`.

        On the writer, it stands for the read of a reader that has not read the object yet.

        Raises:
            InvalidArgument: `data_view` is not writable memory of 4 bytes or more.
        """
        self._end.count(data_view)


class ObjectView:
    """A `with` block on an object, which stays stored until the last alias of it is dropped.

    Keeps `storage` alive, so that its end is not freed during the block.
    """

    __slots__ = ("_events", "_pinned", "_place", "_storage", "_value")

    def __init__(self, storage: ObjectReads, address: int, number: int) -> None:
        self._storage = storage
        self._place = (address, number)
        self._pinned: PinnedObject | None = None
        self._events: list[Any] = []

    def __enter__(self) -> Any:
        pinned = self._storage._pin(*self._place)
        self._value = self._storage._decoded_view(pinned)
        self._pinned = pinned
        return self._value

    def release_after(self, stream_or_event: Any) -> None:
        """Makes the end of the block wait for GPU work on the object. Never run on a GPU yet.

        Args:
            stream_or_event: a `torch.cuda.Stream`, for all work queued on it so far, or a recorded
                `torch.cuda.Event`.

        Raises:
            Unsupported: this process has not imported torch, or torch finds no GPU.
            InvalidType: it is neither a stream nor an event.
        """
        torch: Any = sys.modules.get("torch")  # imported, if the caller has a stream or an event
        if not hasattr(torch, "cuda"):
            raise Unsupported(
                "release_after is for work that torch does on a GPU, and this process has not "
                "imported torch"
            )
        if not torch.cuda.is_available():
            raise Unsupported("release_after is for work on a GPU; torch finds none here")
        if isinstance(stream_or_event, torch.cuda.Stream):
            stream_or_event = stream_or_event.record_event()
        if not isinstance(stream_or_event, torch.cuda.Event):
            raise InvalidType(
                f"a torch.cuda.Stream or Event is needed, not {type(stream_or_event).__name__}"
            )
        self._events.append(stream_or_event)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is None:
            return
        box, self._value = [self._value], None
        lease = pinned.lease()
        try:
            for event in self._events:
                event.synchronize()
            if self._events:
                drop_finished()  # copies on that stream refer to the object
            if not self._storage.is_closed:
                self._storage._finish(pinned)
        finally:
            pinned.release()
        if kind is not None:
            return  # the error matters more, and its traceback refers to objects of the block
        found = survivor(box, lease)
        box.clear()
        if found is not None and lease.is_held:
            raise view_in_use(found)
