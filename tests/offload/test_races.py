"""Starts that race with starts and with ends: one region at a time, no old bytes.

Fails without the guards: two creators reserve the space twice, a process that leaves removes the
name of the next generation, a starter waits for a dead one.
"""

import fcntl
import os
import random
import struct
import time

import pytest

from memlane import ShmExhausted, TimedOut
from tests.support import (
    PATIENCE,
    Aside,
    Link,
    Peer,
    assert_in_time,
    private_shm,
    start,
    unshare_refusal,
)
from tests.support.queues import BOUND, refuses
from tests.support.regions import (
    PAGE,
    file_of,
    half_created,
    new_id,
    path_of,
    region_of,
    start_region,
)

RACES = int(os.environ.get("MEMLANE_SOAK_RACES", "15"))
RACERS = 8
MIB = 1 << 20
F_OFD_SETLK = 37
NAME_LOCK = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 1 << 62, 1, 0)
needs_unshare = pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())


def racing(link: Link, instance: str, rank: int, participants: int | None) -> None:
    """Role: starts on each cue, marks its cell, waits for the others, checks theirs."""
    while link.hear() is not None:
        with region_of(instance, rank, workers=RACERS, cell=PAGE, participants=participants) as one:
            assert bytes(one.mmap_obj[rank * PAGE : rank * PAGE + 2]) == b"\0\0"
            one.create_next_array(2)[:] = rank + 1
            link.tell(one._creator)
            link.hear()
            seen = [one.mmap_obj[other * PAGE] for other in range(RACERS)]
            assert seen == [other + 1 for other in range(RACERS)], seen
            link.tell(os.fstat(one.fd or 0).st_ino)
            link.hear()
        link.tell()


def races(_link: Link, rounds: int, participants: int | None) -> None:
    """All start at once, on what the last round or a dead run left."""
    instance = new_id()
    peers = [start(racing, instance, rank, participants) for rank in range(RACERS)]
    for number in range(rounds):
        if number % 3 == 1:
            path_of(instance).write_bytes(b"\xee" * (4 * RACERS * PAGE))
        for peer in peers:
            peer.tell("start")
        assert sum(peer.hear() for peer in peers) == 1, "one is the creator"
        assert path_of(instance).exists() == (participants is None)
        for peer in peers:
            peer.tell("look")
        assert len({peer.hear() for peer in peers}) == 1, "all have the same file"
        for peer in peers:
            peer.tell("leave")
        for peer in peers:
            peer.hear()
        assert not path_of(instance).exists()
    for peer in peers:
        peer.tell(None)
    for peer in peers:
        peer.result()


@pytest.mark.soak(seconds=60 + 2 * RACES)
@pytest.mark.parametrize("participants", [None, RACERS])
def test_one_of_several_creates_the_file(participants: int | None) -> None:
    start(races, RACES, participants).result(5 * PATIENCE + 2 * RACES)


def holding(link: Link, instance: str, rank: int) -> bool:
    region = region_of(instance, rank, blocks=16, workers=4, cell=MIB)
    link.tell()
    link.hear()
    is_creator = region._creator
    region.cleanup()
    return is_creator


def reserving_at_once(_link: Link) -> None:
    peers = [start(holding, "tight", rank) for rank in range(4)]
    for peer in peers:
        peer.hear()
    for peer in peers:
        peer.tell()
    assert sum(peer.result() for peer in peers) == 1


@needs_unshare
def test_space_is_reserved_once() -> None:
    """In a /dev/shm that holds one and a half regions, four that start at once get theirs."""
    start(reserving_at_once, method="spawn", command=private_shm("96m")).result()


def coming_and_going(link: Link, instance: str, seed: int, rounds: int) -> None:
    """Role: random pauses; its rank's cell is its own as long as it holds the region."""
    dice = random.Random(seed)
    for number in range(rounds):
        with region_of(instance, seed, workers=4) as region:
            cell = region.create_next_array(PAGE)
            assert not cell.any() or not region._creator
            # As long as somebody holds it the name is that of his file.
            assert path_of(instance).stat().st_ino == os.fstat(region.fd or 0).st_ino
            cell[:] = number % 100 + 1
            if dice.random() < 0.5:
                time.sleep(dice.random() * 0.002)  # leaves at any moment
            assert (cell == number % 100 + 1).all()
            cell[:] = 0
    link.tell()


