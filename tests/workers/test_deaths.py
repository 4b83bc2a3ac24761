"""Deaths of workers and of the group's process: who learns of them, and what is left behind."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memlane import (
    CallTimedOut,
    CorruptMessage,
    InvalidArgument,
    MessageQueue,
    PeerDied,
    Ticket,
    WorkerDied,
    WorkerGroup,
    WrongProcess,
)
from memlane.workers.processes import Process, Starter, shielded
from memlane.workers.serving import _Inbox
from memlane.workers.table import Pending
from memlane.workers.ticket import PLAIN
from tests.support import PATIENCE, assert_in_time, until, until_asleep
from tests.workers.roles import Huge, Model
from tests.workers.test_calls import gate, group_of

ROOT = Path(__file__).parents[2]


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def test_a_death_in_a_call_names_the_worker() -> None:
    """Within a second the call that waits names the worker, and so does the next one."""
    with gate() as (descriptor, _), group_of(3) as group:
        pid = group.pids[1]
        before = group[0].call(Model.step, 1)
        call = group[1:].submit(Model.waits, descriptor)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            WorkerDied, match=r"killed by SIGKILL before it answered waits\(\)"
        ) as caught:
            call.result(PATIENCE)
        assert_in_time(1.0, began)
        assert (caught.value.rank, caught.value.pid, caught.value.exitcode) == (1, pid, -9)
        assert isinstance(caught.value, PeerDied)
        for workers in (group, group[0]):
            with pytest.raises(WorkerDied, match="worker 1"):
                workers.call(Model.step, 2)
        assert before == [(0, 1)]
        group.kill()


@pytest.mark.parametrize(("method", "code"), [(Model.dies, -9), (Model.exits, 5)])
def test_a_worker_ends_itself(method: Any, code: int) -> None:
    """Its exit code is in the error; what it answered before counts."""
    with group_of(2) as group:
        first = group.submit(Model.step, 1)
        with pytest.raises(WorkerDied) as caught:
            group[1].call(method)
        assert (caught.value.rank, caught.value.exitcode) == (1, code)
        assert first.result() == [(0, 1), (1, 1)]
        assert group.exitcodes == [None, code]


def test_a_death_between_calls_raises_in_the_next_one() -> None:
    """The next call raises, and was run by no worker."""
    with group_of(2) as group:
        os.kill(group.pids[0], signal.SIGKILL)
        until(lambda: is_gone(group.pids[0]), "the worker has ended")
        with pytest.raises(WorkerDied, match="worker 0"):
            group.call(Model.step, 1)


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("raises", KeyError, "no such model"),
        ("exits", WorkerDied, "worker 1 .* left with exit code 3 before it was ready"),
        ("crashes", WorkerDied, "worker 1 .* was killed by SIGSEGV before it was ready"),
    ],
)
def test_errors_at_the_start_leave_nothing(fault: str, error: type[Exception], text: str) -> None:
    """The constructor raises them within a second, and leaves nothing."""
    began = time.monotonic()
    with pytest.raises(error, match=text):
        group_of(2, args=[fault])
    assert_in_time(1.0, began)


def test_workers_that_are_not_ready_in_time_are_named() -> None:
    """Workers that are not ready in time are named."""
    with pytest.raises(CallTimedOut, match="workers were not ready: worker 1") as caught:
        WorkerGroup(Model, 2, args=["hangs"], start_method="fork", timeout=0.3)
    assert caught.value.ranks == (1,)


@pytest.mark.parametrize(
    "arguments", [{"world": 0}, {"start_method": "thread"}, {"max_in_flight": 0}]
)
def test_invalid_arguments_start_nothing(arguments: dict[str, Any]) -> None:
    """They are refused, and nothing has started."""
    with pytest.raises(InvalidArgument):
        WorkerGroup(Model, **{"world": 1, "start_method": "fork", **arguments})


def test_a_death_is_noted_while_a_call_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that was sent just after it raises, too."""
    with group_of(2) as group:
        death = WorkerDied(1, group.pids[1], -9, "")
        begin = group._table.begin

        def late(call: Pending, ranks: list[int]) -> list[int]:
            group._table.die(1, death)
            return begin(call, ranks)

        monkeypatch.setattr(group._table, "begin", late)
        call = group.submit(Model.step, 1)
        with pytest.raises(WorkerDied):
            call.result(PATIENCE)


@pytest.mark.parametrize("has_lanes", [False, True])
def test_a_handler_raises_in_an_idle_worker(has_lanes: bool) -> None:
    """It takes no message away: each call gets its own answer."""
    here, there = os.pipe()
    with open(here, "rb", 0) as handled, open(there, "wb", 0), group_of(2) as group:
        if has_lanes:
            group[1].call(Model.step, 0)
        group.call(Model.raises_at, signal.SIGUSR1, there)
        for number in range(1, 4):
            until_asleep(group.pids[1])
            os.kill(group.pids[1], signal.SIGUSR1)
            assert handled.read(1) == b"x"
            until_asleep(group.pids[1])  # beside it, a message might be taken
            assert group.within(PATIENCE).call(Model.step, number) == [(0, number), (1, number)]


