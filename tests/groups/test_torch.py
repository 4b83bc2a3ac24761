"""Groups of torch.distributed with gloo, in real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import enumerate as threads_of
from typing import Any

import pytest

import lab
from memlane import GroupFailed, MessageQueue, RankMissing, in_the_same_node_as
from memlane._base.deadline import Deadline
from memlane.groups import tcp, torch_store
from tests.support import PATIENCE, Aside, Link, Peer, assert_in_time, given_time, start, until
from tests.support.groups import SMALL, errors_of, on_ranks, queues_over
from tests.support.missing import package
from tests.support.queues import refuses, segments

dist = package("torch.distributed")
SIZE = 3
MEMBERS = [2, 1]  # of the sub-group, by their ranks in the world, in an order of its own


def exchange(group: Any, rank: int, size: int) -> list[Any]:
    """Each rank writes once; returns what this rank reads from the others."""
    read = []
    for writer in range(size):
        with MessageQueue.create_from_process_group(
            group, *SMALL, writer, timeout=PATIENCE
        ) as queue:
            if rank == writer:
                queue.enqueue({"from": rank})
                read.append(None)
            else:
                read.append(queue.dequeue(PATIENCE))
    return read


def rank_of_torch(link: Link, rank: int) -> dict[str, Any]:
    import torch.distributed as dist

    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        link.tell(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", link.hear(2 * PATIENCE), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    sub_group = dist.new_group(MEMBERS, backend="gloo", sort_ranks=False)
    in_the_same_node_as(dist.group.WORLD, timeout=PATIENCE)
    if rank in MEMBERS:
        in_the_same_node_as(sub_group, timeout=PATIENCE)
    threads = len(os.listdir("/proc/self/task"))
    seen: dict[str, Any] = {"world": exchange(dist.group.WORLD, rank, SIZE)}
    seen["nodes"] = in_the_same_node_as(dist.group.WORLD, 2, timeout=PATIENCE)
    if rank in MEMBERS:
        seen["sub"] = exchange(sub_group, dist.get_rank(sub_group), len(MEMBERS))
        seen["sub_nodes"] = in_the_same_node_as(sub_group, 0, timeout=PATIENCE)
    else:
        with pytest.raises(TypeError, match="not a group that this process is in"):
            in_the_same_node_as(sub_group, 0)
    dist.barrier()
    # A thread that was joined stays in /proc for as long as the kernel takes to end it.
    until(lambda: len(os.listdir("/proc/self/task")) <= threads, "later calls leave no thread")
    if rank != 1:  # both within the timeout, or each would miss the other, too
        with pytest.raises(RankMissing) as caught:
            MessageQueue.create_from_process_group(dist.group.WORLD, *SMALL, timeout=10.0)
        seen["missing"] = caught.value.ranks
    dist.barrier()  # the group itself has not suffered
    dist.destroy_process_group()
    return seen


@pytest.mark.slow
def test_gloo_groups_carry_queues_and_name_missing_ranks() -> None:
    """The world, and a sub-group with other ranks; a rank that does not come is named."""
    before = segments()
    peers = [start(rank_of_torch, rank) for rank in range(SIZE)]
    port = peers[0].hear(2 * PATIENCE)  # importing torch takes its time where much else runs
    for peer in peers[1:]:
        peer.tell(port)
    seen, errors = [], []
    for peer in peers:  # of one that fails all others say no more than that it is gone
        try:
            seen.append(peer.result(2 * PATIENCE))
        except Exception as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup("of the ranks", errors)
    for rank in range(SIZE):
        read = [None if writer == rank else {"from": writer} for writer in range(SIZE)]
        assert seen[rank]["world"] == read
        assert seen[rank]["nodes"] == [True] * SIZE
    for place, rank in enumerate(MEMBERS):
        assert seen[rank]["sub"] == [None if w == place else {"from": w} for w in range(2)]
        assert seen[rank]["sub_nodes"] == [True, True]
    assert seen[0]["missing"] == seen[2]["missing"] == (1,)
    assert segments() == before


def test_a_file_store_reports_timeouts(tmp_path: Path) -> None:
    """Stores differ in how they wait, and in how they report a timeout."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    groups = [dist.ProcessGroup(store, rank, 2) for rank in range(2)]
    with queues_over(groups, 1) as queues:
        queues[1].enqueue(1)
        assert queues[0].dequeue(PATIENCE) == 1

    def is_named(seconds: float) -> None:
        with refuses(RankMissing, match="waiting for rank 1"):
            MessageQueue.create_from_process_group(groups[0], *SMALL, timeout=seconds)

    given_time(is_named, 0.5)


