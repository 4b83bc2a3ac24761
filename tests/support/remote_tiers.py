"""Tiers on servers, for tests: blocks by number, and what all of these tiers promise beside
`memlane.tiers.conformance`."""

import gc
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from memlane import Closed, SystemFault
from memlane._base.deadline import Deadline
from memlane.tiers.conformance import content, key, wait_for
from memlane.tiers.remote.tier import RemoteTier
from memlane.tiers.remote.transport import Refusal, Transport
from memlane.tiers.tier import Done
from tests.support import PATIENCE, until

ROW = 4096


def rows_of(count: int, row_bytes: int = ROW) -> np.ndarray[Any, Any]:
    return np.stack([content(number, row_bytes) for number in range(count)])


def store(tier: RemoteTier, *numbers: int, timeout: float | None = PATIENCE) -> Done:
    return wait_for(tier, tier.store([key(number) for number in numbers], [*numbers], timeout))


def load(tier: RemoteTier, *numbers: int, timeout: float | None = PATIENCE) -> Done:
    return wait_for(tier, tier.load([key(number) for number in numbers], [*numbers], timeout))


def forgets(tier: RemoteTier, number: int) -> bool:
    """Has it forgotten; False if the server does not answer."""
    try:
        tier.forget([key(number)])
    except SystemFault:
        return False
    return True


def keep_many_blocks(opened: Callable[[Any], RemoteTier]) -> None:
    """Some hundreds at a time, of a size that fits nothing; another tier finds them."""
    rows = rows_of(300, 10_001)
    expected = rows.copy()
    with opened(rows) as tier:
        assert store(tier, *range(300)).ok.all()
        rows[:] = 0
        assert load(tier, *range(300)).ok.all()
        np.testing.assert_array_equal(rows, expected)
        seen = tier.statistics()
        assert (seen.stored, seen.loaded, seen.missed, seen.queue) == (300, 300, 0, 0)
    with opened(rows) as again:
        rows[:] = 0
        assert load(again, *range(300)).ok.all()
        np.testing.assert_array_equal(rows, expected)


def close_by_several_threads(opened: Callable[[Any], RemoteTier]) -> None:
    """At once, and beside other calls: all return, or raise Closed."""
    tier = opened(rows_of(4))
    tier.store([key(number) for number in range(4)], [0, 1, 2, 3])
    failures: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except Closed:
            pass
        except BaseException as error:
            failures.append(error)

    calls = [
        *(tier.close, tier.close, tier.drain, tier.poll, tier.clear),
        partial(tier.has, [key(1)]),
        partial(tier.forget, [key(2)]),
        partial(tier.load, [key(1)], [1]),
    ]
    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert not failures
    with pytest.raises(Closed):
        tier.poll()


def drop_without_close(
    opened: Callable[[Any], RemoteTier], is_over: Callable[[], bool] = lambda: True
) -> None:
    """In a cycle, with work under way: its threads end, and the rows are free."""
    memory = bytearray(4 * ROW)
    tier = opened(memoryview(memory).cast("B", (4, ROW)))
    cycle: list[object] = [tier]
    cycle.append(cycle)
    tier.store([key(1)], [1])
    del tier, cycle
    gc.collect()

    def has_ended() -> bool:
        threads = [thread for thread in threading.enumerate() if "memlane-tier" in thread.name]
        return not threads and is_over()

    until(has_ended, "its threads have ended")
    memory.extend(b"x")


class MemoryTransport(Transport):
    """A connection to a server that is a dictionary.

    Attributes:
        values: the server's; connections share it.
        pause: seconds that each call takes.
    """

    pause = 0.0

    def __init__(self, values: dict[bytes, bytes]) -> None:
        self.values = values

    def ask(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
        time.sleep(self.pause)
        return [name in self.values for name in names]

    def put(
        self, names: Sequence[bytes], values: Sequence[tuple[bytes, memoryview]], deadline: Deadline
    ) -> list[Refusal | None]:
        time.sleep(self.pause)
        for name, (header, row) in zip(names, values, strict=True):
            self.values.setdefault(name, header + bytes(row))
        return [None] * len(names)

    def get(
        self, names: Sequence[bytes], into: Sequence[memoryview], deadline: Deadline
    ) -> list[int | Refusal]:
        time.sleep(self.pause)
        found: list[int | Refusal] = []
        for name, memory in zip(names, into, strict=True):
            value = self.values.get(name)
            found.append(-1 if value is None else len(value))
            if value is not None and len(value) == memory.nbytes:
                memory[:] = value
        return found

    def remove(self, names: Sequence[bytes], deadline: Deadline) -> None:
        for name in names:
            self.values.pop(name, None)

    def clear(self, prefix: bytes, deadline: Deadline) -> None:
        for name in [*self.values]:
            if name.startswith(prefix):
                del self.values[name]

    def close(self) -> None:
        pass


def tier_in_memory(
    rows: Any, made: Callable[[dict[bytes, bytes]], Transport] = MemoryTransport, **options: Any
) -> RemoteTier:
    """A remote tier on a server of its own."""
    values: dict[bytes, bytes] = {}

    def connect(_: Deadline) -> Transport:
        return made(values)

    settings: dict[str, Any] = {"prefix": b"test:", "namespace": b"", "timeout": PATIENCE}
    options = settings | {"connections": 2} | options
    return RemoteTier(rows, connect, connect, **options)