def test_a_worker_without_memory_ends_and_is_named() -> None:
    """It tries once more; then it ends, and the calls say so."""
    with group_of(1) as group:
        assert group.within(PATIENCE).call(Model.step, Huge(1)) == [(0, "huge")]
        assert group.within(PATIENCE).call(Model.step, 1) == [(0, 1)]
        with pytest.raises(WorkerDied):
            group.within(PATIENCE).call(Model.step, Huge(1 << 20))


@pytest.mark.parametrize("number", [2, 0])
def test_a_missing_call_ends_its_worker(number: int) -> None:
    """By an error; it would give answers to the wrong calls."""
    with (
        MessageQueue(1, 1, max_chunks=4) as calls,
        MessageQueue.create_from_handle(calls.export_handle(0), 0) as there,
    ):
        calls.enqueue([number, PLAIN, "step", (), {}])
        inbox = _Inbox(0, there, there, lambda key: None)
        with pytest.raises(CorruptMessage, match="is missing"):
            inbox.take()


def test_what_a_worker_starts_ends_with_it() -> None:
    """However the worker ends; and SIGINT is not ignored there."""
    with group_of(2) as group:
        children = group.call(Model.starts_a_child)
        assert "default_int_handler" in group[0].call(Model.interrupt)[0]
        with pytest.raises(WorkerDied):
            group[1].call(Model.dies)
        until(lambda: is_gone(children[1]), "the child of a worker that died has ended")
        assert not is_gone(children[0])
    until(lambda: is_gone(children[0]), "the child of a worker that closed has ended")


def test_the_last_reference_to_a_group_ends_its_workers() -> None:
    """At once, without the cyclic garbage collector."""
    gc.disable()
    try:
        group = group_of(1)
        assert group.call(Model.step, 1) == [(0, 1)]
        assert group[0].call(Model.step, 2) == [(0, 2)]
        (pid,) = group.pids
        del group
        assert is_gone(pid)
    finally:
        gc.enable()


def test_a_forked_child_leaves_the_block() -> None:
    """It ends no worker, and cannot use the group."""
    with group_of(2) as group:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with group:
                    group.call(Model.step, 1)
            except WrongProcess:
                group.close()
                group.kill()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert group.call(Model.step, 1) == [(0, 1), (1, 1)]


DRIVER = """
import os, signal, sys, time
from memlane import WorkerGroup
from tests.workers.roles import Huge, Model

if __name__ == "__main__":
    with WorkerGroup(Model, 2, start_method="fork") as group:
        children = group[0].call(Model.starts_a_child)
        busy = group[1].submit(Model.sleeps, 600)
        print(*group.pids, *children, flush=True)
        if sys.argv[1] == "raises":
            raise SystemExit(7)
        if sys.argv[1] == "leaves":
            os._exit(7)
        signal.pause()
"""


@pytest.mark.parametrize("end", ["raises", "leaves", "SIGINT", "SIGTERM", "SIGKILL"])
def test_the_end_of_the_driver_leaves_no_worker(end: str, tmp_path: Path) -> None:
    """However it ends: no worker, none of their children, and no segment is left."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(
        [sys.executable, script, end],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    with driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 3
        if end.startswith("SIG"):
            driver.send_signal(signal.Signals[end])
        driver.wait(PATIENCE)
    for pid in pids:
        until(partial(is_gone, pid), f"process {pid} has ended")


def test_a_thread_asks_for_the_exit_code_while_another_reaps() -> None:
    """It gets the code, not an error of multiprocessing about a closed process."""
    codes: list[int | None] = []
    asker = threading.Thread(target=lambda: codes.append(process.exitcode))

    class Reaped(ForkProcess):
        def join(self, timeout: float | None = None) -> None:
            super().join(timeout)
            asker.start()
            until_asleep(asker.native_id or 0)

    given = Reaped(target=sys.exit, args=(3,))
    given.start()
    process = Process(0, given)
    process.end(PATIENCE)
    asker.join(PATIENCE)
    assert codes == [3]


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_threads_start_workers(start_method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker gets its own environment, and this process keeps its own."""
    monkeypatch.delenv("MEMLANE_TEST", raising=False)
    both, seen = threading.Barrier(2), list[tuple[str, str | None]]()

    class Slow:
        """A process whose start takes as long as that of the other, if both may start at once."""

        pid = None

        def __init__(self, args: tuple[Any, ...], **_: Any) -> None:
            self.own = args[1].get("MEMLANE_TEST")

        def start(self) -> None:
            with suppress(threading.BrokenBarrierError):
                both.wait(0.1)
            seen.append((self.own, os.environ.get("MEMLANE_TEST")))
            with suppress(threading.BrokenBarrierError):
                both.wait(0.1)

    monkeypatch.setattr(multiprocessing, "get_context", lambda _: SimpleNamespace(Process=Slow))
    starters = [
        Starter(start_method, lambda rank, own=own: {"MEMLANE_TEST": own}, None, (), {})
        for own in "ab"
    ]
    ticket: Any = SimpleNamespace(rank=0)
    with ThreadPoolExecutor(2) as pool:
        for started in [pool.submit(starter, ticket) for starter in starters]:
            started.result()
    kept = [own if start_method == "spawn" else None for own, _ in seen]
    assert [found for _, found in seen] == kept
    assert "MEMLANE_TEST" not in os.environ


