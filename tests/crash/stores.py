"""A storage's writer or reader dies at every point: the others continue."""

from collections.abc import Callable
from typing import Any

from memlane import ObjectGone, ShmObjectStorageHandle
from tests.crash.survivors import leaving_nothing
from tests.support import Doomed, Hooks, Link, Passage, Remote, Spot, start
from tests.support.queues import refuses, segments
from tests.support.stores import BytesSerde, Place, Ring, Storage, fill, reading

Begin = Callable[..., Any]
OBJECTS = 4
SIZE = 256  # of the ring: so many objects of 64 bytes fit


def value_of(key: object) -> bytes:
    """The value stored under a key, which follows from the key."""
    return repr(key).encode().ljust(52, b".")


def new_storage() -> Storage:
    return Storage(64, 2, Ring(SIZE, create=True), BytesSerde, object())


def put(writer: Storage, *keys: object) -> list[tuple[object, Place]]:
    return [(key, writer.put(key, value_of(key))) for key in keys]


def storing(_link: Link, begin: Begin) -> None:
    """Role: a writer from start to end, beside two readers."""
    begin("create")
    writer = new_storage()
    begin("put", writer.handle())
    places = put(writer, *range(OBJECTS))
    begin("put, evicting", places)
    places = put(writer, "new")
    begin("get_cached", places)
    writer.get_cached("new")
    begin("get")
    assert writer.get(*places[0][1]) == value_of("new")
    begin("view")
    with writer.view(*places[0][1]) as view:
        assert bytes(view) == value_of("new")
        del view
    begin("put, full")
    with refuses(MemoryError):
        fill(writer, value_of(1))
        writer.put("more", value_of("more"))
    begin("clear")
    writer.clear()
    begin("put, over orphans")
    put(writer, *range(2))
    begin("close")
    writer.close()


def start_reader(handle: ShmObjectStorageHandle) -> Remote:
    return Remote(start(reading, handle))


def storer_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """Readers get every object that a put had returned, whole, or an error that it is gone."""
    with leaving_nothing():
        doomed = Doomed(hooks, spot, storing)
        readers: list[Remote] = []
        known: list[tuple[object, Place]] = []
        for stage, word in doomed.stages():
            if stage == "put":
                readers = [start_reader(word), start_reader(word)]
            elif word is not None:
                known += word
            if stage == "put, evicting":
                for reader in readers:
                    assert [reader.call("get", *place) for _, place in known] == [
                        value_of(key) for key, _ in known
                    ]
            doomed.go()
        seen = "nothing is left of it"
        if readers:
            found = [can_get(reader, key, place) for reader in readers for key, place in known]
            state = readers[0].call("statistics").writer_state
            assert state in (("closed",) if spot is None else ("closed", "dead")), state
            assert state == "dead" or spot is None or spot.stage == "close"
            if spot is not None and spot.stage == "put, evicting":
                assert any(found)
            seen = f"{state}: {sum(found)} of {len(found)} reads are right, the others refused"
        for reader in readers:
            reader.call("close")
            reader.leave()
    return doomed.passages, seen


def can_get(reader: Remote, key: object, place: Place) -> bool:
    try:
        assert reader.call("get", *place) == value_of(key)
    except ObjectGone:
        return False
    return True


def getting(_link: Link, begin: Begin, handle: ShmObjectStorageHandle, places: list[Place]) -> None:
    """Role: a reader from start to end, in the place of an earlier one."""
    begin("attach")
    reader = Storage.create_from_handle(handle)
    begin("get")
    first = reader.get(*places[0])
    begin("view")
    block = reader.view(*places[1])
    assert bytes(block.__enter__()) != first
    begin("end of the view")
    block.__exit__(None, None, None)
    begin("close")
    reader.close()


def getter_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """The writer evicts what only the dead had not read; the other reader misses nothing."""
    with leaving_nothing(), new_storage() as writer:
        Storage.create_from_handle(writer.handle()).close()
        places = [place for _, place in put(writer, *range(OBJECTS))]
        other = start_reader(writer.handle())
        doomed = Doomed(hooks, spot, getting, writer.handle(), places)
        for stage, _ in doomed.stages():
            if stage == "get":  # referenced beside it: now it owes these reads
                for key in range(OBJECTS):
                    writer.get_cached(key)
            doomed.go()
        state = writer.statistics().readers[0].state
        assert state in (("closed",) if spot is None else ("closed", "dead")), state
        for key in range(OBJECTS):
            for _ in range(writer.writer_flag[key]):
                assert other.call("get", *places[key]) == value_of(key)
        for turn in range(3 * OBJECTS):
            ((_, place),) = put(writer, f"turn {turn}")
            assert other.call("get", *place) == value_of(f"turn {turn}")
        successor = start_reader(writer.handle())
        ((_, place),) = put(writer, "for the successor")
        assert successor.call("get", *place) == value_of("for the successor")
        assert writer.ring_buffer.handle()[1] in segments()
        for remote in (other, successor):
            remote.leave()
        del writer
    return doomed.passages, f"{state}: its place is free, the writer and the other reader go on"


def coming_last(_link: Link, begin: Begin, handle: ShmObjectStorageHandle) -> None:
    """Role: the last reader of a storage, which removes its name."""
    begin("attach, last")
    reader = Storage.create_from_handle(handle)
    begin("close")
    reader.close()


def last_comer_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """The name is gone, or a successor can attach by it, and then it is gone."""
    with (
        leaving_nothing(),
        Storage(64, 2, Ring(SIZE, create=True), BytesSerde, unlink_when_complete=True) as writer,
    ):
        name = writer.ring_buffer.handle()[1]
        other = start_reader(writer.handle())
        doomed = Doomed(hooks, spot, coming_last, writer.handle())
        for stage, _ in doomed.stages():
            assert (name in segments()) == (stage == "attach, last")
            doomed.go()
        state = writer.statistics().readers[1].state
        seen = f"{state}: the name is gone"
        if name in segments():
            successor = start_reader(writer.handle())
            assert successor.call("statistics").rank == 1
            successor.leave()
            seen = f"{state}: a successor takes the place, and the name is gone"
        assert name not in segments()
        ((_, place),) = put(writer, "k")
        assert other.call("get", *place) == value_of("k")
        other.leave()
        del writer
    return doomed.passages, seen
