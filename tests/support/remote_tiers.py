"""Tiers on servers, for tests: blocks by number, and what all of these tiers promise beside
`memlane.tiers.conformance`."""

import contextlib
import gc
import logging
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from memlane import Closed, InvalidArgument, InvalidType, SystemFault
from memlane._base.deadline import Deadline
from memlane.tiers.conformance import content, key, wait_for
from memlane.tiers.remote.tier import RemoteTier
from memlane.tiers.remote.transport import Refusal, Transport
from memlane.tiers.tier import Done
from tests.support import PATIENCE, assert_in_time, until
from tests.support.servers import Server

ROW = 4096


def rows_of(count: int, row_bytes: int = ROW) -> np.ndarray[Any, Any]:
    return np.stack([content(number, row_bytes) for number in range(count)])


def store(tier: RemoteTier, *numbers: int, timeout: float | None = PATIENCE) -> Done:
    return wait_for(tier, tier.store([key(number) for number in numbers], [*numbers], timeout))


def load(tier: RemoteTier, *numbers: int, timeout: float | None = PATIENCE) -> Done:
    return wait_for(tier, tier.load([key(number) for number in numbers], [*numbers], timeout))


class Place:
    """A server, and what opens a tier on it: the class, its first arguments, and options."""

    def __init__(
        self, server: Server, kind: Callable[..., RemoteTier], *arguments: str, **options: Any
    ) -> None:
        self.server, self.kind, self.arguments, self.options = server, kind, arguments, options

    def tier(self, rows: Any, **options: Any) -> RemoteTier:
        return self.kind(*self.arguments, rows, **self.options | options)

    def start(self) -> None:
        """Starts the server that was killed, empty."""
        self.server.start()


