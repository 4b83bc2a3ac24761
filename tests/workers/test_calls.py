"""Calls of a group: answers by rank, exceptions, timeouts, threads, interrupts."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import (
    CallTimedOut,
    Closed,
    ConcurrentUse,
    InvalidArgument,
    InvalidType,
    Ticket,
    WorkerDied,
    WorkerError,
    WorkerGroup,
    inspect,
)
from memlane.workers.processes import _changed_environment
from tests.support import PATIENCE, Link, alarms, start, until
from tests.workers.roles import Closing, Frozen, Model, OnlyIn, triples


def group_of(world: int, **options: Any) -> WorkerGroup[Model]:
    return WorkerGroup(Model, world, start_method="fork", timeout=PATIENCE, **options)


@contextmanager
def gate() -> Iterator[tuple[int, Callable[[], object]]]:
    """A descriptor on which a forked worker waits, and what opens it."""
    here, there = os.pipe()
    try:
        yield here, lambda: os.write(there, b"x")
    finally:
        os.close(here)
        os.close(there)


def one_worker(_link: Link, start_method: str) -> tuple[object, ...]:
    """Role: has a group, as multiprocessing's helpers would outlive a test of the same process."""
    with WorkerGroup(
        Model,
        1,
        start_method=start_method,
        env=lambda rank: {"MEMLANE_TEST": f"{rank}"},
        timeout=PATIENCE,
    ) as group:
        answers = group.call(Model.setting, "MEMLANE_TEST"), group.call(Model.step, "x")
    return (*answers, os.environ.get("MEMLANE_TEST"), group.exitcodes)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_processes_of_their_own(start_method: str) -> None:
    """A worker starts in every way of multiprocessing, with its environment."""
    peer = start(one_worker, start_method)
    assert peer.result() == (["0"], [(0, "x")], None, [0])


SERVING = (
    "import sys; from memlane import Ticket, serve; from tests.workers.roles import Model; "
    "serve(Ticket.from_json(sys.argv[1]), Model)"
)


def test_workers_of_another_program_join_by_a_ticket() -> None:
    """They start with a ticket as text, are known by their pids, and end with the group."""
    programs: list[subprocess.Popen[bytes]] = []

    def start_program(ticket: Ticket) -> None:
        command = [sys.executable, "-c", SERVING, ticket.to_json()]
        programs.append(subprocess.Popen(command, cwd=Path(__file__).parents[2]))

    group: WorkerGroup[Model]
    with WorkerGroup(None, 1, start=start_program, timeout=PATIENCE) as group:
        assert group.call(Model.step, 1) == [(0, 1)]
        assert group.pids == [programs[0].pid]
        with pytest.raises(WorkerDied):
            group.call(Model.dies)
        group.replace(0)
        assert group[0].call(Model.step, 2) == [(0, 2)]
    assert [program.wait(PATIENCE) for program in programs] == [-signal.SIGKILL, 0]


def test_answers_come_back_by_rank() -> None:
    """A call runs on all workers, one of them, or several; by method, name or function."""
    with group_of(3) as group:
        assert group.call(Model.step, 7) == [(0, 7), (1, 7), (2, 7)]
        assert group[1].call("step", 8) == [(1, 8)]
        assert group[1:].call(Model.step, 9) == [(1, 9), (2, 9)]
        assert group[[2, 0]].call(Model.step, 1) == [(2, 1), (0, 1)]
        assert group[[2, 1, 0]].call(triples, 1) == [5, 4, 3]
        assert group[-1].call(triples, number=2) == [8]
        assert group[3:].call(Model.step, 0) == []
        assert (len(group), group.ranks, group[1:].ranks) == (3, [0, 1, 2], [1, 2])
        with pytest.raises(IndexError):
            group[3]
        with pytest.raises(InvalidArgument, match="named once"):
            group[[1, 1]]


def test_calls_run_in_order() -> None:
    """A worker runs calls in the order in which they were sent, to all or to it alone."""
    with group_of(2, max_in_flight=50) as group:
        calls = [
            (group if number % 3 else group[1]).submit(Model.step, number) for number in range(40)
        ]
        assert [call.result()[-1] for call in calls] == [(1, number) for number in range(40)]
        assert group.call(Model.history) == [[n for n in range(40) if n % 3], [*range(40)]]


def test_a_busy_worker_delays_no_other() -> None:
    """Many calls of an idle worker are answered while another one is in a call."""
    with gate() as (descriptor, open_it), group_of(2) as group:
        busy = group[0].submit(Model.waits, descriptor)
        for number in range(50):
            assert group[1].call(Model.step, number) == [(1, number)]
        assert not busy.done()
        open_it()
        assert busy.result() == [b"x"]


