"""The blame for what was read of all segments: a table of scenes, without a process."""

from dataclasses import replace
from typing import Any

import pytest

from memlane._base.blame import Facts, role_name
from memlane._base.slots import State
from memlane.inspect.decisions import Wait, judged, waits_in
from memlane.inspect.segment import Participant, Segment
from memlane.inspect.stacks import Frame, NoStack, Stack, Thread
from memlane.inspect.waits import needs_second_look

pytestmark = pytest.mark.unit

NOW = 1000.0
AFTER = 1.0
ENGINE, FIRST, SECOND = 10, 11, 12  # pids, in the order of their start


def who(
    pid: int | None,
    activity: str = "elsewhere",
    *,
    rank: int | None = None,
    ago: float = 50.0,
    since: float | None = None,
    sent: int = 0,
    behind: int = 0,
    state: State = "running",
) -> Participant:
    """`ago`: seconds since its last progress; `since`: seconds for which it does what it does."""
    busy = activity in ("waiting", "attaching", "in_block", "copying")
    return Participant(
        "writer" if rank is None else "reader",
        rank,
        pid,
        0.0,
        "absent" if pid is None else state,
        sent,
        behind,
        None if pid is None else NOW - ago,
        activity,  # type: ignore[arg-type]
        NOW - (ago if since is None else since) if busy else None,
        start_ticks=pid,
    )


def queue(name: str, *participants: Participant, **more: Any) -> Segment:
    more = {"mode": "all", "id": name, **more}
    return Segment(
        name, "queue", False, False, (), (), 0, 0, 0.0, participants=participants, **more
    )


def described(one: Participant, now: float) -> Facts:
    return Facts(
        role_name(one.role, one.rank),
        one.state,
        one.pid,
        behind=one.behind,
        silent_for=None if one.last_progress is None else now - one.last_progress,
        activity=one.activity,
    )


def found(*segments: Segment, after: float = AFTER) -> list[Wait]:
    return waits_in(segments, after, NOW, described)


def named(waits: list[Wait]) -> list[tuple[int | None, list[int | None], bool]]:
    """(who waits, for whom, whether that is decided)."""
    return [
        (wait.waiter.pid, [other.pid for other in wait.awaited], wait.is_decided) for wait in waits
    ]


def engine(
    first: Participant,
    second: Participant,
    *,
    answers: str | None = "steps",
    asks: Participant | None = None,
    sent: int = 5,
) -> list[Segment]:
    """A scheduler that has sent five steps, two workers, and the queue of the first's answers,
    four; `answers`: the queue that those are said to answer."""
    steps = queue("steps", who(ENGINE, sent=5, ago=30), first, second)
    asks = asks or who(ENGINE, "waiting", rank=0, ago=31, since=30)
    own = queue("answers", who(FIRST, sent=sent - 1, ago=31), asks, answers_to=answers)
    return [steps, own]


IDLE = who(SECOND, "waiting", rank=1, sent=5, ago=30)
BUSY = who(FIRST, rank=0, sent=5, ago=30)


@pytest.mark.parametrize("answers", ["steps", None])
def test_the_usual_hang(answers: str | None) -> None:
    """The scheduler waits for the answer of a worker that has taken the step. If the queues do not
    say that they belong together, states alone do not decide."""
    waits = found(*engine(BUSY, IDLE, answers=answers))
    assert named(waits) == [(ENGINE, [FIRST], answers is not None)]
    assert waits[0].seconds == pytest.approx(30)
    assert judged(waits[0], {FIRST: stack("forward (model.py:1)")}).is_decided


@pytest.mark.parametrize("answers", ["steps", None])
def test_an_idle_engine_is_not_stuck(answers: str | None) -> None:
    """The workers wait for the next step; all steps are answered."""
    idle = who(FIRST, "waiting", rank=0, sent=5, ago=30)
    steps = queue("steps", who(ENGINE, sent=5, ago=30), idle, IDLE)
    own = queue(
        "answers", who(FIRST, sent=5, ago=29), who(ENGINE, rank=0, ago=29), answers_to=answers
    )
    assert found(steps, own) == []


def test_a_thread_that_always_reads_answers_is_not_stuck() -> None:
    idle = who(FIRST, "waiting", rank=0, sent=5, ago=30)
    steps, answers = engine(idle, IDLE)
    done = replace(answers, participants=(who(FIRST, sent=5, ago=29), *answers.participants[1:]))
    assert found(steps, done) == []


def test_a_worker_that_took_a_step_and_waits_for_the_next_is_a_deadlock() -> None:
    """It will never answer, as the scheduler will never send."""
    idle = who(FIRST, "waiting", rank=0, sent=5, ago=30)
    (wait,) = found(*engine(idle, IDLE))
    assert (wait.is_deadlock, wait.is_decided) == (True, True)
    assert f"Processes {ENGINE} and {FIRST} wait for each other" in wait.advice


def test_a_step_that_lasts_less_than_after_is_nobodys_fault() -> None:
    assert found(*engine(BUSY, IDLE), after=31) == []