def test_no_process_uses_a_file_that_another_removed() -> None:
    """Last leavers race with first starters: no process uses a file that another removed."""
    instance = new_id()
    peers = [start(coming_and_going, instance, seed, 60) for seed in range(4)]
    for peer in peers:
        peer.hear()
        peer.result()
    assert not path_of(instance).exists()


def test_ranks_may_start_in_threads_of_one_process() -> None:
    """Several ranks may start in threads; they wait for each other as processes do."""
    instance = new_id()
    for _ in range(5):
        starts = [Aside(region_of, instance, rank, workers=4) for rank in range(4)]
        regions = [one.result() for one in starts]
        assert sum(region._creator for region in regions) == 1
        ends = [Aside(region.cleanup) for region in regions]
        for end in ends:
            end.result()
        assert not path_of(instance).exists()


def start_half_created(instance: str) -> Peer:
    peer = start(half_created, instance)
    peer.hear()
    return peer


def test_the_creator_dies_before_it_reserves() -> None:
    """R3: the next starter takes over at once."""
    instance = new_id()
    start_half_created(instance).kill()
    began = time.monotonic()
    with region_of(instance) as region:
        assert_in_time(BOUND, began)
        assert region._creator


def test_the_creator_dies_while_others_wait() -> None:
    """One of them takes over at once, and the other waits for that one."""
    instance = new_id()
    creator = start_half_created(instance)
    waiters = [Aside(region_of, instance, rank) for rank in (0, 1)]
    for waiter in waiters:
        waiter.until_blocked()
    killed = creator.kill()
    regions = [waiter.result() for waiter in waiters]
    assert_in_time(BOUND, killed, max(waiter.ended for waiter in waiters))
    assert os.path.samestat(*(os.fstat(region.fd or 0) for region in regions))
    for region in regions:
        region.cleanup()


def test_the_creator_fails_in_the_middle() -> None:
    """The process that takes over has the room, also while the creator is stopped and holds the
    file."""
    instance = new_id()
    first, second = file_of(instance), file_of(instance)
    assert (first.enter(1), second.enter(1)) == ("created", "joined")
    assert first.await_space(1) == "build"
    os.posix_fallocate(first.fd, 0, 3 * PAGE)
    first.leave(1)
    assert path_of(instance).stat().st_blocks == 0
    assert second.await_space(1) == "build"
    second.leave(1)


def test_who_takes_over_what_is_complete_fails() -> None:
    """The process that completed it has died, and another may use it: no byte is lost."""
    instance = new_id()
    creator = start_region(instance)
    first, second = file_of(instance), file_of(instance)
    assert first.enter(1) == second.enter(1) == "joined"
    path_of(instance).write_bytes(b"\7" * 8 * PAGE)
    creator.peer.kill()
    assert first.await_space(1) == "build"
    first.leave(1)
    assert path_of(instance).read_bytes() == b"\7" * 8 * PAGE
    assert second.await_space(1) == "build"
    second.leave(1)
    assert not path_of(instance).exists()


def test_the_creator_fails_while_others_wait() -> None:
    """R8: a waiting peer takes over at once."""
    instance = new_id()
    creator = start_half_created(instance)
    waiter = Aside(region_of, instance, 1).until_blocked()
    creator.tell("give up")
    waiter.result().cleanup()
    creator.result()


def too_large(_link: Link) -> list[str]:
    creator = start_half_created("big")
    waiters = [Aside(region_of, "big").until_blocked() for _ in range(2)]
    names: list[str] = []
    with open("/dev/shm/filler", "wb") as filler:
        facts = os.statvfs("/dev/shm")
        os.posix_fallocate(filler.fileno(), 0, facts.f_bavail * facts.f_frsize)
        creator.tell("give up")
        for waiter in waiters:
            with pytest.raises(MemoryError) as caught:
                waiter.result()
            names.append(caught.type.__name__)
    os.unlink("/dev/shm/filler")
    creator.result()
    assert os.listdir("/dev/shm") == []
    return names


