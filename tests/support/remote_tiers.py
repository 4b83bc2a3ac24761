"""Tiers on servers, for tests: blocks by number, and what all of these tiers promise beside
`memlane.tiers.conformance`."""

import gc
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from memlane import Closed
from memlane.tiers.conformance import content, key, wait_for
from memlane.tiers.remote import RemoteTier
from memlane.tiers.tier import Done
from tests.support import until

ROW = 4096


def rows_of(count: int, row_bytes: int = ROW) -> np.ndarray[Any, Any]:
    return np.stack([content(number, row_bytes) for number in range(count)])


def store(tier: RemoteTier, *numbers: int) -> Done:
    return wait_for(tier, tier.store([key(number) for number in numbers], [*numbers]))


def load(tier: RemoteTier, *numbers: int, timeout: float | None = None) -> Done:
    return wait_for(tier, tier.load([key(number) for number in numbers], [*numbers], timeout))


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
        thread.join(20)
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