def test_store_that_is_gone() -> None:
    """An error that says what failed, instead of torch's own."""

    class Gone(dist.Store):  # type: ignore[misc, name-defined]
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("connection was closed")

    gone = Gone()
    group = dist.ProcessGroup(gone, 0, 2)
    with refuses(GroupFailed, match="does not answer: connection was closed"):
        in_the_same_node_as(group, 0, timeout=PATIENCE)


def test_groups_with_a_store_name_missing_ranks() -> None:
    """Groups that are not torch's but have one of its stores name missing ranks, too."""

    class Group:
        def __init__(self, rank: int) -> None:
            self.rank, self.world_size, self.store = rank, 2, store

    store = dist.HashStore()
    groups = [Group(rank) for rank in range(2)]
    with queues_over(groups) as queues:
        queues[0].enqueue(1)
        assert queues[1].dequeue(PATIENCE) == 1

    def is_named(seconds: float) -> None:
        with refuses(RankMissing, match="waiting for rank 0"):
            MessageQueue.create_from_process_group(groups[1], *SMALL, timeout=seconds)

    given_time(is_named, 0.2)


def keeping_a_store(link: Link) -> None:
    """Role: the process that a group's store lives in."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    link.tell(store.port)
    link.hear()


@pytest.fixture
def keeper() -> Iterator[tuple[Peer, list[Any]]]:
    """That process, and two ranks that reach it."""
    peer = start(keeping_a_store)
    port = peer.hear(2 * PATIENCE)
    groups = [
        dist.ProcessGroup(dist.TCPStore("127.0.0.1", port, is_master=False), rank, 2)
        for rank in range(2)
    ]
    yield peer, groups
    groups.clear()  # pytest keeps the list for longer
    peer.resume()
    peer.tell("end")
    peer.result()


def test_store_that_is_stopped(keeper: tuple[Peer, list[Any]]) -> None:
    """Nobody can give up an operation of torch's, but the call ends at its deadline; the next one
    begins anew. Once the ranks have met, they need the store no more.

    Fails without the guard: it took as long as the process was stopped.
    """
    peer, groups = keeper
    peer.stop()
    begun = time.monotonic()
    errors = errors_of(in_the_same_node_as, groups, 0, timeout=1.0)
    assert time.monotonic() - begun >= 1.0
    assert_in_time(1.0 + 2.0, begun)
    assert all(isinstance(error, RankMissing) for error in errors), errors
    assert all("the store of the process group" in str(error) for error in errors)
    peer.resume()
    assert on_ranks(in_the_same_node_as, groups, 0, timeout=PATIENCE) == [[True, True]] * 2
    peer.stop()
    assert on_ranks(in_the_same_node_as, groups, 0, timeout=PATIENCE) == [[True, True]] * 2


def test_store_that_is_stopped_for_a_while(keeper: tuple[Peer, list[Any]]) -> None:
    """It is waited for."""
    peer, groups = keeper
    peer.stop()
    calls = [Aside(in_the_same_node_as, group, 0, timeout=PATIENCE) for group in groups]
    for call in calls:
        call.until_blocked()
    peer.resume()
    assert [call.result() for call in calls] == [[True, True]] * 2


def meet(store: Any, rank: int) -> Any:
    return torch_store._meet(store, rank, 2, Deadline(PATIENCE))


def they_meet(store: Any) -> None:
    """Both ranks come to one board."""
    parts = [meet(store, rank) for rank in range(2)]
    try:
        assert len({part.port for part in parts}) == 1
    finally:
        for part in reversed(parts):
            part.close()


@pytest.mark.parametrize(
    ("has_time", "text"), [(False, "timed out after .* waiting for rank 0"), (True, "has died")]
)
def test_a_board_that_has_not_answered_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, has_time: bool, text: str
) -> None:
    """Nobody calls it dead for want of time.

    Fails without the guard: the rank counted the board as met, and founded one of its own.
    """
    store = dist.HashStore()
    kept, deadline = meet(store, 0), Deadline(PATIENCE)

    def silent(addresses: Any, _port: int, _seconds: float) -> Any:
        if not has_time:
            deadline.end = 0.0
        return addresses[0], None

    with monkeypatch.context() as patch:
        patch.setattr(torch_store, "answering", silent)
        with refuses(RankMissing, match=text):
            torch_store._meet(store, 1, 2, deadline)
    late = meet(store, 1)
    assert late.port == kept.port
    late.close()
    kept.close()


def test_a_board_that_was_closed_is_passed_by_all() -> None:
    """It is named once by a rank that has not met it; then the ranks meet at the next one."""
    store = dist.HashStore()
    meet(store, 0).close()
    with refuses(RankMissing, match=f"rank 0 .pid {os.getpid()}., which keeps the group's board"):
        meet(store, 1)
    they_meet(store)


def test_a_part_without_a_descriptor_offers_no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    """No board is offered then. Fails without the guard: the offer of a closed one stayed."""

    def none() -> Any:
        raise OSError("no descriptor")

    store = dist.HashStore()
    with monkeypatch.context() as patch:
        patch.setattr(tcp, "new_context", none)
        with pytest.raises(OSError, match="no descriptor"):
            meet(store, 0)
    they_meet(store)


@pytest.mark.parametrize("when", ["before an answer", "after an answer"])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_meet_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, rank: int, when: str
) -> None:
    """At whatever request to the store a signal handler raises.

    Fails without the guard: the offer of a board that was closed stayed in the store.
    """
    place = 0
    while True:
        left = place = place + 1

        class Interrupted(SimpleQueue[Any]):
            def get(self, block: bool = True, timeout: float | None = None) -> Any:
                nonlocal left
                left -= 1
                if left == 0 and when == "before an answer":
                    raise KeyboardInterrupt
                answer = super().get(block, timeout)
                if left == 0:
                    raise KeyboardInterrupt
                return answer

        store = dist.HashStore()
        kept = [meet(store, 0)] if rank == 1 else []
        with monkeypatch.context() as patch:
            patch.setattr(torch_store, "SimpleQueue", Interrupted)
            with suppress(KeyboardInterrupt):
                kept.append(meet(store, rank))
        until(lambda: all(each.name != "memlane-store" for each in threads_of()))
        if left > 0:
            break
        if rank == 1:
            kept.append(meet(store, 1))
            assert kept[0].port == kept[1].port
        else:
            they_meet(store)
        while kept:
            kept.pop().close()
    while kept:
        kept.pop().close()
    assert place > 4


def dying_in_torch(link: Link, port: int, when: str) -> None:
    """Role: rank 2, which is killed in its second call, or before it."""
    from memlane.broadcast import grouping

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group = dist.ProcessGroup(store, 2, 3)
    in_the_same_node_as(group, 2, timeout=PATIENCE)

    def die(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "between two calls":
        die()
    grouping.ShmRingBuffer = die  # type: ignore[assignment, misc]
    in_the_same_node_as(group, 2, timeout=PATIENCE)


@pytest.mark.parametrize("when", ["between two calls", "in a call"])
def test_a_rank_that_dies_is_named_by_all_others(when: str) -> None:
    """Within a second, and as dead, by the end of its connection to the rank that came first.

    Fails without the guard if nobody shares its host: it was missing, after the whole timeout.
    """
    keeper = start(keeping_a_store)
    port = keeper.hear(2 * PATIENCE)
    groups = [
        dist.ProcessGroup(dist.TCPStore("127.0.0.1", port, is_master=False), rank, 3)
        for rank in range(2)
    ]
    calls = [Aside(in_the_same_node_as, group, 2, timeout=2 * PATIENCE) for group in groups]
    calls[0].until_blocked()  # one of these keeps the board
    peer = start(dying_in_torch, port, when)
    assert [call.result() for call in calls] == [[True] * 3] * 2
    calls = [Aside(in_the_same_node_as, group, 2, timeout=PATIENCE) for group in groups]
    assert peer.join() == -signal.SIGKILL
    died = time.monotonic()
    for waiting in calls:
        text = rf"rank 2 of a group of 3 has died .pid {peer.pid}.: its connection"
        with refuses(RankMissing, match=text):
            waiting.result()
        assert_in_time(1.0, died, waiting.ended)
    keeper.tell("end")
    keeper.result()


def keeping_a_board(link: Link, port: int) -> None:
    """Role: rank 1, which comes first, and is then killed."""
    group = dist.ProcessGroup(dist.TCPStore("127.0.0.1", port, is_master=False), 1, 3)
    call = Aside(in_the_same_node_as, group, 0, timeout=PATIENCE)
    until(lambda: torch_store._parts, "it keeps the board")
    link.tell("there")
    call.result()
    link.hear()


def test_the_rank_that_came_first_dies() -> None:
    """The others name it within a second, and so does one that comes later."""
    keeper = start(keeping_a_store)
    port = keeper.hear(2 * PATIENCE)
    groups = [
        dist.ProcessGroup(dist.TCPStore("127.0.0.1", port, is_master=False), rank, 3)
        for rank in (0, 2)
    ]
    peer = start(keeping_a_board, port)
    assert peer.hear(2 * PATIENCE) == "there"
    assert on_ranks(in_the_same_node_as, groups, 0, timeout=PATIENCE) == [[True] * 3] * 2
    peer.kill()
    begun = time.monotonic()
    for group in groups:
        with refuses(RankMissing, match="rank 1, which keeps the group's board at .* has died"):
            in_the_same_node_as(group, 0, timeout=PATIENCE)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.add("memlane/met/0", -1)  # as if it came only now
    late = dist.ProcessGroup(store, 0, 3)
    with refuses(RankMissing, match=rf"rank 1 .pid {peer.pid}., which keeps the group's board"):
        in_the_same_node_as(late, 0, timeout=PATIENCE)
    assert_in_time(3.0, begun)
    keeper.tell("end")
    keeper.result()


RANK = """
import os, sys, torch.distributed as dist
from memlane import MessageQueue, RankMissing, in_the_same_node_as

