"""Rings of engines: what a file's size and flags say, and who is blamed for what is seen."""

from collections.abc import Mapping, Sequence

import pytest

from memlane import InvalidArgument
from memlane._base.processes import State
from memlane.inspect.foreign.rings import (
    Flags,
    ForeignWait,
    Geometry,
    Process,
    Quiet,
    Ring,
    candidates,
    decide,
    flags_in,
    geometry_of,
)
from memlane.inspect.stacks import Frame, NoStack, Stack, Thread

pytestmark = pytest.mark.unit

MIB = 1 << 20
ENGINE, FIRST, SECOND = 100, 101, 102
BROADCAST = Geometry(16 * MIB, 2, 10)
ANSWERS = Geometry(24 * MIB, 1, 10)

COMPUTING = ["forward (model.py:7)", "worker_busy_loop (multiproc_executor.py:9)"]
IDLE = ["MessageQueue.dequeue (shm_broadcast.py:3)", "worker_busy_loop (multiproc_executor.py:8)"]
ASKING = ["MessageQueue.dequeue (shm_broadcast.py:3)", "get_response (multiproc_executor.py:5)"]
WRITING = ["MessageQueue.acquire_write (shm_broadcast.py:2)", "enqueue (shm_broadcast.py:1)"]
AT_REST = ["poll (core.py:1)", "run_busy_loop (core.py:2)"]


def process(
    pid: int, frames: Sequence[str] | NoStack, title: str = "python x.py", state: State = "running"
) -> Process:
    """Those with a higher pid were started later."""
    if isinstance(frames, NoStack):
        return Process(pid, title, state, pid, frames)
    calls = []
    for text in frames:
        name, place = text.removesuffix(")").split(" (")
        file, line = place.split(":")
        calls.append(Frame(name, file, int(line)))
    return Process(pid, title, state, pid, Stack((Thread("MainThread", True, tuple(calls)),)))


def by_pid(*processes: Process) -> Mapping[int, Process]:
    return {process.pid: process for process in processes}


def broadcast(unread: Sequence[int], pids: Sequence[int] = (ENGINE, FIRST, SECOND)) -> Ring:
    """Ten chunks are written; each reader has not read as many."""
    read = tuple(tuple(chunk >= count for count in unread) for chunk in range(10))
    return Ring("psm_b", BROADCAST, tuple(pids), Flags((True,) * 10, read))


def answers(worker: int, name: str = "psm_a") -> Ring:
    """All read."""
    return Ring(name, ANSWERS, (ENGINE, worker), Flags((True,) * 10, ((True,),) * 10))


def only(found: tuple[list[ForeignWait], list[Quiet]]) -> ForeignWait:
    (wait,), _ = found
    return wait


@pytest.mark.parametrize(
    ("size", "first"),
    [
        ((16 * MIB + 1 + 8) * 10, Geometry(16 * MIB, 8, 10)),
        ((10 * MIB + 1 + 1) * 10, Geometry(10 * MIB, 1, 10)),
        ((24 * MIB + 1 + 1) * 10, Geometry(24 * MIB, 1, 10)),
        ((4 * MIB + 1 + 3) * 6, Geometry(4 * MIB, 3, 6)),
        ((32 * MIB + 1 + 4) * 10, Geometry(32 * MIB, 4, 10)),
    ],
)
def test_the_size_says_the_geometry(size: int, first: Geometry) -> None:
    assert candidates(size, {})[0] == first
    assert first.size == size


@pytest.mark.parametrize("size", [128, 0, (256 * MIB + 1 + 2) * 8, 100 * MIB, 16 * MIB * 10])
def test_other_files_are_no_rings(size: int) -> None:
    """Probes, the memory for tensors, and files of whole MiB."""
    assert candidates(size, {}) == []


def test_the_variable_of_the_engine_counts_first() -> None:
    size = (7 * MIB + 1 + 2) * 10
    found = candidates(size, {"VLLM_MQ_MAX_CHUNK_BYTES_MB": "7"})
    assert found[0] == Geometry(7 * MIB, 2, 10)
    assert candidates(size, {"VLLM_MQ_MAX_CHUNK_BYTES_MB": "seven"})[0] == found[0]


