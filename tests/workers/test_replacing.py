"""Workers that are replaced: by themselves or on demand, recovered before any other call."""

import os
import signal
import threading
import time
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from memlane import CallTimedOut, InvalidArgument, Ticket, WorkerDied, WorkerGroup, serve
from tests.support import PATIENCE, assert_in_time, until
from tests.workers.roles import Model
from tests.workers.test_calls import gate, group_of


@pytest.mark.parametrize("on_death", ["replace", "restart"])
def test_a_death_is_healed(on_death: str) -> None:
    """The call that waits raises; before the next one the dead worker, or all, are replaced."""
    with gate() as (descriptor, _), group_of(3, on_death=on_death) as group:
        first = group.pids
        group.call(Model.step, 0)
        call = group[1].submit(Model.waits, descriptor)
        began = time.monotonic()
        os.kill(first[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="worker 1"):
            call.result(PATIENCE)
        assert_in_time(1.0, began)
        assert group.call(Model.step, 1) == [(0, 1), (1, 1), (2, 1)]
        changed = [rank for rank in range(3) if group.pids[rank] != first[rank]]
        assert changed == ([1] if on_death == "replace" else [0, 1, 2])
        assert group.generation == len(changed)
        old = [[0, 1], [1], [0, 1]] if on_death == "replace" else [[1], [1], [1]]
        assert group.call(Model.history) == old
        assert group[1].call(Model.step, 2) == [(1, 2)]
        with pytest.raises(WorkerDied):
            group[0].call(Model.dies)
        assert group[2].call(Model.step, 3) == [(2, 3)]
        assert group.exitcodes == [None, None, None]


def test_replaced_workers_get_their_state_first() -> None:
    """Replaced workers get their state before any other call; if that raises, it is done again."""
    seen: list[list[int]] = []

    def recover(group: WorkerGroup[Model], ranks: list[int]) -> None:
        seen.append(ranks)
        if len(seen) == 1:
            raise LookupError("no state yet")
        group[ranks].call(Model.step, "state")

    with group_of(2, on_death="replace", recover=recover) as group:
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            group.check(PATIENCE)
        with pytest.raises(LookupError):
            group.call(Model.step, 1)
        assert group.call(Model.step, 2) == [(0, 2), (1, 2)]
        assert group.call(Model.history) == [[2], ["state", 2]]
        assert seen == [[1], [1]]
        group.check()


def test_a_living_worker_can_be_replaced() -> None:
    """A living worker is killed, and its unanswered calls raise."""
    with gate() as (descriptor, _), group_of(2) as group:
        first = group.pids
        call = group[0].submit(Model.waits, descriptor)
        group.replace(0)
        with pytest.raises(WorkerDied, match="worker 0"):
            call.result()
        assert group.call(Model.step, 1) == [(0, 1), (1, 1)]
        assert (group.pids[0] != first[0], group.pids[1]) == (True, first[1])
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            group.check(PATIENCE)
        group.replace(1, 0)
        assert group.call(Model.step, 2) == [(0, 2), (1, 2)]
        with pytest.raises(IndexError):
            group.replace(2)
    with pytest.raises(InvalidArgument, match="on_death"):
        group_of(1, on_death="ignore")


@pytest.mark.parametrize("on_death", ["raise", "replace"])
def test_replacing_one_while_another_is_dead(on_death: str) -> None:
    """The living one is recovered first, the dead one when it is replaced."""
    seen: list[list[int]] = []

    def recover(group: WorkerGroup[Model], ranks: list[int]) -> None:
        seen.append(ranks)
        group[ranks].call(Model.step, "state")

    with group_of(2, on_death=on_death, recover=recover) as group:
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            group.check(PATIENCE)
        group.replace(0)
        if on_death == "raise":
            with pytest.raises(WorkerDied, match="worker 1"):
                group.call(Model.history)
            group.replace(1)
        assert group.call(Model.history) == [["state"], ["state"]]
        assert seen == [[0], [1]]


@pytest.mark.parametrize("on_death", ["raise", "replace"])
def test_a_start_that_raises(on_death: str) -> None:
    """The worker stays dead: it is not waited for, not recovered, and can be replaced again."""
    faults: list[Exception] = []
    seen: list[list[int]] = []

    def env(rank: int) -> dict[str, str]:
        if faults:
            raise faults[0]
        return {}

    def recover(group: WorkerGroup[Model], ranks: list[int]) -> None:
        seen.append(ranks)
        group[ranks].call(Model.step, "state")

    with group_of(2, env=env, on_death=on_death, recover=recover) as group:
        group[1].call(Model.step, 0)  # by a lane
        faults.append(BlockingIOError("no more processes"))
        with pytest.raises(BlockingIOError):
            group.replace(1)
        with pytest.raises(WorkerDied if on_death == "raise" else BlockingIOError):
            group.call(Model.step, 0)
        faults.clear()
        group.replace(0)
        if on_death == "raise":
            with pytest.raises(WorkerDied, match="worker 1"):
                group.call(Model.step, 0)
            group.replace(1)
        assert group.call(Model.step, 1) == [(0, 1), (1, 1)]
        assert seen == [[0], [1]]


def test_a_process_that_never_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call says so; nobody is asked to recover it."""
    seen: list[list[int]] = []
    targets: list[Any] = [serve, signal.pause, serve]

    def begin(ticket: Ticket) -> ForkProcess:
        target = targets.pop(0)
        process = ForkProcess(target=target, args=(ticket, Model) if target is serve else ())
        process.start()
        return process

    def recover(group: WorkerGroup[Model], ranks: list[int]) -> None:
        seen.append(ranks)

    group: WorkerGroup[Model]
    with WorkerGroup(None, 1, start=begin, timeout=PATIENCE, recover=recover) as group:
        monkeypatch.setattr(group._healing, "_timeout", 0.05)
        with pytest.raises(CallTimedOut, match="workers were not ready"):
            group.replace(0)
        with pytest.raises(CallTimedOut, match="workers were not ready: worker 0"):
            group.call(Model.step, 1)
        assert not seen
        monkeypatch.setattr(group._healing, "_timeout", PATIENCE)
        group.replace(0)
        assert group.call(Model.step, 1) == [(0, 1)]
        assert seen == [[0]]


class Fragile(Model):
    """It ends, or raises, at each start but the first."""

    def __init__(self, rank: int, world: int, folder: str, raises: bool) -> None:
        super().__init__(rank, world)
        with open(f"{folder}/{rank}", "a+") as starts:
            starts.write("x")
        if rank == 1 and len(Path(f"{folder}/{rank}").read_text()) > 1:
            if raises:
                raise OSError("no memory")
            os._exit(4)


@pytest.mark.parametrize("raises", [False, True])
def test_a_worker_that_fails_at_each_start_is_given_up(raises: bool, tmp_path: Path) -> None:
    """A worker that fails at each start is given up after three."""
    with WorkerGroup(
        Fragile,
        2,
        args=[str(tmp_path), raises],
        start_method="fork",
        on_death="replace",
    ) as group:
        os.kill(group.pids[1], signal.SIGKILL)
        for _ in range(6):
            with pytest.raises((WorkerDied, OSError)) as caught:
                group.call(Fragile.step, 1)
            if raises and isinstance(caught.value, OSError):
                assert "no memory" in str(caught.value)
        assert isinstance(caught.value, WorkerDied)
        assert caught.value.exitcode == (1 if raises else 4)
        assert len((tmp_path / "1").read_text()) == 4
        assert len((tmp_path / "0").read_text()) == 1


def test_threads_call_while_workers_are_replaced() -> None:
    """Each call is answered, or raises WorkerDied; none hangs."""
    failures: list[object] = []
    died = [0]
    is_over = threading.Event()

    def use(group: WorkerGroup[Any], thread: int) -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            try:
                rank = number % 2
                if group.call(Model.step, number) != [(0, number), (1, number)]:
                    failures.append(number)
                if group[rank].call(Model.step, number) != [(rank, number)]:
                    failures.append(number)
            except WorkerDied:
                died[0] += 1
            except BaseException as error:
                failures.append(error)
                raise

    def is_replaced(victim: int) -> bool:
        return group.generation > victim or bool(failures)

    with group_of(2, on_death="replace") as group:
        threads = [threading.Thread(target=use, args=(group, number)) for number in range(3)]
        for thread in threads:
            thread.start()
        for victim in range(6):
            os.kill(group.pids[victim % 2], signal.SIGKILL)
            until(partial(is_replaced, victim), "it is replaced")
        is_over.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
    assert not failures