def test_arrays_are_lent() -> None:
    """Results that are kept for ever stop nothing."""
    array = np.arange(1 << 18, dtype=np.float64)
    with group_of(2, max_in_flight=2) as group:
        kept = [group.call(Model.double, array) for _ in range(12)]
    assert all(np.array_equal(answer, 2 * array) for answers in kept for answer in answers)


def test_exceptions_of_workers_arrive_as_themselves() -> None:
    """They arrive as themselves, with cause, rank and traceback; other calls go on."""
    with group_of(2) as group:
        with pytest.raises(ValueError, match="wrong") as caught:
            group[1].call(Model.raises)
        note = "\n".join(caught.value.__notes__)
        assert f"raised by worker 1 (pid {group.pids[1]})" in note
        assert "in raises" in note
        assert "serving.py" not in note
        assert repr(caught.value.__cause__) == "KeyError('the cause')"
        with pytest.raises(ValueError, match="wrong") as caught:
            group.call(Model.raises)
        with pytest.raises(ValueError, match="wrong") as caught:
            group[1].call(Model.raises_in_a_circle)
        assert repr(caught.value.__cause__) == "KeyError('the cause')"
        outcomes = group.submit(Model.raises).outcomes()
        assert [type(outcome) for outcome in outcomes] == [ValueError, ValueError]
        with pytest.raises(AttributeError):
            group.call("no_such_method")
        assert group.call(Model.step, 1) == [(0, 1), (1, 1)]


def test_exceptions_that_refuse_attributes_arrive() -> None:
    """They arrive with their notes and causes, and stop nothing."""
    with group_of(2) as group:
        call = group.submit(Model.raises_frozen)
        assert [type(outcome) for outcome in call.outcomes()] == [Frozen, Frozen]
        with pytest.raises(Frozen) as caught:
            call.result()
        first, second = caught.value.__notes__
        assert "raised by worker" in first
        assert "also raised by worker" in second
        assert isinstance(caught.value.__cause__, Frozen)
        assert group.call(Model.step, 1) == [(0, 1), (1, 1)]


@pytest.mark.parametrize("method", [Model.raises_its_own, Model.returns_a_lambda])
def test_what_cannot_be_sent(method: Callable[[Model], object]) -> None:
    """An exception or a value that cannot be pickled is a WorkerError that names it."""
    with group_of(1) as group:
        with pytest.raises(WorkerError, match="<locals>"):
            group.call(method)
        assert group.call(Model.step, 1) == [(0, 1)]


def test_what_cannot_be_decoded() -> None:
    """It fails its own call alone, wherever it cannot be decoded."""
    with group_of(2) as group:
        after = group.submit(Model.step, 1)
        for workers in (group, group[1]):
            with pytest.raises(ImportError, match="cannot be decoded here"):
                workers.call(Model.step, OnlyIn(os.getpid()))  # in the worker
            failing = workers.submit(Model.returns_what_stays_here)
            beside = group.submit(Model.step, 2)
            with pytest.raises(ImportError, match="cannot be decoded here"):
                failing.result(PATIENCE)
            assert beside.result(PATIENCE) == [(0, 2), (1, 2)]
        assert after.result(PATIENCE) == [(0, 1), (1, 1)]
        with pytest.raises(InvalidType, match="pickled"):
            group.call(Model.step, lambda: None)
        assert group.call(Model.step, 3) == [(0, 3), (1, 3)]


def test_late_answers_are_dropped() -> None:
    """A call that timed out names the late workers; what they answer is nobody else's."""
    with gate() as (descriptor, open_it), group_of(3) as group:
        call = group[1].within(0.05).submit(Model.waits, descriptor)
        with pytest.raises(CallTimedOut, match=r"worker 1 \(pid \d+, in waits\)") as caught:
            call.result()
        assert caught.value.ranks == (1,)
        both = group.submit(Model.step, 5)
        with pytest.raises(CallTimedOut) as caught:
            both.result(timeout=0.05)
        assert caught.value.ranks == (1,)
        open_it()
        assert both.result() == [(0, 5), (1, 5), (2, 5)]
        assert call.result(PATIENCE) == [b"x"]


def test_calls_in_flight_are_limited() -> None:
    """A call waits while a worker owes `max_in_flight` answers, and then was sent to nobody."""
    with gate() as (descriptor, open_it), group_of(2, max_in_flight=2) as group:
        calls = [group[0].submit(Model.waits, descriptor) for _ in range(2)]
        with pytest.raises(CallTimedOut, match=r"no room for step\(\).*worker 0") as caught:
            group.within(0.05).call(Model.step, 1)
        assert caught.value.ranks == (0,)
        for _ in calls:
            open_it()
        assert group.call(Model.history) == [[], []]