def test_flags_are_zeros_and_ones() -> None:
    geometry = Geometry(MIB, 2, 2)
    flags = flags_in(b"\1\0\1\0\0\0", geometry)
    assert flags == Flags((True, False), ((False, True), (False, False)))
    assert not flags.is_full
    assert flags_in(b"\1\0\2\0\0\0", geometry) is None
    assert flags_in(b"\1\0\1", geometry) is None


@pytest.mark.parametrize("text", ["", "1,2", "1,2,3,4", "0,1,1", "a,b,c", "-1,2,3", "1,2,0"])
def test_a_ring_without_a_geometry_is_left_out(text: str) -> None:
    with pytest.raises(InvalidArgument, match="CHUNK_BYTES,READERS,CHUNKS"):
        geometry_of(text)


@pytest.mark.parametrize("state", ["stopped", "running"])
def test_a_full_ring_names_who_has_not_read(state: State) -> None:
    """Stopped, or computing."""
    wait = only(
        decide(
            [broadcast([0, 10])],
            by_pid(
                process(ENGINE, WRITING),
                process(FIRST, IDLE),
                process(SECOND, COMPUTING, state=state),
            ),
            1.0,
        )
    )
    assert (wait.reason, wait.waiter) == ("no free chunk", (ENGINE, "python x.py"))
    (who,) = wait.awaited
    assert (who.reader, who.pid, who.state, who.unread) == (1, SECOND, state, 10)
    assert who.frames[0] == COMPUTING[0]
    assert ("kill -CONT" in wait.advice) == (state == "stopped")


def test_a_full_ring_blames_the_killed_reader() -> None:
    """The one who is left has read, so it is the other reader who is gone."""
    for unread, lost in (([10, 0], 0), ([0, 10], 1)):
        living = by_pid(process(ENGINE, WRITING), process(FIRST, IDLE))
        wait = only(decide([broadcast(unread, (ENGINE, FIRST))], living, 1.0))
        (who,) = wait.awaited
        assert (who.reader, who.pid, who.state) == (lost, None, "dead")
        assert f"for reader {lost} any more" in wait.advice


def test_titles_say_who_is_which_reader() -> None:
    """Also against the order in which they were started."""
    living = by_pid(
        process(ENGINE, WRITING, "VLLM::EngineCore"),
        process(FIRST, COMPUTING, "VLLM::Worker_TP1"),
        process(SECOND, IDLE, "VLLM::Worker_TP0"),
    )
    (who,) = only(decide([broadcast([0, 10])], living, 1.0)).awaited
    assert (who.reader, who.pid, who.title) == (1, FIRST, "VLLM::Worker_TP1")


def test_titles_of_two_dimensions_are_in_order() -> None:
    living = by_pid(
        process(ENGINE, WRITING, "VLLM::EngineCore"),
        process(FIRST, COMPUTING, "VLLM::Worker_PP1_TP0"),
        process(SECOND, IDLE, "VLLM::Worker_PP0_TP0"),
    )
    (who,) = only(decide([broadcast([0, 10])], living, 1.0)).awaited
    assert (who.reader, who.pid) == (1, FIRST)


def test_in_a_ring_of_workers_the_first_writes() -> None:
    ring = Ring(
        "psm_g", Geometry(4 * MIB, 1, 6), (FIRST, SECOND), Flags((True,) * 6, ((False,),) * 6)
    )
    living = by_pid(
        process(FIRST, WRITING, "VLLM::Worker_TP0"), process(SECOND, COMPUTING, "VLLM::Worker_TP1")
    )
    wait = only(decide([ring], living, 1.0))
    assert wait.waiter == (FIRST, "VLLM::Worker_TP0")
    assert [(who.reader, who.pid) for who in wait.awaited] == [(0, SECOND)]


def test_a_full_ring_of_answers_waits_for_the_engine() -> None:
    ring = Ring("psm_a", ANSWERS, (ENGINE, SECOND), Flags((True,) * 10, ((False,),) * 10))
    living = by_pid(
        process(ENGINE, AT_REST, "VLLM::EngineCore"), process(SECOND, WRITING, "VLLM::Worker_TP1")
    )
    wait = only(decide([ring], living, 1.0))
    assert wait.waiter == (SECOND, "VLLM::Worker_TP1")
    assert [(who.reader, who.pid) for who in wait.awaited] == [(0, ENGINE)]


