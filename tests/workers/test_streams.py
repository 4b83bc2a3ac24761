"""Calls with an argument for each worker, and calls of generators."""

import gc
import os
import signal
from typing import Any

import numpy as np
import pytest

from memlane import CallTimedOut, Closed, InvalidArgument, InvalidType, WorkerDied, WorkerGroup
from tests.support import PATIENCE, alarms
from tests.workers.roles import Model, triples
from tests.workers.test_calls import Interrupt, gate, group_of


def test_scatter_gives_each_worker_its_item() -> None:
    """`scatter` gives each worker its own item, in the order of the ranks; in order with calls."""
    big = [np.full(1 << 18, rank, dtype=np.float64) for rank in range(3)]
    with group_of(3) as group:
        assert group.scatter(Model.step, "abc").result() == [(0, "a"), (1, "b"), (2, "c")]
        assert group[[2, 0]].scatter("step", [5, 6]).result() == [(2, 5), (0, 6)]
        assert group.scatter(triples, [1, 2, 3]).result() == [3, 7, 11]
        doubled = group.scatter(Model.double, big).result()
        assert [array[-1] for array in doubled] == [0, 2, 4]
        for wrong in ([], [1, 2], [1, 2, 3, 4]):
            with pytest.raises(InvalidArgument, match="3 workers need as many items"):
                group.scatter(Model.step, wrong)
        with pytest.raises(InvalidType, match="pickled"):
            group.scatter(Model.step, [1, 2, lambda: None])
        with pytest.raises(InvalidType, match="pickled"):  # rank 1 does not get its own either
            group[1:].scatter(Model.step, [1, lambda: None])
        assert group[3:].scatter(Model.step, []).result() == []
        assert group.call(Model.history) == [["a", 6], ["b"], ["c", 5]]


@pytest.mark.parametrize("some", [slice(None), slice(1, None)])
def test_a_stream_yields_steps_by_rank(some: slice) -> None:
    """A stream yields a list by rank for each step, until the first worker has ended; other calls
    run between. Then the generators of all have ended."""
    with group_of(3) as group:
        workers = group[some]
        steps = []
        for items in workers.stream(Model.counts, 2):
            steps.append(items)
            assert group[0].call(triples, 1) == [3]
        longest = 2 + workers.ranks[0]
        assert steps == [[(rank, n) for rank in workers.ranks] for n in range(longest)]
        for ran in workers.call(Model.history):
            assert ran[-1] == "ended"
        assert [*group[3:].stream(Model.counts, 2)] == []


def test_a_dropped_stream_ends_the_generators() -> None:
    """By break, close and the last reference, also one that is dropped while a call is pickled.
    The workers were one step ahead, and not more."""
    with group_of(2) as group:
        for _ in group.stream(Model.counts, 9):
            break
        assert group.call(Model.history) == [[0, 1, "ended"]] * 2
        stream = group[0].stream(Model.counts, 9)
        assert [next(stream), next(stream)] == [[(0, 0)], [(0, 1)]]
        stream.close()
        stream.close()
        assert [*stream] == []
        assert group[0].call(Model.history) == [[0, 1, "ended", 0, 1, 2, "ended"]]
        stream = group.stream(Model.counts, 9)
        next(stream)
        dropping = Dropping(stream)
        del stream
        assert group.call(Model.step, dropping) == [(0, "dropped"), (1, "dropped")]
        group.call(Model.step, 1)
        assert group[1].call(Model.history) == [[0, 1, "ended", 0, 1, "dropped", "ended", 1]]


class Dropping:
    """It drops a stream while it is pickled."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __reduce__(self) -> tuple[Any, ...]:
        self.stream = None
        gc.collect()
        return str, ("dropped",)


def test_an_exception_of_a_generator_ends_the_stream() -> None:
    """One ends the stream, as itself; what is no generator is refused, and a generator by call."""
    with group_of(2) as group:
        stream = group.stream(Model.counts_to_a_fault, "raises")
        assert next(stream) == [1, 1]
        with pytest.raises(KeyError, match="no such model"):
            next(stream)
        assert [*stream] == []
        with pytest.raises(TypeError, match="not iterable"):
            next(group.stream("setting", "HOME_OF_NOBODY"))
        with pytest.raises(TypeError, match=r"call it by stream\(\)"):
            group.call(Model.counts, 2)
        assert group.call(triples, 1) == [3, 4]


def runs_out(_model: Model) -> Any:
    return [next(iter(()))]


def test_exceptions_are_no_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of a step that was asked for twice, nor a StopIteration of the method."""
    with group_of(2) as group:
        stream = group.stream(Model.counts_to_a_fault, "raises")
        ask, is_lost = stream._ask, [True]

        def asks_in_vain(number: int, awaits: bool) -> Any:
            step = yield from ask(number, awaits)
            if number == 2 and is_lost:
                is_lost.pop()
                raise Interrupt
            return step

        monkeypatch.setattr(stream, "_ask", asks_in_vain)
        with pytest.raises(Interrupt):
            next(stream)
        assert next(stream) == [1, 1]
        with pytest.raises(KeyError, match="no such model"):
            next(stream)
        with pytest.raises(RuntimeError, match="StopIteration"):
            next(group.stream(runs_out))
        assert group.call(triples, 1) == [3, 4]


