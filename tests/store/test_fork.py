"""Forked children have copies of storages and rings that they can only close.

Fails without the guard: a child that announces, unlinks or unpins would end the parent's storage.
"""

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest

from memlane import MemlaneError, WrongProcess
from tests.support import Link, start
from tests.support.queues import refuses
from tests.support.stores import (
    BytesSerde,
    Place,
    Ring,
    Storage,
    ring_of_bytes,
    start_store_reader,
    store_of,
)

CALLS: dict[str, Callable[[Storage, Storage, Place], object]] = {
    "put": lambda writer, _, place: writer.put("new", b"x"),
    "writer's get": lambda writer, _, place: writer.get(*place),
    "get": lambda _, reader, place: reader.get(*place),
    "view": lambda _, reader, place: reader.view(*place).__enter__(),
    "is_cached": lambda writer, _, place: writer.is_cached("k"),
    "get_cached": lambda writer, _, place: writer.get_cached("k"),
    "touch": lambda writer, _, place: writer.touch("k"),
    "release_touches": lambda writer, _, place: writer.release_touches(),
    "free_unused": lambda writer, _, place: writer.free_unused(),
    "clear": lambda writer, _, place: writer.clear(),
    "handle": lambda writer, _, place: writer.handle(),
    "statistics": lambda _, reader, place: reader.statistics(),
    "flag": lambda _, reader, place: reader.increment_reader_flag(memoryview(bytearray(4))),
    "allocate_buf": lambda writer, _, place: writer.ring_buffer.allocate_buf(8),
    "free_buf": lambda writer, _, place: writer.ring_buffer.free_buf(lambda *_: True),
    "ring's clear": lambda writer, _, place: writer.ring_buffer.clear(),
    "access_buf": lambda _, reader, place: reader.ring_buffer.access_buf(0).__enter__(),
    "shared_memory": lambda _, reader, place: reader.ring_buffer.shared_memory,
    "with": lambda _, reader, place: reader.__enter__(),
}


def try_calls(_link: Link, writer: Storage, reader: Storage, place: Place) -> list[str]:
    wrong = []
    for name, call in CALLS.items():
        try:
            call(writer, reader, place)
        except WrongProcess:
            continue
        except MemlaneError as error:
            wrong.append(f"{name}: {error!r}")
        else:
            wrong.append(f"{name}: nothing raised")
    writer.close()
    reader.close()
    return wrong


def test_every_call_but_close_raises_wrong_process_in_a_child() -> None:
    """Every one but close() raises WrongProcess, and changes nothing."""
    with store_of(1) as (writer, (reader,)):
        place = writer.put("k", b"x")
        assert start(try_calls, writer, reader, place, method="fork").result() == []
        assert writer.key_index == {"k": place}
        assert reader.get(*place) == b"x"


def end_a_view(_link: Link, block: Any) -> str:
    try:
        block.__exit__(None, None, None)
    except WrongProcess:
        return "refused"
    finally:
        del block
        gc.collect()
    return "left"


def test_a_view_in_the_child_neither_counts_nor_unpins() -> None:
    """Its end there neither counts nor unpins: the parent's object stays."""
    with store_of(1) as (writer, (reader,)):
        block = reader.view(*writer.put("k", b"value"))
        value = block.__enter__()
        assert start(end_a_view, block, method="fork").result() == "refused"
        seen = writer.statistics().readers[0]
        assert (seen.views, seen.outstanding) == (1, 1)
        assert bytes(value) == b"value"
        del value
        block.__exit__(None, None, None)


class Forks(BytesSerde):
    """Forks in the middle of a call."""

    def serialize(self, value: Any) -> Any:
        self.fork()
        return super().serialize(value)

    def deserialize(self, data: memoryview) -> Any:
        self.fork()
        return bytes(data)

    def fork(self) -> None:
        self.child = os.fork()
        if self.child:
            assert os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1]) == 7


@pytest.mark.parametrize("call", ["put", "get"])
def test_a_fork_in_the_middle_of_a_call_raises_in_the_child(call: str) -> None:
    """The child's half of the call raises WrongProcess; the parent's is as ever."""
    with store_of(1, serde=Forks if call == "put" else LateForks) as (writer, (reader,)):
        parent = os.getpid()
        LateForks.is_on = False
        try:
            place = writer.put("k", b"value")
            LateForks.is_on = True
            assert reader.get(*place) == b"value" or call == "put"
        except WrongProcess:
            os._exit(7 if os.getpid() != parent else 1)
        except BaseException:
            if os.getpid() != parent:
                os._exit(8)
            raise
        if os.getpid() != parent:
            os._exit(9)
        seen = writer.statistics()
        assert (seen.objects, seen.readers[0].outstanding, seen.readers[0].views) == (1, 0, 0)


class LateForks(Forks):
    is_on = False

    def fork(self) -> None:
        if self.is_on:
            super().fork()


def test_the_death_of_a_forks_parent_is_seen() -> None:
    """A child that lives on does not hide the death of the reader that forked it."""
    with store_of(1, size=640, max_object_size=64, attached=0) as (writer, _):
        doomed = start_store_reader(writer)
        child = doomed.call(fork_a_child)
        for n in range(10):
            writer.put(n, bytes(52))
        with refuses(MemoryError):
            writer.put("new", b"x")
        doomed.peer.kill()
        writer.put("new", b"x")
        os.kill(child, 9)


def fork_a_child(_reader: Storage) -> int:
    child = os.fork()
    if child == 0:
        import signal

        signal.pause()
    return child


def test_calls_of_a_ring_raise_wrong_process_in_a_child() -> None:
    """The same for a ring without a storage."""
    with ring_of_bytes(100) as ring:
        ring.allocate_buf(8)
        assert start(use_ring, ring, method="fork").result() == ["WrongProcess"] * 4
        assert ring.allocate_buf(8) == (16, 1)
        Ring(*ring.handle()).close()


def use_ring(_link: Link, ring: Ring) -> list[str]:
    outcomes = []
    for call in (
        lambda: ring.allocate_buf(8),
        ring.clear,
        lambda: ring.free_buf(lambda *_: True),
        lambda: ring.access_buf(0).__enter__(),
    ):
        try:
            call()
        except MemlaneError as error:
            outcomes.append(type(error).__name__)
    ring.close()
    return outcomes
