"""ShmObjectStorageHandle: what a reader needs to attach to a storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memlane._base.arguments import integer_from, segment_name
from memlane._base.handle_text import check_sequences, handle_in, handle_text, id_in
from memlane.errors import InvalidArgument
from memlane.store.serde import MsgpackSerde, ObjectSerde, PickleMsgpackSerde

# Of the handle as JSON text: 2 has writer_file.
FORMAT_VERSION = 2

_serdes: dict[str, type[ObjectSerde]] = {
    "MsgpackSerde": MsgpackSerde,
    "PickleMsgpackSerde": PickleMsgpackSerde,
}


@dataclass
class ShmObjectStorageHandle:
    """The address of a storage. Send it to every reader, pickled or as JSON text.

    Attributes:
        max_object_size: the writer's, in bytes.
        n_readers: the writer's.
        ring_buffer_handle: (data_buffer_size, name) of the ring.
        serde_class: the writer's.
        reader_lock: the writer's; a handle with a lock cannot be JSON text.
        writer_file: (pid, descriptor, id) of the ring in its writer's process, by which a reader
            may attach once the ring has no name any more; None if it keeps its name.
    """

    max_object_size: int
    n_readers: int
    ring_buffer_handle: tuple[int, str]
    serde_class: type[ObjectSerde]
    reader_lock: Any = None
    writer_file: tuple[int, int, str] | None = None

    @staticmethod
    def register_serde(serde_class: type[ObjectSerde], name: str | None = None) -> None:
        """Registers a serde for `to_json` and `from_json`; neither imports one by name.

        Raises:
            InvalidArgument: the name belongs to another serde.
        """
        key = serde_class.__name__ if name is None else name
        if _serdes.setdefault(key, serde_class) is not serde_class:
            raise InvalidArgument(f"{key!r} is already the name of another serde")

    def to_json(self) -> str:
        """The handle as JSON text, for channels that do not carry pickles.

        Raises:
            InvalidArgument: it has a reader_lock, or its serde is not registered.
        """
        if self.reader_lock is not None:
            raise InvalidArgument("a handle with a reader_lock cannot be text; readers need none")
        names = [name for name, known in _serdes.items() if known is self.serde_class]
        if not names:
            raise InvalidArgument(
                f"{self.serde_class.__name__} is not registered: call "
                f"ShmObjectStorageHandle.register_serde on both sides"
            )
        sizes = self.max_object_size, self.n_readers
        ring, file = self.ring_buffer_handle, self.writer_file
        return handle_text(_Text(FORMAT_VERSION, *sizes, ring, names[0], file))

    @staticmethod
    def from_json(text: str | bytes) -> ShmObjectStorageHandle:
        """The handle in `text`; raises InvalidArgument (a ValueError) if it is not one."""
        found = handle_in(text, _Text, FORMAT_VERSION)
        if found.serde not in _serdes:
            raise InvalidArgument(f"no serde is registered here as {found.serde!r}")
        sizes = found.max_object_size, found.n_readers
        ring, serde = found.ring_buffer_handle, _serdes[found.serde]
        handle = ShmObjectStorageHandle(*sizes, ring, serde, writer_file=found.writer_file)
        handle.validate()
        return handle

    def validate(self) -> None:
        """Raises InvalidArgument unless a storage can have made this handle."""
        check_sequences(self, "ring_buffer_handle", "writer_file")
        try:
            size, name = self.ring_buffer_handle
            integer_from("data_buffer_size", size, 1)
            segment_name(name)
            integer_from("max_object_size", self.max_object_size, 1)
            integer_from("n_readers", self.n_readers, 1)
            self._file()
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"this handle was not made by a storage: {error}") from None
        if not isinstance(self.serde_class, type):
            raise InvalidArgument(f"the handle's serde is not a class: {self.serde_class!r}")

    def _file(self) -> tuple[int, int, bytes] | None:
        if self.writer_file is None:
            return None
        pid, file, segment_id = self.writer_file
        return (
            integer_from("the pid in writer_file", pid, 1, 2**31 - 1),
            integer_from("the descriptor in writer_file", file, 0, 2**31 - 1),
            id_in("writer_file", segment_id),
        )


@dataclass
class _Text:
    """A handle as text; `serde` is a registered name."""

    format_version: int
    max_object_size: int
    n_readers: int
    ring_buffer_handle: tuple[int, str]
    serde: str
    writer_file: tuple[int, int, str] | None