def test_threads_share_a_group() -> None:
    """Each gets the answers of its own calls."""
    wrong: list[object] = []

    def use(group: WorkerGroup[Model], thread: int) -> None:
        for number in range(60):
            what = (thread, number)
            rank = number % 2
            if group.call(Model.step, what) != [(0, what), (1, what)]:
                wrong.append(what)
            if group[rank].call(Model.step, what) != [(rank, what)]:
                wrong.append(what)

    with group_of(2) as group:
        threads = [threading.Thread(target=use, args=(group, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


class Interrupt(Exception):
    pass


@pytest.mark.parametrize("kind", [Interrupt, KeyboardInterrupt])
def test_interrupts(kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that raises at any step of a call loses no answer, and makes no worker run a
    call twice."""
    # Python itself swallows what a handler raises in a finalizer, and shows it by this.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    is_on = False

    def interrupt() -> None:
        if is_on:
            raise kind

    sent: list[int] = []
    with group_of(2) as group, alarms(interrupt, every=0.0007):
        for number in range(250):
            try:
                is_on = True
                call = group.submit(Model.step, number)
                is_on = False
            except kind:
                is_on = False
                continue
            finally:
                is_on = False
            sent.append(number)
            try:
                is_on = True
                answers: list[Any] = [*call.result(PATIENCE)]
                is_on = False
            except kind:
                is_on = False
                answers = call.outcomes(PATIENCE)
            assert answers == [(0, number), (1, number)]
        for ran in group.call(Model.history):
            assert len(ran) == len({*ran})
            assert {*sent} <= {*ran}


def test_an_interrupted_wait_stops_no_other_thread() -> None:
    """Wherever a handler raises, another thread can receive."""
    is_on = False

    def interrupt() -> None:
        if is_on:
            raise Interrupt

    raised = 0
    with gate() as (descriptor, open_it), group_of(2) as group, ThreadPoolExecutor(1) as other:
        busy = group[0].submit(Model.waits, descriptor)
        with alarms(interrupt, every=0.0003):
            while raised < 200:
                try:
                    is_on = True
                    while not busy.done():
                        pass
                except Interrupt:
                    is_on = False
                    raised += 1
                answer = other.submit(group[1].call, Model.step, raised)
                assert answer.result(PATIENCE) == [(1, raised)]
        open_it()


class Calling:
    """Calls while it is pickled."""

    def __init__(self, group: WorkerGroup[Model]) -> None:
        self.group = group
        self.error: Exception | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            self.group.call(Model.step, "inner")
        except ConcurrentUse as error:
            self.error = error
        return str, ("outer",)


def test_a_call_inside_another_one_is_refused() -> None:
    """It is refused, while arguments are pickled or in a signal handler; the outer one goes on."""
    with gate() as (descriptor, open_it), group_of(2) as group:
        calling = Calling(group)
        assert group.call(Model.step, calling) == [(0, "outer"), (1, "outer")]
        assert isinstance(calling.error, ConcurrentUse)
        refused: list[BaseException] = []

        def handler() -> None:
            try:
                group.call(Model.step, "inner")
            except ConcurrentUse as error:
                refused.append(error)
                open_it()

        waiting = group[0].submit(Model.waits, descriptor)
        with alarms(handler, every=0.05):
            assert waiting.result(PATIENCE) == [b"x"]
        assert refused
        assert group.call(Model.history) == [["outer"], ["outer"]]


def test_close_finishes_what_was_begun(tmp_path: Path) -> None:
    """Workers run the calls that they have, and then their own `close`."""
    with WorkerGroup(Closing, 2, args=[str(tmp_path)], start_method="fork") as group:
        calls = [group.submit(Closing.step, number) for number in range(3)]
    assert [call.result() for call in calls] == [[(0, n), (1, n)] for n in range(3)]
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["012", "012"]
    assert group.exitcodes == [0, 0]
    with pytest.raises(Closed):
        group.call(Closing.step, 1)
    with pytest.raises(Closed):
        group.statistics()


def test_close_kills_who_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    """After its timeout; the call raises Closed."""
    with gate() as (descriptor, _):
        group = group_of(2)
        call = group[1].submit(Model.waits, descriptor)
        group.close(timeout=0.1)
        assert group.exitcodes == [0, -signal.SIGKILL]
        assert "worker 1" in caplog.text
        with pytest.raises(Closed):
            call.result()
    group.close()
    group.kill()


def test_a_death_while_the_group_closes() -> None:
    """The others still finish what they have."""
    with gate() as (descriptor, open_it):
        group = group_of(2)
        dying, call = group[1].submit(Model.dies), group[0].submit(Model.waits, descriptor)

        def open_late() -> None:
            until(lambda: group._is_closed and 1 in group._table.deaths, "it closes")
            open_it()

        opening = threading.Thread(target=open_late)
        opening.start()
        group.close(PATIENCE)
        opening.join()
        assert call.result() == [b"x"]
        assert group.exitcodes == [0, -signal.SIGKILL]
        with pytest.raises(WorkerDied):
            dying.result()


def test_close_in_another_thread_ends_a_waiting_call() -> None:
    """A call that waits raises Closed."""
    with gate() as (descriptor, _):
        group = group_of(1)
        closing = threading.Timer(0.1, group.kill)
        call = group.submit(Model.waits, descriptor)
        closing.start()
        with pytest.raises((Closed, RuntimeError)):
            call.result(PATIENCE)
        closing.join()


def test_nobody_asks(caplog: pytest.LogCaptureFixture) -> None:
    """A worker's error is logged if the call is dropped without a result."""
    with group_of(1) as group:
        call = group.submit(Model.raises)
        assert group.call(Model.step, 1)
        del call
    assert "nobody asked for the result of raises() of worker 0: ValueError" in caplog.text


def test_tickets_are_text() -> None:
    """A ticket survives JSON; other text is refused."""
    with group_of(1) as group:
        calls, cancels, _ = group._sender.handles(0)
        handles = calls, group._gather.export_handle(0), cancels
        ticket = Ticket(0, 1, *handles)
        assert Ticket.from_json(ticket.to_json()) == ticket
    for text in ("", "[]", "{}", '{"rank": 0}'):
        with pytest.raises(InvalidArgument, match="ticket"):
            Ticket.from_json(text)


def test_idle_groups_cost_nothing() -> None:
    """Neither the workers nor their group run while there is no call."""
    with group_of(2) as group:
        group.call(Model.step, 1)
        before = time.process_time(), group.call(time_of)
        time.sleep(0.3)  # to show that nothing happens
        after = time.process_time(), group.call(time_of)
    assert after[0] - before[0] < 0.1
    assert all(late - early < 0.1 for early, late in zip(before[1], after[1], strict=True))


def time_of(_model: Model) -> float:
    return time.process_time()


def test_late_workers_are_named_with_their_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that has waited for long names what each late worker runs, and where."""
    monkeypatch.setattr("memlane.workers.answers._STACK_SECONDS", 0.05)
    with gate() as (descriptor, open_it), group_of(2) as group:
        late = group[1].submit(Model.waits, descriptor)

        def text() -> str:
            with pytest.raises(CallTimedOut) as caught:
                late.result(timeout=0.05)
            return str(caught.value)

        where = r"\(pid \d+, in waits; Model.waits \(.*roles\.py:\d+\)\)$|no right to trace"
        until(lambda: re.search(where, text()), "the worker waits")  # its Python alone
        open_it()
        assert late.result() == [b"x"]


def test_a_stuck_group_is_named() -> None:
    """Observers see which worker of which group owes an answer, under the factory's name."""

    def awaited() -> set[int | None]:
        waits = [wait for wait in inspect.stuck(0.01) if wait.label == "Model.answers[0]"]
        return {who.pid for wait in waits for who in wait.awaited}

    with gate() as (descriptor, open_it), group_of(1) as group:
        call = group.submit(Model.waits, descriptor)
        thread = threading.Thread(target=call.result)
        thread.start()
        until(lambda: awaited() == {*group.pids}, "the wait is seen")
        open_it()
        thread.join()
    with group_of(1, name="ranks"):
        assert "ranks.calls" in {each.label for each in inspect.segments()}
    with pytest.raises(InvalidArgument, match="name must be"):
        group_of(1, name="no spaces")


@pytest.mark.parametrize("value", [2, "a=b\0"])
def test_an_environment_that_is_refused_changes_nothing(value: Any) -> None:
    before = dict(os.environ)
    changes = {"MEMLANE_TEST": "1", "MEMLANE_OTHER": value}
    with pytest.raises((TypeError, ValueError)), _changed_environment(changes):
        pass
    assert dict(os.environ) == before


def test_a_program_that_start_starts_can_be_interrupted() -> None:
    """SIGINT is blocked for a moment in workers that memlane starts, and not in others."""
    code = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    masks: list[str] = []

    def begin(ticket: Ticket) -> None:
        masks.append(subprocess.check_output([sys.executable, "-c", code], text=True).strip())
        raise LookupError

    with pytest.raises(LookupError):
        WorkerGroup[Any](None, 1, start=begin)
    assert masks == ["set()"]