def test_a_caller_with_a_timeout_waits_since_it_has_asked() -> None:
    asks = who(ENGINE, "waiting", rank=0, ago=31, since=0.1)
    (wait,) = found(*engine(BUSY, IDLE, asks=asks))
    assert wait.seconds == pytest.approx(30)


def test_stacks_tell_which_of_two_busy_workers_is_to_blame() -> None:
    """Only stacks tell which: the one inside a collective waits for the other."""
    (wait,) = found(*engine(BUSY, who(SECOND, rank=1, sent=5, ago=30)))
    assert named([wait]) == [(ENGINE, [FIRST, SECOND], False)]
    assert not judged(wait, {}).is_decided
    inside = stack("all_reduce (torch/distributed/distributed_c10d.py:2)")
    outside = stack("acquire (lock.py:1)")
    made = judged(wait, {FIRST: inside, SECOND: outside})
    assert named([made]) == [(ENGINE, [SECOND, FIRST], True)]
    assert made.facts[0].pid == SECOND
    for both in (inside, outside):
        assert not judged(wait, {FIRST: both, SECOND: both}).is_decided
    assert not judged(wait, {FIRST: inside, SECOND: NoStack("no right")}).is_decided


@pytest.mark.parametrize("state", ["stopped", "dead"])
def test_a_worker_that_cannot_run_is_the_cause(state: State) -> None:
    """Whatever the one that should answer does."""
    second = who(SECOND, "waiting", rank=1, sent=4, behind=1, state=state)
    (wait,) = found(*engine(BUSY, second))
    assert named([wait]) == [(ENGINE, [SECOND, FIRST], True)]


def test_of_queues_that_do_not_name_each_other_the_younger_process_answers() -> None:
    """A worker that greets on its queue of answers has sent more than it got, and asks nobody."""
    steps = queue("steps", who(ENGINE, sent=4), who(FIRST, "waiting", rank=0, sent=4, ago=30))
    answers = queue("answers", who(FIRST, sent=5, ago=30), who(ENGINE, rank=0, ago=30))
    assert found(steps, answers) == []


@pytest.mark.parametrize(("activity", "since"), [("waiting", 0.1), ("elsewhere", None)])
def test_a_full_ring_without_progress_is_reported(activity: str, since: float | None) -> None:
    """It is seen whether its writer blocks, or tries again and again with a timeout."""
    writer = who(ENGINE, activity, since=since, sent=10, ago=20)
    reader = who(FIRST, rank=0, behind=10, ago=40, state="stopped")
    idle = who(SECOND, "waiting", rank=1, sent=10, ago=20)
    waits = found(queue("q", writer, reader, idle, unread=(0,)))
    waits.sort(key=lambda wait: wait.is_in_turn)
    assert named(waits)[0][:2] == (ENGINE, [FIRST])
    assert waits[0].reason == "no free chunk"
    assert waits[0].seconds == pytest.approx(20)
    assert all(wait.is_in_turn for wait in waits[1:])


@pytest.mark.parametrize(("for_how_long", "is_blocked"), [(19.5, False), (0.4, True)])
def test_a_writer_that_waits_in_another_queue_is_not_blocked_in_a_full_one(
    for_how_long: float, is_blocked: bool
) -> None:
    """A worker whose answers nobody has taken, and that has come to the next request: as long as
    since the ring has moved. One that asks both in turn, with timeouts, has been there since."""
    answers = queue("a", who(FIRST, sent=10, ago=20), who(ENGINE, rank=0, behind=10, ago=30))
    answers = replace(answers, unread=(0,))
    worker = who(FIRST, "waiting", rank=0, since=for_how_long)
    requests = queue("r", who(ENGINE, sent=1, ago=20), worker)
    waits = [each for each in found(answers, requests) if each.reason == "no free chunk"]
    assert [each.waiter.pid for each in waits] == [FIRST] * is_blocked


def test_a_reader_of_a_blocked_writer_waits_for_it() -> None:
    """The writer's own line names the cause."""
    writer = who(ENGINE, "waiting", ago=10, sent=2)
    slow = who(FIRST, rank=0, behind=2, ago=10)
    quick = who(SECOND, "waiting", rank=1, ago=10, sent=2)
    segment = queue("q", writer, slow, quick, unread=(0,))
    first, second = sorted(found(segment), key=lambda wait: wait.is_in_turn)
    assert (first.waiter, first.awaited) == (writer, (slow,))
    assert "computes" in first.advice
    assert (second.waiter, second.awaited) == (quick, (writer,))
    assert "its own line names the cause" in second.advice
    assert found(segment, after=11.0) == []


def test_a_full_ring_whose_reader_makes_progress_is_slow_only() -> None:
    writer = who(ENGINE, sent=10, ago=0.5)
    reader = who(FIRST, rank=0, behind=10, ago=0.2)
    assert found(queue("q", writer, reader, unread=(0,))) == []