rank, host, patience = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
store = dist.TCPStore(host, 29556, is_master=rank == 0, wait_for_workers=False)
group = dist.ProcessGroup(store, rank, 2)
with MessageQueue.create_from_process_group(group, 4096, 4, 1, timeout=patience) as queue:
    if rank == 1:
        queue.enqueue("by the cable")
    else:
        print(queue.dequeue(patience))
    in_the_same_node_as(group, timeout=patience)
if rank == 1:
    os._exit(1)
try:
    in_the_same_node_as(group, 1, timeout=patience)
except RankMissing as error:
    print(error)
"""


@pytest.mark.skipif(bool(lab.refusal()), reason=lab.refusal() or "")
def test_a_rank_alone_on_its_host_is_met_and_missed() -> None:
    """The ranks meet at the address by which a host reaches the store, and a death is seen."""
    with lab.Host() as one, lab.Host() as two, lab.Cable(one, two) as cable:
        arguments = cable.addresses[0], str(PATIENCE)
        ranks = [
            subprocess.Popen(
                [*host.command, sys.executable, "-c", RANK, str(rank), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank, host in enumerate((one, two))
        ]
        said = [rank.communicate(timeout=2 * PATIENCE)[0] for rank in ranks]
    assert said[1] == ""
    assert said[0].startswith("by the cable\nrank 1 of a group of 2 has died")


def test_torch_is_not_needed() -> None:
    """A group of memlane's own imports nothing of torch."""
    code = (
        "import sys, memlane, memlane.groups\n"
        "with memlane.groups.TcpGroup('127.0.0.1', 0, 0, 1, secret=bytes(16)) as group:\n"
        "    memlane.MessageQueue.create_from_process_group(group, 64, 2).close()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