class TiersOnServers:
    """The promises of every tier on a server beside `TierConformance`.

    There are two fixtures: `place`, a server that is not hurt, and `own`, one of the test alone.
    """

    closings = 5

    def count_values(self, place: Any) -> int | None:
        """Returns how many values the server has; None if that cannot be seen."""
        return None

    def has_ended(self) -> bool:
        """Nothing of a tier is left in this process."""
        return not any("memlane-tier" in thread.name for thread in threading.enumerate())

    def test_hundreds_of_blocks_are_found_by_another_tier(self, place: Place) -> None:
        """The rows have an odd size."""
        rows = rows_of(300, 10_001)
        expected = rows.copy()
        with place.tier(rows, connections=3) as tier:
            assert store(tier, *range(300)).ok.all()
            rows[:] = 0
            assert load(tier, *range(300)).ok.all()
            np.testing.assert_array_equal(rows, expected)
            seen = tier.statistics()
            assert (seen.stored, seen.loaded, seen.missed, seen.queue) == (300, 300, 0, 0)
        with place.tier(rows, connections=3) as again:
            rows[:] = 0
            assert load(again, *range(300)).ok.all()
            np.testing.assert_array_equal(rows, expected)

    def test_a_clear_removes_what_is_in_its_namespace(self, place: Place) -> None:
        rows, own = rows_of(2), place.options.get("namespace", "")
        with (
            place.tier(rows, namespace=own + "a") as one,
            place.tier(rows, namespace=own + "b") as two,
        ):
            assert store(one, 0, 1).ok.all()
            assert store(two, 0).ok.all()
            assert load(one, 0).ok.all()  # which gives it a lease where there are any
            one.clear()
            assert not load(one, 0, 1).ok.any()
            assert load(two, 0).ok.all()
            assert self.count_values(place) in (None, 1)

    def test_a_stopped_server_is_skipped_until_it_answers(
        self, own: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Each call ends at its deadline, or at once; then nothing is lost."""
        rows = rows_of(4)
        with own.tier(rows) as tier, caplog.at_level(logging.WARNING):
            assert store(tier, 0, 1, 2, 3).ok.all()
            own.server.stop()
            rows[:] = 7
            begun = time.monotonic()
            done = load(tier, 0, 1, timeout=0.3)
            assert time.monotonic() - begun > 0.25
            assert_in_time(2, begun)
            assert not done.ok.any()
            assert done.error is not None
            begun = time.monotonic()
            for timeout in (1.2, 1.2, 0.5, 0.5, 0.5):
                assert not load(tier, 2, timeout=timeout).ok.any()
            assert_in_time(8, begun)
            assert tier.has([key(1)]) == [False]
            assert tier.statistics().stalled
            own.server.go_on()
            until(lambda: load(tier, 3, timeout=2).ok.all())
            assert (rows[:3] == 7).all()
            np.testing.assert_array_equal(rows[3], content(3, ROW))
            assert not tier.statistics().stalled
            lines = [record.message for record in caplog.records if "is skipped" in record.message]
            assert len(lines) == 1

    def test_a_short_deadline_is_not_the_servers_fault(self, own: Place) -> None:
        """Others go on: it had no time to answer."""
        with own.tier(rows_of(2)) as tier:
            assert store(tier, 0, 1).ok.all()
            own.server.stop()
            assert load(tier, 0, timeout=0.05).error == "the deadline has passed"
            own.server.go_on()
            assert load(tier, 1).ok.all()
            assert tier.drain(PATIENCE)
            assert not tier.statistics().stalled

    def test_a_killed_server_is_stored_to_again(self, own: Place) -> None:
        """Calls under way end; it comes back empty, which is misses."""
        rows = rows_of(64, 1 << 16)
        with own.tier(rows, timeout=5) as tier:
            assert store(tier, *range(64)).ok.all()
            tickets = {tier.load([key(number)], [number]) for number in range(64)}
            own.server.kill()
            seen: list[Done] = []
            ready = select.poll()
            ready.register(tier.fileno(), select.POLLIN)
            while len(seen) < 64:
                assert ready.poll(1000 * PATIENCE)
                seen += tier.poll()
            assert {done.ticket for done in seen} == tickets
            assert all(done.ok.all() or done.error for done in seen)
            own.start()
            rows[:] = rows_of(64, 1 << 16)
            until(lambda: store(tier, 0).ok.all(), "it is stored to again")
            done = load(tier, *range(1, 64))
            assert not done.ok.any()
            assert done.error is None
            assert store(tier, *range(64)).ok.all()
            rows[:] = 0
            assert load(tier, *range(64)).ok.all()
            np.testing.assert_array_equal(rows, rows_of(64, 1 << 16))

    def test_forget_and_clear_fail_without_a_server(self, own: Place) -> None:
        with own.tier(rows_of(2), timeout=2) as tier:
            assert store(tier, 0).ok.all()
            own.server.stop()
            for call in (partial(tier.forget, [key(0)]), tier.clear):
                with pytest.raises(SystemFault, match=r"cannot (forget|clear) blocks"):
                    call()
            own.server.go_on()

            def forgets() -> bool:
                with contextlib.suppress(SystemFault):
                    tier.forget([key(0)])
                    return True
                return False

            until(forgets, "the server answers")
            assert not load(tier, 0).ok.any()

    def test_invalid_arguments_are_refused(self, place: Place) -> None:
        for connections in (0, 65):
            with pytest.raises(InvalidArgument):
                place.tier(rows_of(1), connections=connections)
        for options in ({"namespace": 7}, {"timeout": "1"}):
            with pytest.raises(InvalidType):
                place.tier(rows_of(1), **options)
        with pytest.raises(InvalidType, match="Python objects"):
            place.tier(np.zeros((2, 3), object))
        assert self.has_ended()

    @pytest.mark.parametrize("timeout", [0, -1, 1e-9, None, float("inf"), 1e12])
    def test_any_timeout_ends_a_call(self, place: Place, timeout: float | None) -> None:
        options = {"timeout": float("inf")} if timeout is None else {}
        with place.tier(rows_of(1), **options) as tier:
            assert store(tier, 0).ok.all()
            done = load(tier, 0, timeout=timeout)
            assert done.ok.all() or done.error == "the deadline has passed"
            assert tier.drain(timeout) or timeout is not None
            assert tier.drain(PATIENCE)
            assert load(tier, 0).ok.all()

    def test_several_threads_close_it_at_once(self, place: Place) -> None:
        """Beside other calls: all return, or raise Closed."""
        for _ in range(self.closings):
            tier = place.tier(rows_of(4))
            tier.store([key(number) for number in range(4)], [0, 1, 2, 3])
            failures: list[BaseException] = []

            def run(call: Callable[[], object], failures: list[BaseException] = failures) -> None:
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

    def test_the_rows_of_a_tier_that_is_dropped_are_free(self, place: Place) -> None:
        """In a cycle, with work under way: its threads end."""
        memory = bytearray(4 * ROW)
        tier = place.tier(memoryview(memory).cast("B", (4, ROW)))
        cycle: list[object] = [tier]
        cycle.append(cycle)
        tier.store([key(1)], [1])
        del tier, cycle
        gc.collect()
        until(self.has_ended, "its threads have ended")
        memory.extend(b"x")

    @pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "at work"])
    def test_the_end_of_the_interpreter_waits_for_nothing(
        self, own: Place, is_stopped: bool
    ) -> None:
        """With a tier that has no deadline, whatever the server does."""
        name = own.kind.__name__
        options = own.options | {"timeout": float("inf")}
        code = f"""
import os
import numpy as np
from math import inf
from {own.kind.__module__} import {name}
rows = np.zeros((200, 65536), np.uint8)
tier = {name}(*{own.arguments!r}, rows, **{options!r})
tier.store([b"a"], [0])
tier.drain()
if {is_stopped}:
    os.kill({own.server.pid}, 19)
tier.load([b"a"], [1])
for number in range(200):
    tier.store([b"%d" % number], [number])
"""
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        own.server.go_on()
        assert (done.returncode, done.stderr) == (0, "")


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