@pytest.mark.parametrize("activity", ["in_block", "copying"])
def test_a_writer_that_does_not_end_its_message(activity: str) -> None:
    """Inside acquire_write, or in a __reduce__ that hangs."""
    reader = who(FIRST, "waiting", rank=0, ago=40)
    waits = found(queue("q", who(ENGINE, activity, since=5), reader))
    assert named(waits) == [(FIRST, [ENGINE], True)]
    assert waits[0].seconds == pytest.approx(5)
    assert found(queue("q", who(ENGINE, activity, since=0.5), reader)) == []


def test_only_a_reader_that_has_waited_costs_a_second_look() -> None:
    """A busy writer is copying at most moments."""
    writer = who(ENGINE, "copying", since=0)
    for ago, is_needed in ((0.1, False), (5, True)):
        reader = who(FIRST, "waiting", rank=0, ago=ago)
        assert needs_second_look([queue("q", writer, reader)], AFTER, NOW) == is_needed
    assert not needs_second_look([queue("q", writer, who(FIRST, rank=0))], AFTER, NOW)


def test_two_writers_that_wait_for_each_other() -> None:
    one = queue("a", who(ENGINE, "waiting"), who(FIRST, rank=0, behind=2), unread=(0,))
    two = queue("b", who(FIRST, "waiting"), who(ENGINE, rank=0, behind=2), unread=(0,))
    waits = found(one, two)
    assert [wait.is_deadlock for wait in waits] == [True, True]
    free = Stack((thread("compute (model.py:1)"), thread("put (queue.py:1)", is_main=False)))
    assert not judged(waits[0], {int(waits[0].awaited[0].pid or 0): free}).is_deadlock


def test_a_process_of_another_namespace_is_no_part_of_a_pair() -> None:
    """Its pid means another process here."""
    busy = replace(BUSY, state="unknown")
    steps, answers = engine(busy, IDLE)
    writer = replace(answers.participants[0], state="unknown")
    waits = found(steps, replace(answers, participants=(writer, *answers.participants[1:])))
    assert [one.facts[0].title for one in waits] == [""]


def test_a_start_is_no_stall() -> None:
    writer = who(ENGINE, "attaching")
    (wait,) = found(queue("q", writer, who(None, rank=0)))
    assert wait.is_start


def test_a_full_ring_of_one_process_is_no_deadlock() -> None:
    """Its ends are threads, and none of them may wait at all."""
    ends = who(ENGINE, sent=4, ago=30), who(ENGINE, rank=0, behind=4, ago=30)
    (wait,) = found(queue("own", *ends, unread=(0,)))
    assert not wait.is_deadlock


def thread(*frames: str, is_main: bool = True) -> Thread:
    calls = []
    for text in frames:
        name, place = text.removesuffix(")").split(" (")
        file, line = place.split(":")
        calls.append(Frame(name, file, int(line)))
    return Thread("MainThread" if is_main else "Thread-1", is_main, tuple(calls))


def stack(*frames: str) -> Stack:
    return Stack((thread(*frames),))


# Other hosts --------------------------------------------------------------------------------------


def afar(one: Participant, state: str = "running", host: str = "10.0.0.2:5000") -> Participant:
    """The same participant on another host."""
    return replace(one, state=state, address=host, start_ticks=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("activity", ["waiting", "elsewhere"])
def test_a_reader_on_another_host_whose_window_is_full_is_named(activity: str) -> None:
    """Also if the writer gives up and tries again; the reader here has room."""
    here, there = who(FIRST, rank=0, sent=5), afar(who(SECOND, rank=1, behind=5, ago=30))
    (wait,) = found(queue("steps", who(ENGINE, activity, ago=30), here, there, unread=(1,)))
    assert (wait.reason, wait.awaited) == ("the window of a remote reader is full", (there,))
    assert (wait.is_decided, wait.seconds) == (True, pytest.approx(30))


def test_a_lost_writer_on_another_host_is_named_and_an_idle_one_is_not() -> None:
    reader = who(ENGINE, "waiting", rank=0, ago=30)
    assert found(queue("answers", afar(who(FIRST)), reader)) == []
    waits = found(queue("answers", afar(who(FIRST), "lost"), reader))
    assert named(waits) == [(ENGINE, [FIRST], True)]


@pytest.mark.parametrize("behind", [0, 1])
def test_a_worker_on_another_host_owes_an_answer_if_it_has_not_come_back(behind: int) -> None:
    """It confirms a step when it waits for the next one."""
    steps = queue("steps", who(ENGINE, sent=5, ago=30), afar(who(FIRST, rank=0, behind=behind)))
    writer = afar(who(FIRST, sent=4, ago=31), host="tcp://10.0.0.2:6000")
    answers = queue("answers", writer, who(ENGINE, "waiting", rank=0, ago=31, since=30))
    assert named(found(steps, answers)) == [(ENGINE, [FIRST], True)] * behind


def test_a_process_of_another_host_is_not_the_one_here_with_its_number() -> None:
    """Else both would wait for each other."""
    there = afar(who(ENGINE, rank=0, behind=5, ago=30))
    mine = queue("mine", who(FIRST, "waiting", ago=30), there, unread=(0,))
    own = queue("own", who(ENGINE, "waiting", ago=30), who(FIRST, rank=0), unread=(0,))
    assert not any(wait.is_deadlock for wait in found(mine, own))