@needs_unshare
def test_who_takes_over_fails_with_its_own_cause() -> None:
    """R8: each waiter has tried, and reports what it needed."""
    names = start(too_large, method="spawn", command=private_shm("1m")).result()
    assert names == [ShmExhausted.__name__] * 2


def test_waiting_for_a_stopped_creator_ends_at_the_timeout() -> None:
    """It ends at the timeout and names the creator, which loses nothing and continues later."""
    instance = new_id()
    creator = start_half_created(instance)
    creator.stop()
    with refuses(TimeoutError, match=str(creator.pid)) as caught:
        region_of(instance, timeout=0.3)
    assert isinstance(caught.value, TimedOut)
    assert path_of(instance).exists()
    creator.resume()
    creator.tell("give up")
    creator.result()
    assert not path_of(instance).exists()


def test_another_geometry_does_not_wait() -> None:
    """A region that is not complete yet already has its geometry."""
    instance = new_id()
    creator = start_half_created(instance)
    creator.stop()
    with refuses(ValueError, match="4 blocks of 2 workers"):
        region_of(instance, blocks=5)
    creator.resume()
    creator.tell("give up")
    creator.result()


def holding_the_name(link: Link, instance: str) -> None:
    """Role: holds the name lock, as a process that joins or leaves does for a moment."""
    with open(path_of(instance), "r+b") as file:
        fcntl.fcntl(file, F_OFD_SETLK, NAME_LOCK)
        link.tell()
        link.hear()


def test_somebody_was_stopped_while_joining(caplog: pytest.LogCaptureFixture) -> None:
    """A start gives up at its timeout; a cleanup after a second, with a WARNING."""
    instance = new_id()
    region = region_of(instance)
    stopped = start(holding_the_name, instance)
    stopped.hear()
    with refuses(TimeoutError, match="stopped"):
        region_of(instance, 1, timeout=0.2)
    region.cleanup()
    assert "stopped" in caplog.text
    assert path_of(instance).exists()
    waiting = Aside(region_of, instance)
    stopped.kill()
    waiting.result().cleanup()
    assert not path_of(instance).exists()


def test_a_child_that_is_forked_while_a_start_waits_does_not_have_the_file() -> None:
    """A file that is open without locks is another's: starts would wait until the child ends."""
    instance = new_id()
    region = region_of(instance)

    def files_of_a_child() -> int:
        if (child := os.fork()) == 0:
            names = os.listdir("/proc/self/fd")
            files = [os.path.realpath(f"/proc/self/fd/{name}") for name in names]
            os._exit(files.count(str(path_of(instance))))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    before = files_of_a_child()
    stopped = start(holding_the_name, instance)
    stopped.hear()
    joining = Aside(region_of, instance, 1).until_blocked()
    assert files_of_a_child() == before
    stopped.kill()
    joining.result().cleanup()
    region.cleanup()


def test_leaving_a_region_without_a_name_waits_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """There is nothing to remove, so a process stopped in the middle is not waited for."""
    region = region_of(new_id(), participants=1)
    with open(f"/proc/self/fd/{region.fd}", "r+b") as file:
        fcntl.fcntl(file, F_OFD_SETLK, NAME_LOCK)
        region.cleanup()
    assert "stopped" not in caplog.text


def test_wait_for_file_size_returns_once_it_is_reached(tmp_path: object) -> None:
    """The documented helper returns when the file has that size, else raises TimeoutError."""
    from memlane.offload.region import _wait_for_file_size

    path = path_of(new_id())
    with open(path, "w+b") as file:
        os.ftruncate(file.fileno(), 10)
        _wait_for_file_size(file.fileno(), 10)
        with refuses(TimeoutError, match="11"):
            _wait_for_file_size(file.fileno(), 11, 0.05)
        waiting = Aside(_wait_for_file_size, file.fileno(), 20, PATIENCE).until_blocked()
        began = time.monotonic()
        os.ftruncate(file.fileno(), 20)
        waiting.result()
        assert_in_time(BOUND, began, waiting.ended)
    path.unlink()
