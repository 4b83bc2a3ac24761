"""The table of calls under way against a model: each answer reaches its call, once."""

import threading
from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memlane import WorkerDied, WorkerError
from memlane.workers.table import Pending, Table

WORLD, MOST = 3, 4
LOST = WorkerError("lost")
ranks = st.integers(0, WORLD - 1)


class Calls(RuleBasedStateMachine):
    """Workers that answer in order, and whose answers may be lost; the model is a list each."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(WORLD, MOST)
        self.owed: list[list[tuple[int, Pending]]] = [[] for _ in range(WORLD)]
        self.count = [0] * WORLD
        self.expected: dict[int, dict[int, Any]] = {}
        self.calls: list[Pending] = []
        for rank in range(WORLD):
            self.restart(rank)

    def expect(self, call: Pending, rank: int, outcome: object) -> None:
        self.expected.setdefault(id(call), {}).setdefault(rank, outcome)

    def restart(self, rank: int) -> None:
        start = self.table.start(rank)
        self.calls.append(start)
        self.owed[rank], self.count[rank] = [(0, start)], 0

    @rule(chosen=st.sets(ranks), is_sent=st.booleans(), began=st.integers(0, WORLD))
    def begin(self, chosen: Sequence[int], is_sent: bool, began: int) -> None:
        living = [rank for rank in chosen if rank not in self.table.deaths]
        call = Pending("step", living)
        before = [*self.count]
        if not is_sent:  # a handler raised, perhaps before all had been noted
            self.table.begin(call, living[:began])
            self.table.take_back(call, living)
            return
        numbers = self.table.begin(call, living)
        self.calls.append(call)
        for rank in living:
            self.count[rank] += 1
            self.owed[rank].append((self.count[rank], call))
            assert (numbers if isinstance(numbers, int) else numbers[rank]) == before[rank] + 1

    @rule(rank=ranks, skipped=st.integers(0, 2), has_returned=st.booleans())
    def answer(self, rank: int, skipped: int, has_returned: bool) -> None:
        if len(self.owed[rank]) <= skipped:
            return
        for _, call in self.owed[rank][:skipped]:
            self.expect(call, rank, LOST)
        number = self.owed[rank][skipped][0]
        assert self.table.lose(rank, number, LOST) == bool(skipped)
        number, call = self.owed[rank][skipped]
        del self.owed[rank][: skipped + 1]
        error = None if has_returned else ValueError(number)
        self.expect(call, rank, number if error is None else error)
        self.table.answer(rank, number, number, error)
        self.table.answer(rank, number, "again", None)  # changes nothing

    @rule(rank=ranks)
    def die(self, rank: int) -> None:
        death = WorkerDied(rank, 1, -9, self.table.state(rank))
        if rank in self.table.deaths:
            return
        for _, call in self.owed[rank]:
            self.expect(call, rank, death)
        self.owed[rank] = []
        self.table.die(rank, death)

    @precondition(lambda self: self.table.deaths)
    @rule()
    def replace(self) -> None:
        self.restart(next(iter(self.table.deaths)))

    @invariant()
    def each_has_its_answer(self) -> None:
        for call in self.calls:
            outcomes = {**call.values, **call.errors}
            expected = self.expected.get(id(call), {})
            assert outcomes == expected
            assert set(call.missing) == {*call.ranks} - {*expected}
            assert call.is_complete() == (not call.missing)
            assert call.is_settled() == (call.is_complete() or bool(call.errors))
        for rank in range(WORLD):
            assert (self.table.full([rank]) == [rank]) == (len(self.owed[rank]) >= MOST)
            assert self.table.running(rank) == (
                self.owed[rank][0][1].name if self.owed[rank] else None
            )
        assert self.table.is_idle == (not any(self.owed))


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=40)


def test_a_group_is_killed_while_an_answer_is_taken() -> None:
    """Whichever thread is first: each call ends once, and no thread raises."""
    table = Table(1, MOST)
    table.start(0)
    table.answer(0, 0, None, None)
    killing = threading.Thread(target=table.fail, args=(0, LOST))

    class Answered(Pending):
        def take(self, rank: int, value: Any, error: BaseException | None) -> None:
            super().take(rank, value, error)
            if error is None:
                killing.start()
                killing.join(0.1)  # at most: it may have to wait for this thread

    calls = [Answered("step", [0]), Pending("step", [0])]
    for call in calls:
        table.begin(call, [0])
    table.answer(0, 1, "answer", None)
    killing.join()
    assert [(call.values, call.errors) for call in calls] == [({0: "answer"}, {}), ({}, {0: LOST})]
    assert table.is_idle


def test_a_call_that_is_sent_again_has_not_seen_the_death_before() -> None:
    """The worker died while there was no space for it in the queue; another process has it then."""
    table = Table(2, MOST)
    for rank in range(2):
        table.start(rank)
        table.answer(rank, 0, None, None)
    call = Pending("step", [0, 1])
    table.begin(call, [0, 1])
    table.die(0, WorkerDied(0, 1, 9, ""))
    table.take_back(call, [0, 1])
    table.start(0)
    table.begin(call, [0, 1])
    table.answer(0, 0, None, None)
    for rank in range(2):
        table.answer(rank, 1, rank, None)
    assert (call.values, call.errors) == ({0: 0, 1: 1}, {})