class Interrupted(Exception):
    """An error that a signal handler raises."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_handler_raises_while_a_worker_starts(number: signal.Signals) -> None:
    """All are called once the group knows the worker, which it ends. A worker that was forked has
    them, too."""
    pids: list[int] = []
    handled: list[int] = []

    def start(ticket: Ticket) -> Any:
        process = multiprocessing.get_context("fork").Process(target=signal.pause)
        process.start()
        pids.append(process.pid or 0)
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGUSR2)
        return process

    def handle(number: int, frame: object) -> None:
        handled.append(number)
        raise Interrupted

    signals = {number, signal.SIGUSR2}
    before = {each: signal.signal(each, handle) for each in signals}
    try:
        with pytest.raises(Interrupted):
            WorkerGroup(None, 2, start=start)
        assert {*handled} == signals
        assert {signal.getsignal(each) for each in signals} == {handle}
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert [is_gone(pid) for pid in pids] == [True]


def test_a_handler_raises_while_a_worker_is_replaced() -> None:
    """The process that was started is the worker; no second one gets its place."""
    alarms: list[int] = []

    def env(rank: int) -> dict[str, str]:
        if alarms:
            signal.raise_signal(alarms.pop())
        return {}

    def handle(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with group_of(2, on_death="replace", env=env) as group:
            victim = group.pids[1]
            alarms.append(signal.SIGUSR1)
            os.kill(victim, signal.SIGKILL)

            def is_interrupted() -> bool:
                with suppress(WorkerDied):  # of what it had not answered
                    group.call(Model.step, 1)
                return False

            with pytest.raises(Interrupted):
                until(is_interrupted)
            successor = group.pids[1]
            assert successor != victim
            group.call(Model.step, 1)
            assert group.pids[1] == successor
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_raises_while_handlers_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that came meanwhile are handled all the same, then and later."""
    handled: list[int] = []
    put_back = signal.signal

    def handle(number: int, frame: object) -> None:
        handled.append(number)
        raise Interrupted

    def interrupted(number: int, handler: Any) -> Any:
        if handler is handle:
            raise Interrupted  # by another signal's handler
        return put_back(number, handler)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(signal, "signal", interrupted)
            with pytest.raises(Interrupted), shielded(blocks_interrupts=True):
                signal.raise_signal(signal.SIGUSR1)
        assert handled == [signal.SIGUSR1]
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGUSR1)
        assert len(handled) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_second_signal_ends_a_start_that_hangs() -> None:
    handled: list[int] = []

    def hang_until_interrupted() -> None:
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGUSR1)

    def handle(number: int, frame: object) -> None:
        handled.append(number)
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(Interrupted), shielded(blocks_interrupts=True):
            hang_until_interrupted()
        assert len(handled) == 2
        assert signal.getsignal(signal.SIGUSR1) is handle
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_a_start_installs_stays() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)

    def other(number: int, frame: object) -> None: ...

    try:
        with shielded(blocks_interrupts=True):
            signal.signal(signal.SIGUSR1, other)
        assert signal.getsignal(signal.SIGUSR1) is other
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_of_a_worker_that_was_forked() -> None:
    """It is that of the group's process, which has put another there for the time of the start."""

    def handle(number: int, frame: object) -> None:
        os._exit(7)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with group_of(1) as group:
            os.kill(group.pids[0], signal.SIGUSR1)
            with pytest.raises(WorkerDied, match="exit code 7"):
                group.check(PATIENCE)
    finally:
        signal.signal(signal.SIGUSR1, before)


FORKSERVER = """
import multiprocessing, signal
from memlane import WorkerGroup

def worker(rank, world):
    pass

def show():
    print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

if __name__ == "__main__":
    with WorkerGroup(worker, 1, start_method="forkserver"):
        pass
    process = multiprocessing.get_context("forkserver").Process(target=show)
    process.start()
    process.join()
"""


def test_other_children_of_the_forkserver_get_signals(tmp_path: Path) -> None:
    """Although the group has started it."""
    script = tmp_path / "driver.py"
    script.write_text(FORKSERVER)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
