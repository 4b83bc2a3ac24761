"""A ring reserves its space as it grows: a full /dev/shm is an error, and no SIGBUS.

Fails without the guards: a writer that does not reserve space before it writes dies of SIGBUS, and
so does a reader that reads where there is none.
"""

from collections.abc import Callable

import pytest

from memlane import ShmExhausted
from tests.base.test_full_shm import MIB, exhausted, full, used
from tests.support import Link, private_shm, start, unshare_refusal
from tests.support.queues import refuses, segments
from tests.support.stores import BytesSerde, Ring, Storage

pytestmark = pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())

SIZE = 40 * MIB
PIECE = 4 * MIB
OBJECT = MIB - 12


def store() -> tuple[Storage, Storage]:
    writer = Storage(MIB, 1, Ring(SIZE, create=True), BytesSerde)
    return writer, Storage.create_from_handle(writer.handle())


def a_ring_that_does_not_fit(_link: Link) -> None:
    before = used()
    error = exhausted(lambda: Ring(65 * MIB, create=True))
    assert error.need >= 65 * MIB
    with full(leaving=SIZE - MIB):
        exhausted(lambda: Ring(SIZE, create=True))
    assert (segments(), used()) == (set(), before)


def taken_in_pieces(_link: Link) -> None:
    before = used()
    writer, reader = store()
    rest = used() - before - PIECE  # table and headers
    assert rest < 10 * MIB
    for n in range(3 * SIZE // MIB):
        reader.get(*writer.put(n, bytes([n % 251]) * OBJECT))
        pieces = min(SIZE, -(-(n + 1) * MIB // PIECE) * PIECE)
        assert used() - before == pieces + rest
    reader.close()
    writer.close()
    assert used() == before


def taken_by_others(_link: Link) -> None:
    writer, reader = store()
    places = {}
    with full(leaving=2 * PIECE + 2 * MIB):
        for n in range(SIZE // MIB):
            try:
                places[n] = writer.put(n, bytes([n]) * OBJECT)
            except ShmExhausted:
                break
        # Three pieces, and then what there is for objects of the last one.
        assert 3 * PIECE // MIB <= len(places) <= 3 * PIECE // MIB + 2
        assert list(writer.key_index) == list(places)
        for _ in range(3):
            exhausted(lambda: writer.put("more", bytes(OBJECT)))
        for n, place in places.items():
            assert reader.get(*place) == bytes([n]) * OBJECT
    place = writer.put("more", b"later")
    assert reader.get(*place) == b"later"
    reader.close()
    writer.close()


def goes_round_earlier(_link: Link) -> None:
    """The ring ends where it cannot grow: the oldest objects are evicted as at its end."""
    writer, reader = store()
    with full(leaving=PIECE):
        for n in range(2 * SIZE // MIB):
            assert reader.get(*writer.put(n, bytes([n]) * OBJECT)) == bytes([n]) * OBJECT
        assert 2 <= len(writer.key_index) <= 2 * PIECE // MIB
        view = reader.view(*writer.put("kept", bytes(OBJECT)))
        with view:
            writer.clear()
            for n in range(SIZE // MIB):
                reader.get(*writer.put(n, bytes(OBJECT)))
        while writer.ring_buffer.free_buf(lambda *_: True):
            pass
        assert writer.ring_buffer.allocate_buf(OBJECT)
    reader.close()
    writer.close()


def read_where_there_is_no_space(_link: Link) -> None:
    writer, reader = store()
    writer.put("first", bytes(OBJECT))
    ring = reader.ring_buffer
    with full():
        before = used()
        for end in (ring, writer.ring_buffer):
            for at in (PIECE, SIZE - 64, SIZE // 2 + 1):
                with refuses(ValueError, match="there is no allocation"), end.access_buf(at):
                    pass
        # A header that says what is not there, right before the hole.
        writer.ring_buffer._segment.view(PIECE - 64, 8)[:] = b"\1\0\0\0" + MIB.to_bytes(4, "little")
        with refuses(ValueError, match="there is no allocation"), ring.access_buf(PIECE - 64):
            pass
        assert used() == before
    reader.close()
    writer.close()


@pytest.mark.parametrize(
    "role",
    [
        a_ring_that_does_not_fit,
        taken_in_pieces,
        taken_by_others,
        goes_round_earlier,
        read_where_there_is_no_space,
    ],
    ids=lambda role: role.__name__,
)
def test_space_of_a_ring_is_taken_in_pieces_or_refused(role: Callable[[Link], None]) -> None:
    """Taken in pieces, and refused by an error; what was stored before stays."""
    start(role, method="spawn", command=private_shm("64m")).result()
