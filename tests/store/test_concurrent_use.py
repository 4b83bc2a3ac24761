"""The writer's calls come from one thread at a time; a second one changes nothing."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from memlane import Closed, ConcurrentUse
from tests.support import PATIENCE, Aside
from tests.support.queues import refuses
from tests.support.stores import BytesSerde, Ring, Storage

pytestmark = pytest.mark.unit

CALLS: dict[str, Callable[[Storage], object]] = {
    "put": lambda writer: writer.put("other", b"x"),
    "get_cached": lambda writer: writer.get_cached("k"),
    "touch": lambda writer: writer.touch("k"),
    "release_touches": lambda writer: writer.release_touches(),
    "free_unused": lambda writer: writer.free_unused(),
    "clear": lambda writer: writer.clear(),
    "allocate_buf": lambda writer: writer.ring_buffer.allocate_buf(8),
    "free_buf": lambda writer: writer.ring_buffer.free_buf(lambda *_: True),
    "the ring's clear": lambda writer: writer.ring_buffer.clear(),
}


class Slow(BytesSerde):
    """Blocks in the middle of a put until it is told to continue."""

    begun = threading.Event()
    go_on = threading.Event()

    def serialize(self, value: Any) -> Any:
        if value == b"slow":
            self.begun.set()
            assert self.go_on.wait(PATIENCE)
        return super().serialize(value)


@pytest.fixture
def writer() -> Any:
    Slow.begun.clear()
    Slow.go_on.clear()
    with Storage(64, 1, Ring(640, create=True), Slow) as storage:
        storage.put("k", b"first")
        yield storage


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_beside_a_put_is_refused(writer: Storage, call: Callable[[Storage], object]) -> None:
    blocked = Aside(writer.put, "slow", b"slow")
    assert Slow.begun.wait(PATIENCE)
    with refuses(ConcurrentUse):
        call(writer)
    assert writer.get(*writer.key_index["k"]) == b"first"  # reading is for all
    assert writer.is_cached("k")
    Slow.go_on.set()
    place = blocked.result()
    assert writer.key_index == {"k": (0, 0), "slow": place}
    assert writer.get(*place) == b"slow"
    call(writer)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_within_a_put_is_refused(writer: Storage, call: Callable[[Storage], object]) -> None:
    """A serde's call of the storage is refused, and the put continues."""

    def meddle(value: Any) -> Any:
        with refuses(ConcurrentUse):
            call(writer)
        return BytesSerde().serialize(value)

    writer.ser_de.serialize = meddle  # type: ignore[method-assign]
    assert writer.get(*writer.put("x", b"meddled")) == b"meddled"


def test_a_put_that_is_closed_in_the_middle_leaves_nothing(writer: Storage) -> None:
    """The put raises Closed, and nothing is left."""
    blocked = Aside(writer.put, "slow", b"slow")
    assert Slow.begun.wait(PATIENCE)
    writer.close()
    Slow.go_on.set()
    with refuses(Closed):
        blocked.result()
    assert list(writer.key_index) == ["k"]
