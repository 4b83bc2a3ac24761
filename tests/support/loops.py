"""Event loops of each kind, and what tests do with descriptors."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import select
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from memlane import Closed, MessageQueue, TimedOut
from tests.support.missing import package
from tests.support.waiting import PATIENCE

uvloop = package("uvloop")
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as _first:
    _first.run(asyncio.sleep(0))  # makes a pipe, which stays as long as the process

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def in_loop(kind: str) -> Callable[[Any], Any]:
    """Runs a coroutine in a new loop of that kind."""

    def run(coroutine: Any) -> Any:
        with asyncio.Runner(loop_factory=LOOPS[kind]) as runner:
            return runner.run(asyncio.wait_for(coroutine, PATIENCE))

    return run


async def turns() -> None:
    """Lets the loop run until all of its tasks wait for what comes from elsewhere."""
    for _ in range(20):
        await asyncio.sleep(0)


async def receive_and_cancel(reader: MessageQueue[int], count: int) -> list[int]:
    """Awaits so often and more, until it got some, and cancels at random moments: while it waits,
    while a message comes, before it has begun. Returns what it got."""
    dice, received = random.Random(7), list[int]()
    for number in itertools.count():
        if number >= count and len(received) > 10:
            break
        task = asyncio.create_task(reader.adequeue())
        await asyncio.sleep(dice.choice([0, 0, 1e-5, 1e-4, 1e-3]) * dice.random())
        task.cancel()
        with suppress(asyncio.CancelledError):
            received.append(await task)
        if number % 3 == 0:  # it is free at once
            with suppress(TimedOut):
                received.append(reader.dequeue(timeout=0))
    return received


async def wait_and_close(reader: MessageQueue, close: Callable[[], object]) -> None:
    """Awaits, and hears that it is closed meanwhile."""
    asyncio.get_running_loop().call_later(0.05, close)
    for _ in range(2):
        with pytest.raises(Closed):
            await reader.adequeue()


def move_between_loops(reader: MessageQueue) -> None:
    """Awaits in many loops, and keeps no descriptor of those that are closed or never ran again."""
    before = 0
    for number in range(20):
        loops = [asyncio.new_event_loop() for _ in range(2)]
        for loop in loops:
            with pytest.raises(TimedOut):
                loop.run_until_complete(reader.adequeue(timeout=0.001))
        for loop in loops:
            loop.close()
        del loop, loops
        gc.collect()
        if number == 2:
            before = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) <= before


def is_readable(queue: MessageQueue, seconds: float = 0) -> bool:
    return bool(select.select([queue], [], [], seconds)[0])
