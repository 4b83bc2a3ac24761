"""`view`: arrays that alias the ring, and what happens if they outlive the block."""

import gc
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import (
    Closed,
    MsgpackSerde,
    ObjectSerde,
    PickleMsgpackSerde,
    ViewInUse,
)
from tests.support.missing import package
from tests.support.queues import refuses
from tests.support.stores import ArraySerde, Ring, Storage, is_evicted, store_of

pytestmark = [pytest.mark.wheel, pytest.mark.unit]

ARRAY = np.arange(600, dtype=np.float64).reshape(20, 30)

SURVIVORS: dict[str, Callable[[Any], object]] = {
    "the array": lambda view: view,
    "a slice": lambda view: view[3:],
    "a slice of a slice": lambda view: view[3:][:, 2:],
    "its transpose": lambda view: view.T,
    "its memory": memoryview,
}
HARMLESS: dict[str, Callable[[Any], object]] = {
    "nothing": lambda view: None,
    "a copy": lambda view: view.copy(),
    "a number": lambda view: view[3, 4],
}


def views(writer: Storage) -> int:
    return writer.statistics().readers[0].views


def test_a_view_aliases_memory_and_is_read_only() -> None:
    """Nothing is copied; it is aligned to 64, and nobody here can write to it.

    numpy refuses; a write past numpy, as by `torch.from_numpy`, would end this process.
    """
    with store_of(serde=ArraySerde) as (writer, (reader,)):
        for n in range(20):
            place = writer.put(n, ARRAY[: n + 1])
            with reader.view(*place) as view:
                np.testing.assert_array_equal(view, ARRAY[: n + 1])
                assert not view.flags.writeable
                assert view.ctypes.data % 64 == 0
                line = mapped_at(view.ctypes.data)
                assert reader.ring_buffer.handle()[1] in line
                assert " r--s " in line
                with pytest.raises(ValueError, match="read-only"):
                    view[0] = 1
            del view
        assert views(writer) == 0


@pytest.mark.parametrize("count", [3, 100_000])
def test_a_write_to_a_tensor_reaches_nobody(count: int) -> None:
    """torch has no read-only memory, so a view's tensors are copies, and outlive it."""
    torch = package("torch")
    sent = torch.ones(count, dtype=torch.bfloat16)
    with store_of(2, 1 << 20, 1 << 20, MsgpackSerde) as (writer, readers):
        place = writer.put("k", [sent, sent.float()])
        for reader in (*readers, writer):
            with reader.view(*place) as view:
                kept = view[0][1:]
                assert torch.equal(view[0], sent)
                assert view[1].numpy().all()
                kept.zero_()
                view[1].numpy()[:] = 0
            assert not kept.any()
        del view
        assert is_evicted(writer)


