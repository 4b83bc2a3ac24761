"""Rings of more than 2 GiB: positions and addresses exceed 2**31 and 2**32; sizes do not.

Takes 2.5 GiB of memory, so it runs only if ``MEMLANE_SOAK_LARGE`` is set (`make soak`).
"""

import os

import pytest

from tests.support import PATIENCE, Link, private_shm, start, unshare_refusal
from tests.support.missing import needed
from tests.support.queues import refuses
from tests.support.stores import BytesSerde, Ring, Storage

pytestmark = [
    needed("time", "MEMLANE_SOAK_LARGE" in os.environ),
    pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal()),
    pytest.mark.soak(seconds=300),
]
SIZE = (5 << 29) + 64  # 2.5 GiB
PIECE = 150 << 20


def play(_link: Link) -> list[int]:
    """Role: two laps around, with objects of 150 MiB and small ones between; their addresses."""
    addresses = []
    limit = 1 << 32
    with (
        Storage(limit, 1, Ring(SIZE, create=True), BytesSerde) as writer,
        Storage.create_from_handle(writer.handle()) as reader,
    ):
        with refuses(ValueError, match=r"below 2\*\*31 bytes"):
            writer.ring_buffer.allocate_buf(2**31 - 8)
        address, _ = writer.ring_buffer.allocate_buf(2**31 - 9)
        assert writer.ring_buffer.free_buf(lambda *_: True) == [0]
        for number in range(45):
            large = writer.put(f"large {number}", bytes([number]) * PIECE)
            small = writer.put(f"small {number}", b"%d" % number)
            with reader.view(*large) as view:
                assert len(view) == PIECE
                assert view[0] == view[PIECE // 2] == view[-1] == number
            del view
            assert reader.get(*small) == b"%d" % number
            addresses.append(large[0])
            with refuses(ValueError):
                reader.get(large[0] % 2**32 + 2**31, large[1])
    return [address, *addresses]


def test_a_ring_of_more_than_2_gib_stores_every_object() -> None:
    """Every object comes through, wherever it lies; an allocation of 2 GiB is refused clearly."""
    addresses = start(play, method="spawn", command=private_shm("3g")).result(5 * PATIENCE)
    print(f"\naddresses up to {max(addresses)}")
    assert max(addresses) > 2**32
    assert len(set(addresses)) > 10