@pytest.mark.parametrize("unread", [0, 3])
def test_who_does_not_answer_is_blamed(unread: int) -> None:
    """Everything is read, or not by a worker that hangs; the flags alone look like idle."""
    living = by_pid(process(ENGINE, ASKING), process(FIRST, IDLE), process(SECOND, COMPUTING))
    rings = [broadcast([0, unread]), answers(FIRST), answers(SECOND, "psm_c")]
    wait = only(decide(rings, living, 1.0))
    assert (wait.reason, wait.waiter) == ("no answer", (ENGINE, "python x.py"))
    (who,) = wait.awaited
    assert (who.reader, who.pid, who.unread) == (1, SECOND, unread)


def test_the_worker_outside_of_a_collective_is_blamed() -> None:
    """Whatever their pids: the one inside waits for it."""
    inside = ["all_reduce (torch/distributed/distributed_c10d.py:4)", *COMPUTING]
    rings = [broadcast([0, 0]), answers(FIRST), answers(SECOND, "psm_c")]
    for first, second in ((inside, COMPUTING), (COMPUTING, inside)):
        living = by_pid(process(ENGINE, ASKING), process(FIRST, first), process(SECOND, second))
        wait = only(decide(rings, living, 1.0))
        assert wait.is_decided
        assert wait.awaited[0].pid == (SECOND if first is inside else FIRST)
        assert f"Process {wait.awaited[0].pid} is the likely culprit" in wait.advice


@pytest.mark.parametrize("inside", [True, False])
def test_two_alike_are_undecided(inside: bool) -> None:
    """Both inside a collective, or both outside of one."""
    frames = ["barrier (torch/distributed/distributed_c10d.py:4)"] if inside else COMPUTING
    living = by_pid(process(ENGINE, ASKING), process(FIRST, frames), process(SECOND, frames))
    wait = only(decide([broadcast([0, 0]), answers(FIRST)], living, 1.0))
    assert not wait.is_decided
    assert [who.pid for who in wait.awaited] == [FIRST, SECOND]


def test_a_worker_that_was_stopped_between_two_steps_is_blamed() -> None:
    """It stands in the read in which it would be idle."""
    stopped = process(SECOND, IDLE, state="stopped")
    living = by_pid(process(ENGINE, ASKING), process(FIRST, IDLE), stopped)
    wait = only(decide([broadcast([0, 1]), answers(FIRST)], living, 1.0))
    assert [(who.reader, who.pid) for who in wait.awaited] == [(1, SECOND)]
    assert "kill -CONT" in wait.advice


def test_a_dead_worker_does_not_answer() -> None:
    living = by_pid(process(ENGINE, ASKING), process(FIRST, IDLE))
    wait = only(decide([broadcast([0, 3], (ENGINE, FIRST)), answers(FIRST)], living, 1.0))
    (who,) = wait.awaited
    assert (who.reader, who.pid, who.state) == (1, None, "dead")


@pytest.mark.parametrize("unread", [0, 3])
def test_an_idle_engine_is_not_stuck(unread: int) -> None:
    """Its core reads no ring, so nobody waits for whoever is slow."""
    living = by_pid(process(ENGINE, AT_REST), process(FIRST, IDLE), process(SECOND, IDLE))
    waits, (quiet,) = decide([broadcast([0, unread]), answers(FIRST)], living, 1.0)
    assert not waits
    assert quiet.rings == ("psm_b", "psm_a")
    assert {who.pid for who in quiet.processes} == {ENGINE, FIRST, SECOND}


def test_without_stacks_only_a_full_ring_is_a_wait() -> None:
    living = by_pid(*(process(pid, NoStack("no right")) for pid in (ENGINE, FIRST, SECOND)))
    waits, (quiet,) = decide([broadcast([0, 0])], living, 1.0)
    assert not waits
    assert quiet.rings == ("psm_b",)
    (who,) = only(decide([broadcast([10, 0])], living, 1.0)).awaited
    assert (who.pid, who.no_stack) == (FIRST, "no right")


def test_two_engines_are_told_apart() -> None:
    """One that hangs and one that is idle."""
    other = Ring("psm_o", BROADCAST, (200, 201, 202), broadcast([0, 0]).flags)
    living = by_pid(
        process(ENGINE, ASKING), process(FIRST, IDLE), process(SECOND, COMPUTING),
        process(200, AT_REST), process(201, IDLE), process(202, IDLE),
    )  # fmt: skip
    wait = only(decide([broadcast([0, 0]), other], living, 1.0))
    assert [who.pid for who in wait.awaited] == [SECOND]
