"""Builds a queue over a group of processes, after probing which of them share memory."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from memlane._base.arguments import integer_from, segment_name
from memlane._base.deadline import Fallback
from memlane._base.diagnosis import warn
from memlane._importing import fork_waits
from memlane.broadcast.handle import Handle
from memlane.broadcast.ring import ShmRingBuffer
from memlane.errors import InvalidArgument, SegmentMissing, SegmentRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from memlane.groups.collectives import Collectives

DEFAULT_TIMEOUT = Fallback(300.0)


class AnEnd(Protocol):
    """One end of a queue that a group builds."""

    def export_handle(self, rank: int) -> Handle: ...
    def wait_until_ready(self, timeout: float | None) -> None: ...
    def close(self) -> None: ...


Queue = TypeVar("Queue", bound=AnEnd)


class Readers(NamedTuple):
    """The readers that a writer is to have.

    Attributes:
        number: of all.
        local: ranks of those that share its memory.
        unshared: ranks of those that are alone on another host.
        address: of the writer's host, as the group reaches it; None if that is not known.
    """

    number: int
    local: list[int]
    unshared: list[int]
    address: str | None = None


def in_the_same_node_as(
    pg: Any, source_rank: int = 0, *, timeout: float | None = DEFAULT_TIMEOUT
) -> list[bool]:
    """Returns, for each rank of the group, whether it can see the shared memory of `source_rank`.

    This is probed, not inferred from host names: `source_rank` creates a segment and the others
    look for it, so containers with separate /dev/shm do not count as one node. All ranks must call
    it, and all get the same list.

    Args:
        pg: a torch process group (any backend), a `memlane.groups.TcpGroup`, or any object with
            `rank`, `world_size` and `broadcast_obj(obj, src)`.
        source_rank: a position in the group, not a global rank, even in a sub-group of torch.
        timeout: seconds for the whole call; by default that of a `TcpGroup`, 300 for others.

    Raises:
        RankMissing: the ranks that it names did not call in time.
        GroupFailed: another rank failed, or the group itself.
        InvalidArgument: there is no such rank.
    """
    with fork_waits:
        from memlane.groups import collectives_of  # which imports ZeroMQ

    with collectives_of(pg, timeout) as group:
        return _same_node(group, _checked_rank("source_rank", source_rank, group))


def queue_over_group(
    pg: Any,
    writer_rank: int,
    timeout: float | None,
    *,
    relays: bool,
    make: Callable[[Readers], Queue],
    attach: Callable[[Handle, int, float | None], Queue],
) -> Queue:
    """`MessageQueue.create_from_process_group`: `make` makes the writer's end, and `attach` that of
    the reader with a handle, a rank and so many seconds."""
    with fork_waits:
        from memlane._net.addresses import own_address
        from memlane.groups import collectives_of

    with collectives_of(pg, timeout) as group, ExitStack() as failing:
        writer = _checked_rank("writer_rank", writer_rank, group)
        if group.size == 1:
            return make(Readers(0, [], []))
        is_local = _same_node(group, writer)
        ranks = [rank for rank in range(group.size) if rank != writer]
        remote = [rank for rank in ranks if not is_local[rank]]
        unshared = _unshared(group, remote) if relays and len(remote) > 1 else []
        local = [rank for rank in ranks if is_local[rank]]
        address = own_address(group.host) if remote and group.rank == writer else None
        readers = Readers(len(ranks), local, unshared, address)
        ends: list[Queue] = []

        def keep(queue: Queue) -> None:
            failing.callback(queue.close)
            ends.append(queue)

        def handles() -> list[str]:
            keep(make(readers))
            return [
                "" if rank == writer else ends[0].export_handle(rank).to_json()
                for rank in range(group.size)
            ]

        def attached() -> None:
            if group.rank != writer:
                left = group.deadline.timeout_left()
                keep(attach(Handle.from_json(text), group.rank, left))

        text = group.scatter(writer, handles)
        group.gather(attached)
        # A collective step: otherwise a writer could return and close before all ranks are ready.
        group.gather(lambda: ends[0].wait_until_ready(group.deadline.timeout_left()))
        failing.pop_all()
        return ends[0]


def _unshared(group: Collectives, remote: list[int]) -> list[int]:
    """The remote ranks without another remote rank on their host."""
    with fork_waits:
        from memlane.broadcast.network.shared_reader import where_memory_is_shared

    hosts = [str(host) for host in group.gather(where_memory_is_shared)]
    count = Counter(hosts[rank] for rank in remote)
    return [rank for rank in remote if count[hosts[rank]] == 1]


def _checked_rank(name: str, rank: object, group: Collectives) -> int:
    position = integer_from(name, rank, 0)
    if position >= group.size:
        raise InvalidArgument(
            f"{name} is {position}, but the group has {group.size} ranks; ranks are positions in "
            f"the group"
        )
    return position


def _same_node(group: Collectives, source: int) -> list[bool]:
    """Keeps the probe until all have looked for it; a sweep removes it if its creator is killed."""
    if group.size == 1:
        return [True]
    with ExitStack() as probing:
        name = group.broadcast(
            source, lambda: probing.enter_context(ShmRingBuffer(1, 1, 1)).handle()[3]
        )
        return group.gather(lambda: group.rank == source or _is_here(name))


def _is_here(name: object) -> bool:
    try:
        ShmRingBuffer(1, 1, 1, segment_name(name)).close()
    except SegmentMissing:
        return False
    except SegmentRefused as error:
        warn("shared memory is visible but is not used: %s", error)
        return False
    return True
