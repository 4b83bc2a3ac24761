"""Each fault that fuzzing has found, on its own (tests/fuzz, docs/reliability.md).

Hostile bytes of a peer raise an error of memlane's; they cause no crash and no endless wait.

Fails without the guard: numbers of the header are trusted after attach, a section is read before
its length is checked, a decoder's error passes through unchanged.
"""

import dataclasses
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec import msgpack

from memlane import (
    CorruptMessage,
    Handle,
    InvalidArgument,
    LayoutMismatch,
    MessageQueue,
    MsgpackSerde,
    ShmObjectStorageHandle,
    SingleWriterShmObjectStorage,
    SingleWriterShmRingBuffer,
)
from tests.fuzz.records import whole
from tests.support import Link, start
from tests.support.queues import SHM, path_of, queue_of, refuses
from tests.support.stores import BytesSerde, store_of

PAGE = 4096
TRAILER_END, SECTION_COUNT, SECTIONS = 24, 68, 256
"""Places in the header, see native/core/layout.hpp."""
CLOSING = 2 << 32
"""A bit of an entry's stamp, see native/store/object_table.hpp."""


def put(memory: Any, offset: int, number: int, width: int = 8) -> None:
    memory[offset : offset + width] = number.to_bytes(width, "little")


def header_behind(documented: int) -> int:
    return -(-documented // PAGE) * PAGE


def path_of_ring(ring: SingleWriterShmRingBuffer) -> Any:
    return SHM / ring.handle()[1]


@pytest.mark.parametrize("size", [2**32 - 1, 1 << 20, 24])
def test_a_directory_that_claims_many_sections_is_refused(size: int) -> None:
    """Making a storage on a ring whose header claims very many sections."""

    def role(_link: Link) -> None:
        with SingleWriterShmRingBuffer(8192, create=True) as ring:
            with whole(path_of_ring(ring)) as memory:
                put(memory, header_behind(8192) + SECTION_COUNT, size, 4)
                put(memory, header_behind(8192) + TRAILER_END, 2**62)
            storage = SingleWriterShmObjectStorage(1000, 1, ring, BytesSerde)
            assert storage.get(*storage.put("key", b"value")) == b"value"
            storage.close()

    start(role).result()


def test_a_section_without_length_is_refused() -> None:
    """The storage's facts lie at the end of the file."""
    with store_of(1, size=8192, attached=0) as (writer, _):
        with whole(path_of_ring(writer.ring_buffer)) as memory:
            first = header_behind(8192) + SECTIONS
            put(memory, first + 8, len(memory))
            put(memory, first + 16, 0)
        with pytest.raises(LayoutMismatch, match="damaged section directory"):
            SingleWriterShmObjectStorage.create_from_handle(writer.handle())


def test_a_table_of_holes_is_not_allocated() -> None:
    """A file longer than its allocated bytes: no process is made to allocate the rest."""
    with store_of(1, size=8192, max_objects=64, attached=0) as (writer, _):
        path = path_of_ring(writer.ring_buffer)
        first, many = header_behind(8192) + SECTIONS, 1 << 24
        with whole(path) as memory:
            (facts,) = struct.unpack_from("<Q", memory, first + 8)
            put(memory, facts + 8, many)
            put(memory, first + 64 + 8, len(memory))
            put(memory, first + 64 + 16, many)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + many * 128)
        before = path.stat().st_blocks
        with pytest.raises(LayoutMismatch, match="damaged section directory"):
            SingleWriterShmObjectStorage.create_from_handle(writer.handle())
        assert path.stat().st_blocks == before


def view_after_lies(_link: Link) -> None:
    message = [np.arange(20_000, dtype=np.uint8)]
    with queue_of(1, ready=False) as (writer, (reader,)):
        header = header_behind(writer.buffer.total_bytes_of_buffer)  # type: ignore[union-attr]
        for lie in (None, 0, PAGE, 2 * PAGE, 2**63, 17):
            writer.enqueue(message)
            with whole(path_of(writer)) as memory:
                if lie is not None:
                    put(memory, header + TRAILER_END, lie)
                with reader.dequeue_view(timeout=0) as received:
                    assert received[0].tobytes() == message[0].tobytes()
                    del received