@pytest.mark.parametrize("on_death", ["raise", "replace"])
def test_a_death_ends_a_stream(on_death: Any) -> None:
    """By WorkerDied, in a step and between two; the process in its place has no generator."""
    with group_of(2, on_death=on_death) as group:
        stream = group.stream(Model.counts_to_a_fault, "exits")
        assert next(stream) == [1, 1]
        with pytest.raises(WorkerDied) as caught:
            next(stream)
        assert (caught.value.rank, caught.value.exitcode) == (1, 3)
        assert [*stream] == []
        if on_death == "raise":
            group.replace(1)
        counts = group.stream(Model.counts, 9)
        assert next(counts) == [(0, 0), (1, 0)]
        assert group[1].call(Model.history) == [[0, 1]]  # it owes nothing
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            group.check(PATIENCE)
        assert next(counts) == [(0, 1), (1, 1)]  # which it had yielded
        with pytest.raises(WorkerDied) as caught:
            next(counts)
        assert caught.value.rank == 1
        assert [*counts] == []


def test_a_worker_is_replaced_before_a_stream() -> None:
    """The stream has nothing to do with the process that died."""
    with group_of(2, on_death="replace") as group:
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            group.check(PATIENCE)
        early = group.stream(Model.counts, 1)
        assert [*group.stream(Model.counts, 1)] == [[(0, 0), (1, 0)]]  # which replaces it
        group.replace(1)
        assert [*early] == [[(0, 0), (1, 0)]]


def test_a_stream_is_dropped_beside_its_dead_worker() -> None:
    """While another worker is recovered, calls of a third go on."""
    seen: list[object] = []

    def recover(group: WorkerGroup[Model], ranks: list[int]) -> None:
        if ranks == [0]:
            streams = [group[1].stream(Model.counts, 9) for _ in range(8)]
            for stream in streams:
                next(stream)
            os.kill(group.pids[1], signal.SIGKILL)
            with pytest.raises(WorkerDied):
                group.check(PATIENCE)
            for stream in streams:  # more than its queue has space for
                stream.close()
            seen.append(group[2].within(PATIENCE).call(triples, 1))

    with group_of(3, on_death="replace", recover=recover, max_in_flight=2) as group:
        group[1].call(triples, 1)  # by a lane
        group.replace(0)
        assert seen == [[5]]
        assert group.call(triples, 1) == [3, 4, 5]


def waits_and_yields(model: Model, descriptor: int) -> Any:
    for number in range(2):
        model.waits(descriptor)
        yield number


def test_a_late_step_can_be_asked_for_again() -> None:
    """It raises CallTimedOut, and can be asked for again; `close` of the group ends a stream."""
    with gate() as (descriptor, open_it), group_of(1) as group:
        stream = group.within(0.05).stream(waits_and_yields, descriptor)
        with pytest.raises(CallTimedOut, match=r"waits_and_yields\(\)"):
            next(stream)
        open_it()
        while True:
            try:
                assert next(stream) == [0]
                break
            except CallTimedOut:
                pass
        open_it()
        other = group.stream(Model.counts, 5)
        assert next(other) == [(0, 0)]
    assert next(other) == [(0, 1)]
    with pytest.raises(Closed):
        next(other)


def test_interrupts_lose_no_step() -> None:
    """A signal handler that raises at any moment of a step leaves a stream that can go on."""
    is_on = False

    def interrupt() -> None:
        if is_on:
            raise Interrupt

    seen, raised = [], 0
    items: list[Any] | None = []
    with group_of(2) as group, alarms(interrupt, every=0.0007):
        stream = group.stream(Model.counts, 150)
        while items is not None:
            try:
                is_on = True
                items = next(stream, None)
                is_on = False
            except Interrupt:
                is_on = False
                raised += 1
                continue
            finally:
                is_on = False
            seen += items[:1] if items else []
        for ran in group.call(Model.history):
            assert ran[:150] == [*range(150)]
    assert [n for _, n in seen] == sorted({n for _, n in seen})
    assert len(seen) + raised >= 150
