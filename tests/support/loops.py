"""Event loops of each kind, and what tests do with descriptors."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Any

import pytest

from memlane import MessageQueue
from tests.support.waiting import PATIENCE

uvloop = pytest.importorskip("uvloop")
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


def is_readable(queue: MessageQueue, seconds: float = 0) -> bool:
    return bool(select.select([queue], [], [], seconds)[0])
