"""A reader is stopped for long, in the middle of reading, and continues: it is late, never dead.

``MEMLANE_SOAK_SECONDS`` is how long it stops (default 1.5, longer than a death may go unnoticed).
"""

import os
import time

import pytest

from memlane import ShmObjectStorageHandle
from tests.support import PATIENCE, Link, start
from tests.support.queues import BOUND, refuses
from tests.support.stores import Paced, Storage, start_store_reader, store_of

SECONDS = float(os.environ.get("MEMLANE_SOAK_SECONDS", "1.5"))
pytestmark = pytest.mark.soak(seconds=int(60 + 3 * SECONDS))
VALUE = bytes(range(52))
assert SECONDS > BOUND


class Halting(Paced):
    """An object that stops its process halfway; the test continues it before it runs again."""

    patience = SECONDS + PATIENCE


def reading(link: Link, handle: ShmObjectStorageHandle, place: tuple[int, int], how: str) -> bytes:
    """Role: is stopped in the middle of a get, or of a view."""
    with Storage.create_from_handle(handle) as reader:
        if how == "get":
            Halting.link = link
            value: bytes = reader.get(*place)
            Halting.link = None
        else:
            with reader.view(*place) as view:
                first = bytes(view[:26])
                link.tell("halfway")
                link.hear(Halting.patience)
                value = first + bytes(view[26:])
                del view
        link.tell(value)
        for _ in range(10):
            reader.get(*link.hear())
            link.tell()
    return value


@pytest.mark.parametrize("how", ["get", "view"])
def test_a_reader_that_stops_in_the_middle(how: str) -> None:
    """Its object stays as it was; it is named as stopped; then it reads on, and all goes on."""
    with store_of(2, size=640, max_object_size=64, attached=0, serde=Halting) as (writer, _):
        place = writer.put("k", VALUE)
        slow = start(reading, writer.handle(), place, how)
        assert slow.hear() == "halfway"
        other = start_store_reader(writer)
        assert other.call("get", *place) == VALUE
        slow.stop()
        slow.tell()  # it goes on as soon as it runs
        until_when = time.monotonic() + SECONDS
        refusals = 0
        number = 0
        while refusals <= 3 or time.monotonic() < until_when:
            if number < 9:
                other.call("get", *writer.put(number, b"%d" % number))
                number += 1
                continue
            with refuses(MemoryError, match=rf"reader 0 .pid {slow.pid}\b[^,]*, stopped"):
                writer.put("more", b"x")
            refusals += 1
            time.sleep(SECONDS / 20)  # nothing changes
        assert writer.is_cached("k")
        with writer.ring_buffer.access_buf(place[0]) as (data, _):
            assert bytes(data[4:56]) == VALUE
        seen = writer.statistics().readers[0]
        assert (seen.state, seen.views) == ("stopped", 1)
        assert seen.views_since is not None
        assert time.monotonic() - seen.views_since > SECONDS * 0.9
        slow.resume()
        assert slow.hear() == VALUE
        with refuses(MemoryError, match=rf"reader 0 .pid {slow.pid}\b[^,]*, running"):
            for turn in range(20):  # it owes the reads of what came meanwhile
                writer.put(("late", turn), b"x")
        for number in range(9):
            slow.tell(writer.key_index[number])
            slow.hear()
        newest = writer.put("new", VALUE)
        slow.tell(newest)
        slow.hear()
        assert slow.result() == VALUE
        other.leave()
