"""A queue over a group, whatever the group is."""

import itertools
from pathlib import Path
from typing import Any, ClassVar

import pytest

from memlane import GroupFailed, InvalidArgument, MessageQueue, RankMissing, in_the_same_node_as
from tests.support import PATIENCE
from tests.support.groups import (
    KINDS,
    SMALL,
    ThreadGroup,
    errors_of,
    groups_of,
    on_ranks,
    queues_over,
)
from tests.support.queues import refuses, segments

create = MessageQueue.create_from_process_group


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_any_rank_writes(kind: str) -> None:
    """A reader's rank is its position in the group; the name is gone when the calls return."""
    before = segments()
    with groups_of(kind, 3) as groups:
        for writer in range(3):
            with queues_over(groups, writer) as queues:
                assert segments() == before
                readers = [rank for rank in range(3) if rank != writer]
                assert [queue._is_writer for queue in queues] == [r == writer for r in range(3)]
                assert queues[writer].handle.local_reader_ranks == readers
                assert [queues[rank].local_reader_rank for rank in readers] == [0, 1]
                queues[writer].enqueue(["step", writer])
                for rank in readers:
                    assert queues[rank].dequeue(PATIENCE) == ["step", writer]
                assert {r.rank for r in queues[writer].statistics().readers} == set(readers)


def test_several_queues_at_once_do_not_mix(kind: str) -> None:
    """From each rank to all others, over one group, without mixing them up."""
    with (
        groups_of(kind, 3) as groups,
        queues_over(groups, 0) as zero,
        queues_over(groups, 1) as one,
        queues_over(groups, 2) as two,
    ):
        queues = [zero, one, two]
        for writer, end in itertools.product(range(3), range(3)):
            if writer == end:
                queues[writer][end].enqueue(writer)
        for writer, end in itertools.product(range(3), range(3)):
            if writer != end:
                assert queues[writer][end].dequeue(PATIENCE) == writer


def test_broadcast_object_gives_all_ranks_the_object(kind: str) -> None:
    """All ranks make one call, and all have the writer's object."""
    with groups_of(kind, 2) as groups, queues_over(groups, 1) as queues:
        on_writer, on_reader = queues[1], queues[0]
        assert on_writer.broadcast_object({"a": 1}) == {"a": 1}
        assert on_reader.broadcast_object() == {"a": 1}


def test_a_group_of_one_asks_nobody(kind: str) -> None:
    """Nothing is asked of the group, and nothing is created."""
    before = segments()
    with groups_of(kind, 1) as (group,):
        with create(group, *SMALL) as queue:
            queue.enqueue(1)
            assert segments() == before
            assert queue.handle.buffer_handle is None
        assert in_the_same_node_as(group, 0) == [True]


def test_options_are_the_queues(kind: str) -> None:
    """It accepts the keyword arguments of MessageQueue."""
    with groups_of(kind, 2) as groups, queues_over(groups, serializer="msgpack") as queues:
        assert queues[1].handle.serializer == "msgpack"
        queues[0].enqueue((1, 2))
        assert queues[1].dequeue(PATIENCE) == [1, 2]


@pytest.mark.parametrize("source", range(3))
def test_in_the_same_node_finds_who_shares_memory(kind: str, source: int) -> None:
    """Here all see all; the probe is gone when the calls return."""
    before = segments()
    with groups_of(kind, 3) as groups:
        assert on_ranks(in_the_same_node_as, groups, source) == [[True] * 3] * 3
    assert segments() == before


def test_an_error_of_the_writer_reaches_all(kind: str) -> None:
    """It raises its own error, the others at once one that names it; the next call works."""
    before = segments()
    with groups_of(kind, 3) as groups:
        errors = errors_of(create, groups, 0, 4, 1, timeout=PATIENCE)
        assert isinstance(errors[1], InvalidArgument)
        for error in errors[0], errors[2]:
            assert isinstance(error, GroupFailed)
            assert error.rank == 1
            assert "rank 1 of the group failed: InvalidArgument: max_chunk_bytes" in str(error)
        assert segments() == before
        with queues_over(groups) as queues:
            queues[0].enqueue("works")
            assert queues[2].dequeue(PATIENCE) == "works"


