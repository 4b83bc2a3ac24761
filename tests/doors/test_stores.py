"""`SingleWriterShmObjectStorage.open`: the objects of a program that serves them by name."""

import os
import threading
from pathlib import Path

import pytest

from memlane import (
    InvalidArgument,
    MessageQueue,
    NameTaken,
    PickleMsgpackSerde,
    RankTaken,
    TimedOut,
    WrongRole,
)
from memlane.testing import kill
from tests.support import PATIENCE, Link, start
from tests.support.queues import segments
from tests.support.stores import BytesSerde, Ring, Storage


def serves(name: str = "images", readers: int = 2, **options: bool) -> Storage:
    ring = Ring(1 << 20, create=True)
    try:
        return Storage(1 << 16, readers, ring, name=name, serve=True, **options)
    except BaseException:
        ring.close()
        raise


def reads(link: Link) -> None:
    """Role: a reader that waits for the name, and gets what it is told to."""
    with Storage.open("images", timeout=PATIENCE) as storage:
        link.tell(storage.statistics().rank)
        while (place := link.hear()) is not None:
            link.tell(storage.get(*place))


@pytest.mark.parametrize("unlinks", [False, True])
def test_readers_find_a_storage_by_its_name(run: Path, unlinks: bool) -> None:
    """They may be started first; one that was killed is replaced without a word of the writer."""
    peers = [start(reads) for _ in range(2)]
    with serves(unlink_when_complete=unlinks) as writer:
        assert sorted(peer.hear() for peer in peers) == [0, 1]
        assert writer.ring_buffer.handle()[1] not in segments() or not unlinks
        with pytest.raises(RankTaken, match="'images' has no free place: reader 0"):
            Storage.open("images")
        for number in range(3):
            place = writer.put(number, {"number": number})
            for peer in peers:
                peer.tell(place)
                assert peer.hear() == {"number": number}
            kill(peers[0].pid)
            peers[0] = start(reads)
            peers[0].hear()
        for peer in peers:
            peer.tell(None)
            peer.join()
    assert not list(run.iterdir())


def test_a_storage_ends_with_its_name(run: Path) -> None:
    with serves() as writer:
        with pytest.raises(NameTaken, match=str(os.getpid())):
            serves()
        with Storage.open("images") as reader:
            assert reader.get(*writer.put("key", "value")) == "value"
    with pytest.raises(TimedOut, match="nobody serves 'images'"):
        Storage.open("images", timeout=0)
    with serves(), Storage.open("images"):
        pass


def test_a_storage_that_is_dropped_gives_its_name_up(run: Path) -> None:
    writer = serves()
    ring = writer.ring_buffer
    del writer
    ring.close()
    assert not list(run.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name == "memlane-door"]


def test_what_cannot_be_served_is_refused_before_anything_is_made(run: Path) -> None:
    with Ring(1 << 20, create=True) as ring:
        with pytest.raises(InvalidArgument, match="needs a name"):
            Storage(1000, 1, ring, serve=True)
        with Storage(1000, 1, ring, PickleMsgpackSerde, name="images", serve=True) as writer:
            handle = writer.handle()
            attached = Ring(*handle.ring_buffer_handle)
            with pytest.raises(WrongRole, match="Only the writer can serve"):
                Storage(1000, 1, attached, name="images", serve=True)
            attached.close()
    with (
        Ring(1 << 20, create=True) as ring,
        pytest.raises(InvalidArgument, match="BytesSerde is not registered"),
    ):
        Storage(1000, 1, ring, BytesSerde, name="images", serve=True)
    assert not run.exists() or not list(run.iterdir())


def test_a_name_of_another_kind_is_refused(run: Path) -> None:
    with serves("images"), MessageQueue(1, name="steps", serve=True):
        with pytest.raises(InvalidArgument, match=r"use MessageQueue\.open\(\)"):
            Storage.open("steps")
        with pytest.raises(InvalidArgument, match=r"use SingleWriterShmObjectStorage\.open\(\)"):
            MessageQueue.open("images")
