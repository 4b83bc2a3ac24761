"""Engines in which nothing moves: which processes belong to one, and which of them are at rest."""

import pytest

from memlane._base.processes import Condition
from memlane.inspect.segment import Participant, Segment
from memlane.inspect.silence import below, engines_in, kin, seen_as
from memlane.inspect.stacks import Frame, NoStack, Stack, Thread

pytestmark = pytest.mark.unit

NOW = 1000.0
ENGINE, FIRST, SECOND = 10, 11, 12
RUNS = Condition("running", "running")


def who(pid: int, ago: float, activity: str = "elsewhere") -> Participant:
    return Participant(
        "writer", None, pid, 0.0, "running", last_progress=NOW - ago, start_ticks=pid,
        activity=activity,  # type: ignore[arg-type]
    )  # fmt: skip


def queue(name: str, *people: Participant, answers_to: str | None = None) -> Segment:
    return Segment(
        name, "queue", False, False, (), (), 0, 0, 0.0,
        participants=people, id=name, answers_to=answers_to,
    )  # fmt: skip


def test_two_that_write_to_each_other_are_an_engine_and_their_readers_belong_to_it() -> None:
    (engine,) = engines_in(
        [
            queue("w", who(ENGINE, 9), who(FIRST, 8, "waiting"), who(SECOND, 7, "waiting")),
            queue("a", who(FIRST, 6), who(ENGINE, 5)),
        ],
        NOW,
    )
    assert engine.queues == ("w", "a")
    assert engine.members == {ENGINE, FIRST, SECOND}
    assert engine.waiting == {FIRST, SECOND}
    assert engine.seconds == pytest.approx(5)


def test_a_queue_in_one_direction_is_no_engine() -> None:
    """Its writer may take as long as it likes."""
    assert engines_in([queue("w", who(ENGINE, 9), who(FIRST, 8))], NOW) == []


def test_two_engines_are_told_apart() -> None:
    found = engines_in(
        [
            queue("w", who(ENGINE, 9), who(FIRST, 9)),
            queue("a", who(FIRST, 9), who(ENGINE, 9)),
            queue("x", who(20, 3), who(21, 3)),
            queue("y", who(21, 3), who(20, 3)),
        ],
        NOW,
    )
    assert [(each.members, each.seconds) for each in found] == [
        ({ENGINE, FIRST}, 9.0),
        ({20, 21}, 3.0),
    ]


def test_the_kin_of_a_process_runs_the_same_program() -> None:
    """The server above an engine and a worker below it run the same program; a shell does not, and
    what else the server has started is not the engine's, nor is a launcher above the server, or
    above processes that do not call themselves an engine's."""
    parents = {2: 1, 3: 2, 4: 3, 5: 4, 6: 3, 7: 4}
    programs = dict.fromkeys((2, 3, 4, 5, 6), "python") | {1: "init", 7: "sh"}
    assert kin([4], parents, programs.get, {4, 5}) == {3, 4, 5}
    assert kin([4], parents, programs.get, set()) == {4, 5}
    assert below([3], parents, programs.get) == {3, 4, 5, 6}
    assert kin([5], parents, {}.get, {5}) == {5}


def thread(*calls: str, is_main: bool = True, number: int = 1) -> Thread:
    """Calls as `name file`, the innermost first."""
    return Thread("T", is_main, tuple(map(frame, calls)), number)


def frame(call: str) -> Frame:
    name, file = call.split()
    return Frame(name, file, 1)


@pytest.mark.parametrize(
    "calls",
    [
        ["Condition.wait threading.py", "Queue.get queue.py", "step core.py"],
        ["Poller.poll zmq/sugar/poll.py", "serve core.py"],
        ["select selectors.py", "_run_once asyncio/base_events.py", "main app.py"],
        ["run uvloop/__init__.py", "main app.py"],
        ["acquire_read vllm/distributed/device_communicators/shm_broadcast.py", "loop w.py"],
        ["dequeue memlane/broadcast/queue.py", "loop w.py"],
        ["Connection._recv multiprocessing/connection.py", "monitor w.py"],
    ],
)
def test_a_thread_that_waits_for_work_is_at_rest(calls: list[str]) -> None:
    one = thread(*calls)
    assert one.is_at_rest
    assert one.resting_in == frame(calls[-1])


def test_frames_of_c_are_passed_over() -> None:
    one = thread("futex libc.so.6", "Queue.get queue.py", "0x1 python3", "step core.py")
    assert one.resting_in == frame("step core.py")
    assert not thread("futex libc.so.6", "step core.py").is_at_rest


@pytest.mark.parametrize(
    "calls",
    [
        ["schedule scheduler.py", "step core.py"],
        ["get my/queue.py"],
        ["Condition.wait threading.py", "result concurrent/futures/_base.py", "step core.py"],
        ["put app.py", "Thread.run threading.py"],
        ["SocketIO.readinto socket.py", "ask client.py"],
    ],
)
def test_a_thread_in_other_code_is_not(calls: list[str]) -> None:
    assert not thread(*calls).is_at_rest


def test_a_process_is_at_rest_if_all_its_threads_are() -> None:
    rest = thread("Condition.wait threading.py", "Queue.get queue.py", "step core.py")
    sleeper = thread("report monitor.py", is_main=False, number=7)
    for stack, sleeping, expected in (
        ((rest,), set[int](), True),
        ((rest, sleeper), set(), False),
        ((rest, sleeper), {7}, True),  # between two rounds of what it does
        ((thread("main app.py"),), {1}, False),  # the main thread has nothing else to do
    ):
        seen = seen_as(9, "", RUNS, Stack(stack), waits=False, sleeping=frozenset(sleeping))
        assert seen.is_at_rest is expected
        assert bool(seen.active) is not expected


def test_without_a_stack_its_slot_or_the_kernel_may_say_that_it_waits() -> None:
    none = NoStack("no right")
    lock = Condition("running", "asleep", "futex_wait_queue")
    poll = Condition("running", "asleep", "do_sys_poll")
    assert seen_as(9, "", lock, none, waits=False).is_at_rest is None
    assert seen_as(9, "", lock, none, waits=True).is_at_rest is True
    assert seen_as(9, "", poll, none, waits=False).is_at_rest is True
    stopped = Condition("stopped", "stopped")
    assert seen_as(9, "", stopped, none, waits=True).is_at_rest is False