def mapped_at(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return line
    raise AssertionError("nothing is mapped there")


@pytest.mark.parametrize("keep", SURVIVORS.values(), ids=SURVIVORS)
def test_a_view_that_survives_its_block_keeps_the_object(keep: Callable[[Any], object]) -> None:
    """Leaving raises, the read is counted, and the object stays until the last alias is dropped."""
    with store_of(serde=ArraySerde) as (writer, (reader,)):
        place = writer.put("k", ARRAY)
        kept = []
        with refuses(BufferError) as caught, reader.view(*place) as view:
            kept.append(keep(view))
        assert isinstance(caught.value, ViewInUse)
        del caught, view
        assert writer.statistics().readers[0].outstanding == 0
        assert views(writer) == 1
        assert not is_evicted(writer)
        kept.clear()
        assert views(writer) == 0
        assert is_evicted(writer)


@pytest.mark.parametrize("use", HARMLESS.values(), ids=HARMLESS)
def test_a_view_that_is_dropped_frees_the_object(use: Callable[[Any], object]) -> None:
    """The block's own name is allowed; the object is free once that is dropped too."""
    with store_of(serde=ArraySerde) as (writer, (reader,)):
        place = writer.put("k", ARRAY)
        with reader.view(*place) as view:
            used = use(view)
        del view
        assert is_evicted(writer)
        del used


def test_bytes_are_viewed_as_read_only_memory() -> None:
    """bytes come as a read-only memoryview."""
    with store_of() as (writer, (reader,)):
        place = writer.put("k", b"bytes")
        with reader.view(*place) as view:
            assert bytes(view) == b"bytes"
            assert view.readonly
        kept = []
        with refuses(ViewInUse), reader.view(*place) as view:
            kept.append(view[1:])
        del view
        assert not is_evicted(writer)
        kept.clear()
        assert is_evicted(writer)


def test_the_read_counts_at_the_end() -> None:
    """Not before; and even if the block raises."""
    with store_of() as (writer, (reader,)):
        for key, error in (("a", False), ("b", True)):
            place = writer.put(key, b"x")
            before = writer.statistics().readers[0].outstanding
            try:
                with reader.view(*place):
                    assert writer.statistics().readers[0].outstanding == before
                    if error:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            assert writer.statistics().readers[0].outstanding == before - 1


def test_several_views_have_a_pin_each() -> None:
    """Each has its own pin, in any order, on the writer too."""
    with store_of(2, serde=ArraySerde) as (writer, (one, two)):
        place = writer.put("k", ARRAY)
        with one.view(*place) as a, two.view(*place) as b, writer.view(*place) as c:
            with one.view(*place) as d:
                assert a is not d
            for view in (a, b, c, d):
                np.testing.assert_array_equal(view, ARRAY)
            del view
            assert [reader.views for reader in writer.statistics().readers] == [2, 1]
            del d
            assert not is_evicted(writer)
        del a, b
        assert not is_evicted(writer)  # the writer's is still there
        del c
        assert is_evicted(writer)


class Bomb(ArraySerde):
    def deserialize(self, data: memoryview) -> Any:
        raise ZeroDivisionError

    deserialize_view = deserialize


def enter(reader: Storage, address: int, number: int) -> None:
    with reader.view(address, number):
        raise AssertionError("the block must not be entered")


@pytest.mark.parametrize("read", [Storage.get, enter])
def test_decoding_fails(read: Callable[..., object]) -> None:
    """The read is not counted; neither the error nor its traceback keeps a pin."""
    with store_of(serde=Bomb) as (writer, (reader,)):
        place = writer.put("k", ARRAY)
        with pytest.raises(ZeroDivisionError) as caught:
            read(reader, *place)
        assert views(writer) == 0
        assert writer.statistics().readers[0].outstanding == 1
        del caught


@pytest.mark.parametrize("read", [Storage.get, enter])
def test_decoding_is_refused(read: Callable[..., object]) -> None:
    """The same with memlane's serde: values decoded so far are not kept."""
    with (
        store_of(serde=PickleMsgpackSerde, attached=0) as (writer, _),
        Storage(1 << 14, 1, Ring(*writer.ring_buffer.handle()), MsgpackSerde) as reader,
    ):
        place = writer.put("k", {"first": b"b" * 5000, "then": Fraction(1, 2)})
        with pytest.raises(ValueError, match="Unsupported object type") as caught:
            read(reader, *place)
        assert views(writer) == 0
        assert writer.statistics().readers[0].outstanding == 1
        del caught


class Copies(ArraySerde):
    """Has no views of its own; the base class decodes."""

    deserialize_view = ObjectSerde.deserialize_view


def test_a_serde_without_views_copies() -> None:
    with store_of(serde=Copies) as (writer, (reader,)):
        place = writer.put("k", ARRAY)
        with reader.view(*place) as view:
            kept = view[1:]
        np.testing.assert_array_equal(kept, ARRAY[1:])
        assert is_evicted(writer)


def test_get_of_a_serde_that_aliases() -> None:
    """The result of get does not change, though the serde did not copy."""

    class Aliases(ArraySerde):
        deserialize_view = ArraySerde.deserialize_view

        def deserialize(self, data: memoryview) -> Any:
            return self.deserialize_view(data)

    with store_of(serde=Aliases) as (writer, (reader,)):
        place = writer.put("k", ARRAY)
        kept = reader.get(*place)
        assert not is_evicted(writer)
        np.testing.assert_array_equal(kept, ARRAY)
        del kept
        assert is_evicted(writer)


@pytest.mark.parametrize("who", ["reader", "writer", "both"])
def test_memory_stays_mapped_for_views_after_close(who: str) -> None:
    """The end closes at once; memory stays mapped until the last view goes."""
    with store_of(serde=ArraySerde) as (writer, (reader,)):
        place = writer.put("k", ARRAY)
        kept = []
        with refuses(ViewInUse), reader.view(*place) as view:
            kept.append(view[1:])
        for end in {"reader": [reader], "writer": [writer], "both": [reader, writer]}[who]:
            end.close()
        np.testing.assert_array_equal(kept[0], ARRAY[1:])
        if who == "reader":
            assert is_evicted(writer)  # nobody waits for a closed reader
        del view
        kept.clear()


def test_closing_inside_the_block_of_a_view_is_no_error() -> None:
    """The block ends without an error, and nothing is counted."""
    with store_of(serde=ArraySerde) as (writer, (reader,)):
        place = writer.put("k", ARRAY)
        with reader.view(*place) as view:
            reader.close()
            np.testing.assert_array_equal(view, ARRAY)
        with refuses(Closed), reader.view(*place):
            pass


def test_a_late_release_touches_no_successor() -> None:
    """A view that outlives its closed reader does not drop a successor's pins."""
    with store_of(1, serde=ArraySerde) as (writer, (old,)):
        place = writer.put("k", ARRAY)
        with refuses(ViewInUse), old.view(*place) as view:
            kept = view[1:]
        del view
        old.close()
        new = Storage(1 << 14, 1, Ring(*writer.ring_buffer.handle()), ArraySerde)
        with new.view(*place) as view:
            del kept
            gc.collect()
            assert views(writer) == 1
            assert not is_evicted(writer)
            np.testing.assert_array_equal(view, ARRAY)
        del view
        assert is_evicted(writer)
        new.close()
