"""Groups in event loops: the loop goes on whatever a call waits for."""

import asyncio
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from memlane import CallTimedOut, Closed, WorkerDied, WorkerGroup
from tests.support import PATIENCE
from tests.workers.roles import Model
from tests.workers.test_calls import gate, group_of

T = TypeVar("T")


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs it in a loop, which fails if it hangs."""
    return asyncio.run(asyncio.wait_for(main(), PATIENCE))


async def turns_until(awaited: Awaitable[object]) -> int:
    """Returns how often another task had its turn until that was done."""
    task, turns = asyncio.ensure_future(awaited), 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    await task
    return turns


def test_calls_are_awaited() -> None:
    """Answers, exceptions and steps of streams are those of calls; several tasks wait at once."""

    async def main() -> None:
        assert await group.acall(Model.step, 1) == [(0, 1), (1, 1)]
        assert await group[1].acall("step", 2) == [(1, 2)]
        calls = [group.submit(Model.step, number) for number in range(3)]
        assert await asyncio.gather(*calls, calls[0]) == [[(0, n), (1, n)] for n in (0, 1, 2, 0)]
        many = [group[n % 2].acall(Model.step, n) for n in range(40)]  # more than may be in flight
        assert await asyncio.gather(*many) == [[(n % 2, n)] for n in range(40)]
        with pytest.raises(ValueError, match="wrong"):
            await group[1].acall(Model.raises)
        steps = [items async for items in group.stream(Model.counts, 3)]
        assert steps == [[(0, n), (1, n)] for n in range(3)]
        assert (await group.acall(Model.history))[0][-1] == "ended"

    with group_of(2, max_in_flight=4) as group:
        run(main)
        run(main)  # in another loop
        assert group.call(Model.step, 1) == [(0, 1), (1, 1)]


def test_the_loop_goes_on() -> None:
    """While a worker computes, while it owes too many answers, and while one is replaced."""

    async def main() -> None:
        busy = [group[0].submit(Model.waits, descriptor) for _ in range(2)]
        full = asyncio.ensure_future(group[0].acall(Model.step, 1))
        assert await group[1].acall(Model.step, 2) == [(1, 2)]
        assert not full.done()
        with pytest.raises(CallTimedOut, match=r"no room for step\(\)"):
            await group[0].within(0.05).acall(Model.step, 3)
        late = group[1].within(0.05).submit(Model.waits, descriptor)
        with pytest.raises(CallTimedOut, match=r"no answer to waits\(\).*worker 1"):
            await late
        for _ in range(3):
            open_it()
        assert await asyncio.gather(*busy, full) == [[b"x"], [b"x"], [(0, 1)]]
        assert await asyncio.to_thread(late.result, PATIENCE) == [b"x"]
        with pytest.raises(WorkerDied):
            await group[1].acall(Model.dies)
        assert await turns_until(group.acall(Model.step, 4)) > 20  # a worker is started meanwhile

    with gate() as (descriptor, open_it), group_of(2, max_in_flight=2, on_death="replace") as group:
        run(main)
        assert group.call(Model.history) == [[1, 4], [4]]


def test_cancelled_calls_leave_the_workers_going() -> None:
    """The workers go on, and their answers are dropped; one that waited for room was not sent."""

    async def main() -> None:
        call = group[0].submit(Model.waits, descriptor)
        for awaited in (
            call,
            group[0].acall(Model.step, "sent"),
            group[0].acall(Model.step, "not"),
        ):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(awaited, 0.02)
        open_it()
        assert await call == [b"x"]
        assert await group[0].acall(Model.history) == [["sent"]]

    with gate() as (descriptor, open_it), group_of(2, max_in_flight=2) as group:
        run(main)


def test_a_waiting_coroutine_gets_worker_died_or_closed() -> None:
    """A coroutine that waits gets WorkerDied, or Closed."""

    async def main() -> None:
        waits = asyncio.ensure_future(group[0].acall(Model.waits, descriptor))
        await asyncio.sleep(0)
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await waits
        await asyncio.to_thread(group.replace, 0)
        waits = asyncio.ensure_future(group[0].acall(Model.waits, descriptor))
        await asyncio.sleep(0)
        await asyncio.to_thread(group.kill)
        with pytest.raises((Closed, WorkerDied)):
            await waits

    with gate() as (descriptor, _), group_of(2) as group:
        run(main)


def test_loops_and_threads_share_a_group() -> None:
    """Whichever receives an answer, its own caller gets it."""

    async def tasks(group: WorkerGroup[Model], name: str) -> None:
        async def one(number: int) -> None:
            assert await group.acall(Model.step, (name, number)) == [
                (rank, (name, number)) for rank in range(2)
            ]

        for number in range(0, 60, 3):
            await asyncio.gather(*(one(number + each) for each in range(3)))

    def calls(group: WorkerGroup[Model]) -> None:
        for number in range(60):
            assert group.call(Model.step, number) == [(0, number), (1, number)]

    with group_of(2) as group, ThreadPoolExecutor(4) as threads:
        working = [threads.submit(run, lambda n=n: tasks(group, n)) for n in "ab"]
        working += [threads.submit(calls, group) for _ in range(2)]
        for each in working:
            each.result(PATIENCE)


def test_a_waiting_loop_rests() -> None:
    """It does not run while there is no answer, though another thread receives."""

    async def main() -> float:
        waits = [asyncio.ensure_future(group[0].acall(Model.waits, descriptor))]
        thread = threading.Thread(target=lambda: group.call(Model.sleeps, 0.2))
        thread.start()
        await asyncio.sleep(0)
        before = time.process_time()
        time_is_over = asyncio.get_running_loop().time() + 0.3
        while asyncio.get_running_loop().time() < time_is_over:
            await asyncio.sleep(0.05)  # to show that nothing happens
        used = time.process_time() - before
        open_it()
        await asyncio.gather(*waits)
        await asyncio.to_thread(thread.join)
        return used

    with gate() as (descriptor, open_it), group_of(1) as group:
        assert run(main) < 0.1


class Slow:
    """A worker whose start waits for a byte, but for the first two."""

    def __init__(self, rank: int, _world: int, descriptor: int) -> None:
        self.rank = rank
        os.read(descriptor, 1)

    def number(self) -> int:
        return self.rank


def test_a_group_that_is_dropped_while_it_is_healed_is_healed_first() -> None:
    """Its workers end then, and none is started for a group that has gone."""
    here, there = os.pipe()
    recovered: list[list[int]] = []

    async def heals() -> "weakref.ref[object]":
        os.write(there, b"xx")
        group = WorkerGroup(
            Slow,
            2,
            args=[here],
            start_method="fork",
            on_death="replace",
            recover=lambda _, ranks: recovered.append(ranks),
            timeout=PATIENCE,
        )
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            group.check(PATIENCE)
        call = asyncio.create_task(group.acall(Slow.number))
        before = group.generation
        while group.generation == before:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        left = weakref.ref(group)
        del group, call
        gc.collect()
        assert left() is not None
        os.write(there, b"x")
        return left

    left = asyncio.run(heals())
    gc.collect()
    assert left() is None
    assert recovered == [[0]]
    os.close(here)
    os.close(there)