def test_views_of_large_messages_do_not_depend_on_the_trailers_end() -> None:
    """Views of large messages show them, whatever the header says about their offset."""
    start(view_after_lies).result()


def successor(_link: Link) -> None:
    with store_of(1, size=1 << 20, max_objects=1 << 15, attached=1) as (writer, (reader,)):
        reader.close()
        with whole(path_of_ring(writer.ring_buffer)) as memory:
            third = header_behind(1 << 20) + SECTIONS + 64
            stride, offset, count = struct.unpack_from("<4xIQQ", memory, third)
            for index in range(count):
                put(memory, offset + index * stride, CLOSING | index)
        SingleWriterShmObjectStorage.create_from_handle(writer.handle()).close()


def test_a_table_that_is_closing() -> None:
    """A reader that takes a place waits for the writer once, not once per entry."""
    start(successor).result()


@pytest.mark.parametrize("serializer", ["pickle", "msgpack"])
@pytest.mark.parametrize(
    "packed",
    [b"\x91" * 50_000 + b"\xc0", b"\x81" * 50_000, b"\x81\x80\x01", b"\xc1", b"\xa1\xff", b""],
    ids=["nested", "nested keys", "a map as a key", "no code", "no UTF-8", "nothing"],
)
def test_invalid_msgpack_is_consumed_and_the_next_message_arrives(
    packed: bytes, serializer: str
) -> None:
    """Invalid MessagePack: the message is consumed, and the next one arrives."""
    sent = {str(number): "x" * 250 for number in range(200)}
    with (
        MessageQueue(1, 1, None, 65536, 2, serializer=serializer) as writer,
        MessageQueue.create_from_handle(writer.export_handle(0), 0) as reader,
    ):
        writer.enqueue(sent)
        writer.enqueue("next")
        with whole(path_of(writer)) as memory:
            memory[: len(packed)] = packed
            at = memory.find(struct.pack("<Q", len(msgpack.encode(sent))), 2 * 65536)
            put(memory, at, len(packed))
        with pytest.raises(CorruptMessage):
            reader.dequeue(timeout=0)
        assert reader.dequeue(timeout=0) == "next"


QUEUE = Handle([0], (1, 64, 2, "memlane-none"), queue_id="0" * 32)
STORE = ShmObjectStorageHandle(1000, 1, (8192, "memlane-none"), MsgpackSerde)


@pytest.mark.parametrize(
    ("handle", "attach", "field", "value"),
    [
        (STORE, SingleWriterShmObjectStorage.create_from_handle, "ring_buffer_handle", (1,)),
        (STORE, SingleWriterShmObjectStorage.create_from_handle, "ring_buffer_handle", None),
        (STORE, SingleWriterShmObjectStorage.create_from_handle, "n_readers", "1"),
        (STORE, SingleWriterShmObjectStorage.create_from_handle, "serde_class", None),
        (QUEUE, lambda h: MessageQueue.create_from_handle(h, 0), "queue_id", list("0" * 32)),
        (QUEUE, lambda h: MessageQueue.create_from_handle(h, 0), "local_reader_ranks", {0: 1}),
        (QUEUE, lambda h: MessageQueue.create_from_handle(h, 0), "local_reader_ranks", iter([0])),
        (QUEUE, lambda h: MessageQueue.create_from_handle(h, 0), "buffer_handle", (1, 64)),
        *[
            (QUEUE, lambda h: MessageQueue.create_from_handle(h, 0), field, made(value))
            for field, value in [
                ("buffer_handle", QUEUE.buffer_handle),
                ("local_openings", [3]),
                ("writer_file", [1, 2]),
                ("relay_of", [1, "tcp://127.0.0.1:1"]),
            ]
            for made in (iter, dict.fromkeys)
        ],
        (
            *(STORE, SingleWriterShmObjectStorage.create_from_handle),
            *("ring_buffer_handle", dict.fromkeys(STORE.ring_buffer_handle)),
        ),
        (STORE, SingleWriterShmObjectStorage.create_from_handle, "writer_file", (1, 2, "")),
    ],
)
def test_an_impossible_field_of_a_handle_is_refused(
    handle: Any, attach: Callable[[Any], Any], field: str, value: Any
) -> None:
    """A field with an impossible value: an error that says so, before anything is opened."""
    with refuses(InvalidArgument):
        attach(dataclasses.replace(handle, **{field: value}))