def test_an_error_of_a_reader_reaches_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and the writer's memory is freed."""
    attach = MessageQueue.create_from_handle

    def refuse(handle: Any, rank: int, **options: Any) -> MessageQueue:
        if rank == 2:
            raise MemoryError("no room on rank 2")
        return attach(handle, rank, **options)

    monkeypatch.setattr(MessageQueue, "create_from_handle", staticmethod(refuse))
    before = segments()
    with groups_of(kind, 3) as groups:
        errors = errors_of(create, groups, *SMALL, timeout=PATIENCE)
    assert isinstance(errors[2], MemoryError)
    for error in errors[:2]:
        assert isinstance(error, GroupFailed)
        assert "rank 2 of the group failed: MemoryError: no room on rank 2" in str(error)
    assert segments() == before


@pytest.mark.parametrize("rank", [-1, 3, True, "0", 0.0])
def test_ranks_that_are_none(kind: str, rank: object) -> None:
    """Refused on all ranks; nothing was made."""
    with groups_of(kind, 3) as groups:
        for call in (create, in_the_same_node_as):
            rest = (*SMALL, rank) if call is create else (rank,)
            for error in errors_of(call, groups, *rest):
                assert isinstance(error, TypeError if rank in ("0", True, 0.0) else ValueError)


@pytest.mark.parametrize("timeout", [float("nan"), "1", True])
def test_timeouts_that_are_none(kind: str, timeout: Any) -> None:
    with groups_of(kind, 2) as groups, refuses(ValueError, TypeError):
        create(groups[0], *SMALL, timeout=timeout)


@pytest.mark.parametrize("group", [None, object(), 3, "group"])
def test_what_is_no_group(group: object) -> None:
    with refuses(TypeError, match="not a group that this process is in"):
        create(group, *SMALL)


def test_a_group_that_contradicts_itself_is_refused() -> None:
    class Odd:
        rank, world_size = 3, 2

    with refuses(ValueError, match="rank must be below the world_size of 2, not 3"):
        in_the_same_node_as(Odd(), 0)


def test_host_names_say_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing of memory is tried, not concluded from host names."""
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    with groups_of(kind, 2) as groups:
        assert on_ranks(in_the_same_node_as, groups, 1) == [[True, True]] * 2


def test_a_probe_of_another_user_counts_as_not_shared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A segment that is visible but refused counts as not shared; the log says why."""
    from memlane import SegmentRefused
    from memlane.broadcast import grouping

    def refused(*_: object) -> None:
        raise SegmentRefused("/dev/shm/x belongs to user 1, not to user 0")

    ring = grouping.ShmRingBuffer
    monkeypatch.setattr(
        grouping, "ShmRingBuffer", lambda *a: refused() if len(a) == 4 else ring(*a)
    )
    with groups_of("foreign", 2) as groups:
        assert on_ranks(in_the_same_node_as, groups, 0) == [[True, False]] * 2


class Timed(ThreadGroup):
    """A group whose broadcasts take a deadline."""

    timeouts: ClassVar[list[float]] = []

    def broadcast_obj(self, obj: Any, src: int, timeout: float | None = None) -> Any:
        assert timeout is not None
        self.timeouts.append(timeout)
        if src == 1:
            raise TimeoutError("rank 1 is busy")
        return super().broadcast_obj(obj, src)


def test_group_with_deadlines_of_its_own() -> None:
    """It gets what is left of the call's deadline; no thread is made for it."""
    said: dict[int, Any] = {}
    groups = [Timed(rank, 2, said) for rank in range(2)]
    for error in errors_of(in_the_same_node_as, groups, 0, timeout=PATIENCE):
        assert isinstance(error, RankMissing)
        assert error.ranks == (1,)
    assert all(0 < timeout <= PATIENCE for timeout in Timed.timeouts)


def test_group_that_breaks() -> None:
    """The error of its broadcast is the cause, and the source is named."""

    class Broken(ThreadGroup):
        def broadcast_obj(self, obj: Any, src: int) -> Any:
            raise OSError("cable")

    with refuses(GroupFailed, match=r"broadcasting from rank 0 .*cable") as caught:
        in_the_same_node_as(Broken(1, 2, {}), 0)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("answer", [None, 3, [], {"a": 1}])
def test_group_that_says_something_else(answer: object) -> None:
    """Steps that are not this call's are reported, not trusted."""

    class Strange(ThreadGroup):
        def broadcast_obj(self, obj: Any, src: int) -> Any:
            return answer

    with refuses(GroupFailed, match="rank 0 sent something that is not a step of this call"):
        in_the_same_node_as(Strange(1, 2, {}), 0)
