"""The sweep removes what dead processes left of half-started queues, and nothing that is in use.

Fails without the guard: sweeping by age or by pid removes live segments, and without a sweep
/dev/shm fills up.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from memlane import MessageQueue, ShmRingBuffer
from tests.support import Link, Peer, own_pid_namespace, start, unshare_refusal
from tests.support.queues import SHM, name_in, path_of, segments, start_reader, start_writer, sweep
from tests.support.stores import Ring


def create_queue() -> None:
    MessageQueue(1, 1, None, 64, 2).close()


creations = pytest.mark.parametrize("create", [sweep, create_queue])


def hold_ring(link: Link) -> None:
    ring = ShmRingBuffer(1, 64, 2)
    link.tell(ring.shared_memory.name)
    link.hear()
    ring.close()


def hold_attached_ring(link: Link, handle: tuple[int, int, int, str]) -> None:
    ring = ShmRingBuffer(*handle)
    link.tell()
    link.hear()
    ring.close()


@creations
def test_a_queue_left_by_its_dead_creator_is_swept(create: Callable[[], None], method: str) -> None:
    """A queue that was never ready is swept when its creator is dead."""
    before = segments()
    writer = start_writer(1, method)
    create()
    assert len(segments() - before) == 1
    writer.peer.kill()
    create()
    assert segments() == before


@creations
def test_a_ring_left_by_its_dead_creator_is_swept(create: Callable[[], None], method: str) -> None:
    """A ring that is used alone is swept when its creator is dead."""
    creator = start(hold_ring, method=method)
    path = SHM / creator.hear()
    create()
    assert path.exists()
    creator.kill()
    create()
    assert not path.exists()


@creations
def test_a_segment_that_a_reader_holds_is_spared(create: Callable[[], None], method: str) -> None:
    """The creator is dead, but somebody attached lives: spared as long as that one lives."""
    writer = start_writer(2, method)
    reader = start_reader(writer.greeting, 1, method)
    path = SHM / name_in(writer.greeting)
    writer.peer.kill()
    create()
    assert path.exists()
    reader.peer.kill()
    create()
    assert not path.exists()


@creations
def test_a_segment_held_by_an_attached_ring_stays(create: Callable[[], None], method: str) -> None:
    """The same for a ring that is used alone."""
    creator = start(hold_ring, method=method)
    path = SHM / creator.hear()
    user = start(hold_attached_ring, (1, 64, 2, path.name), method=method)
    user.hear()
    creator.kill()
    create()
    assert path.exists()
    user.kill()
    create()
    assert not path.exists()


@creations
def test_held_by_a_stopped_process(create: Callable[[], None]) -> None:
    """Stopped is not dead."""
    writer = start_writer()
    path = SHM / name_in(writer.greeting)
    writer.peer.stop()
    create()
    assert path.exists()
    writer.peer.resume()
    writer.call("close")
    assert not path.exists()


@pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
def test_a_segment_held_in_another_pid_namespace_stays() -> None:
    """A process whose pid means nothing here is alive nevertheless, until it is not."""
    creator: Peer = start(hold_ring, method="spawn", command=own_pid_namespace())
    path = SHM / creator.hear()
    sweep()
    assert path.exists()
    ShmRingBuffer(1, 64, 2, name=path.name).close()
    creator.tell("close it")
    creator.result()
    assert not path.exists()


def sweep_over_there(_link: Link) -> int:
    sweep()
    return os.getpid()


@pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
def test_a_sweep_from_another_pid_namespace_spares_the_living() -> None:
    """A creation over there spares what lives here, and sweeps what is dead here."""
    dead = start_writer()
    dead.peer.kill()
    left = SHM / name_in(dead.greeting)
    with MessageQueue(1, 1, None, 64, 2) as writer:
        peer = start(sweep_over_there, method="spawn", command=own_pid_namespace())
        assert peer.result() == 1
        assert path_of(writer).exists()
        assert not left.exists()


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """Links are not followed, and other names are not touched."""
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    link = SHM / "memlane-00000000000000000000000000000001"
    other = SHM / "not-memlane-00000000000000000000000000000002"
    fifo = SHM / "memlane-00000000000000000000000000000004"
    directory = SHM / "memlane-00000000000000000000000000000005"
    try:
        link.symlink_to(target)
        other.write_bytes(b"other")
        os.mkfifo(fifo)
        directory.mkdir()
        sweep()
        assert target.read_bytes() == b"precious"
        assert other.read_bytes() == b"other"
        assert directory.is_dir()
    finally:
        for path in (link, other, fifo):
            path.unlink(missing_ok=True)
        directory.rmdir()


def test_a_name_of_something_else_is_left_alone() -> None:
    """Another user may have made the link, where the kernel allows it: a file that is no segment
    keeps all its names."""
    precious = SHM / f"precious-{os.getpid()}"
    link = SHM / "memlane-00000000000000000000000000000006"
    try:
        precious.write_bytes(b"precious")
        link.hardlink_to(precious)
        sweep()
        assert precious.read_bytes() == b"precious"
        assert link.exists()
    finally:
        for path in (precious, link):
            path.unlink(missing_ok=True)


@pytest.mark.root
def test_segment_of_another_user_is_left_alone() -> None:
    dead = start_writer()
    dead.peer.kill()
    theirs = SHM / name_in(dead.greeting)
    os.chown(theirs, 65534, 65534)
    try:
        sweep()
        assert theirs.exists()
    finally:
        theirs.unlink()


def come_and_go(link: Link, rounds: int) -> int:
    link.tell()
    link.hear()
    for number in range(rounds):
        with (
            MessageQueue(1, 1, None, 64, 2) as writer,
            MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
        ):
            writer.enqueue(number)
            assert reader.dequeue(timeout=0) == number
        with ShmRingBuffer(1, 64, 2) as ring:
            ShmRingBuffer(*ring.handle()).close()
    return rounds


def test_creators_that_sweep_at_once_spare_each_other() -> None:
    """Creations that sweep at the same time never take each other's segments."""
    before = segments()
    peers = [start(come_and_go, 150) for _ in range(4)]
    for peer in peers:
        peer.hear()
    for peer in peers:
        peer.tell("go")
    assert [peer.result() for peer in peers] == [150] * 4
    assert segments() == before


def hold_named_ring(link: Link, name: str) -> None:
    ring = Ring(1 << 14, name, create=True)
    link.tell()
    link.hear()
    ring.close()


@creations
def test_left_under_a_name_of_the_callers_own(create: Callable[[], None]) -> None:
    """Every process that creates a segment sweeps it, not only one that wants that name again."""
    before = set(SHM.iterdir())
    name = f"own-{os.getpid()}"
    creator = start(hold_named_ring, name)
    creator.hear()
    create()
    assert (SHM / name).exists()
    creator.kill()
    assert (SHM / name).exists()
    create()
    assert set(SHM.iterdir()) == before


def test_name_of_the_callers_own_that_a_reader_holds() -> None:
    """It stays as long as anybody is attached; the last to leave removes it."""
    before = set(SHM.iterdir())
    name = f"own-{os.getpid()}"
    creator = start(hold_named_ring, name)
    creator.hear()
    attached = Ring(1 << 14, name)
    creator.kill()
    sweep()
    assert (SHM / name).exists()
    attached.close()
    assert set(SHM.iterdir()) == before


def test_name_of_the_callers_own_leaves_nothing() -> None:
    before = set(SHM.iterdir())
    Ring(1 << 14, f"own-{os.getpid()}", create=True).close()
    assert set(SHM.iterdir()) == before
