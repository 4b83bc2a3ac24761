"""Reading objects, as the writer of a storage and its readers do alike."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from memlane.errors import ObjectGone
from memlane.store.views import ObjectView

if TYPE_CHECKING:
    from collections.abc import Callable

    from memlane._native import PinnedObject, StoreReader, StoreWriter
    from memlane.store.serde import ObjectSerde


class ObjectReads:
    """What a storage does for who has an address and an id. Several threads may at once."""

    ser_de: ObjectSerde
    _end: StoreWriter | StoreReader
    _does_count: bool

    @property
    def is_closed(self) -> bool:
        return self._end.is_closed

    def get(self, address: int, monotonic_id: int) -> Any:
        """The object of that id at that address, the caller's own; counts the read.

        Raises:
            ObjectGone: a ValueError; nothing of that id is stored there (any more).
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
        """The same as a block: `with storage.view(address, id) as value`, arrays not copied.

        They are read-only and keep the object from eviction. Tensors are copies, the caller's own:
        torch knows no read-only memory. The read counts when the block ends, however it ends. If
        anything but the name of `with ... as name` refers to an array then, leaving it raises
        `ViewInUse`, and the object is kept until that goes.
        """
        return ObjectView(self, address, monotonic_id)

    def _pin(self, address: int, monotonic_id: int) -> PinnedObject:
        pinned = self._end.pin(address, monotonic_id)
        if pinned is None:
            raise self._gone(address, monotonic_id)
        return pinned

    def _decoded_view(self, pinned: PinnedObject) -> Any:
        try:
            decode = self.ser_de.deserialize_view
        except AttributeError:  # a serde made for vLLM's storage has no views of its own
            decode = self.ser_de.deserialize
        return self._decoded(decode, pinned)

    @staticmethod
    def _decoded(decode: Callable[[memoryview], Any], pinned: PinnedObject) -> Any:
        data = pinned.data()
        try:
            return decode(data)
        except BaseException:  # whose traceback would keep the object from eviction
            with suppress(BufferError):
                data.release()
            pinned.release()
            raise

    def _finish(self, pinned: PinnedObject) -> bool:
        """Counts the read. False, and not counted, if what was read was not the object's."""
        if type(self).increment_reader_flag is ObjectReads.increment_reader_flag:
            return self._end.finish_read(pinned, self._does_count)
        if not self._end.is_valid(pinned):
            return False
        if self._does_count:
            self.increment_reader_flag(pinned.count())
        self._end.note_progress(pinned.size)
        return True

    def _gone(self, address: int, number: int) -> ObjectGone:
        return ObjectGone(
            f"Data for address:id '{address}:{number}' has been modified or is invalid"
        )

    def increment_reader_flag(self, data_view: memoryview) -> None:
        """One more read by this reader, of the object whose 4 count bytes `data_view` is.

        On the writer it stands in for a reader that still owes one.
        """
        self._end.count(data_view)
