"""SL: any address and id, however close to valid ones: the object that was put there, or an error.

Fails without the guard: an address and an id that are checked only against the ring's own bytes.
"""

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlane import ObjectGone
from tests.support.stores import BytesSerde, Place, store_of

pytestmark = pytest.mark.property

SIZE = 2048
IDS = st.integers(0, 40) | st.integers(-(2**33), 2**33)
ADDRESSES = st.integers(0, 2 * SIZE) | st.integers(-(2**65), 2**65)


class Watched(BytesSerde):
    """Records what it was asked to decode."""

    decoded: list[bytes] = []  # noqa: RUF012

    def deserialize(self, data: memoryview) -> Any:
        self.decoded.append(bytes(data))
        return bytes(data)

    deserialize_view = deserialize


# Bytes that look like an allocation: id, size, read count, and a value.
FAKES = st.builds(
    lambda number, size, rest: struct.pack("<iii", number, size, 0) + rest,
    st.integers(0, 40),
    st.integers(8, 128),
    st.binary(max_size=20),
)


@settings(max_examples=40)
@given(st.data())
def test_only_what_is_stored_at_a_reference_is_decoded(data: st.DataObject) -> None:
    """Only what is stored under that id at that address is ever decoded."""
    Watched.decoded.clear()
    stored: dict[Place, bytes] = {}
    with store_of(1, size=SIZE, max_object_size=512, serde=Watched) as (writer, (reader,)):
        for key in range(data.draw(st.integers(1, 40), "puts")):
            value = b"".join(data.draw(st.lists(FAKES, min_size=1, max_size=6), "value"))
            place = writer.put(key, value)
            stored[place] = value
            assert reader.get(*place) == value
            stored = {
                place: value for place, value in stored.items() if place[1] in writer.id_index
            }
        Watched.decoded.clear()
        places = st.sampled_from(sorted(stored))
        for _ in range(20):
            address = data.draw(ADDRESSES | places.map(lambda place: place[0]), "address")
            number = data.draw(IDS | places.map(lambda place: place[1]), "id")
            for end in (reader, writer):
                for read in (end.get, lambda *at, end=end: end.view(*at).__enter__()):
                    before = len(Watched.decoded)
                    try:
                        value = read(address, number)
                    except ObjectGone:
                        assert (address, number) not in stored
                        assert len(Watched.decoded) == before
                    else:
                        assert value == stored[address, number]
