"""The promises of every tier, as tests: for `memlane`'s own tiers, and for yours::

    from memlane.tiers.conformance import TierConformance

    class TestMyTier(TierConformance):
        def open(self, place, rows, **options):
            return MyTier(place / "blocks", rows, **options)

pytest runs it like any other class of tests. Each test has a `place` of its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from memlane._base import descriptors
from memlane.errors import Closed, InvalidArgument, InvalidType, WrongProcess
from memlane.tiers.tier import Done, Ticket, Tier, has_epochs

Blocks = npt.NDArray[np.uint8]
_PATIENCE = 120.0


def key(number: int) -> bytes:
    """A block's key: 32 bytes, as of a digest."""
    return number.to_bytes(32, "big")


def content(number: int, row_bytes: int) -> Blocks:
    """Returns the bytes that the tests store under that key."""
    return np.random.default_rng(number).integers(0, 256, row_bytes, np.uint8)


def wait_for(tier: Tier, ticket: Ticket) -> Done:
    """The report of that ticket, by `fileno` and `poll`; others are dropped."""
    ready = select.poll()
    ready.register(tier.fileno(), select.POLLIN)
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        for done in tier.poll():
            if done.ticket == ticket:
                return done
        ready.poll(1000 * _PATIENCE)
    raise TimeoutError(f"ticket {ticket} was not reported within {_PATIENCE:g} s")


def expect(found: object, wanted: object) -> None:
    """As `assert`, but pytest does not rewrite this module, and `python -O` removes asserts."""
    if found != wanted:
        raise AssertionError(f"{found!r}, not {wanted!r}")


def ensure(is_so: object, otherwise: str) -> None:
    """The same of anything that is true or false."""
    if not is_so:
        raise AssertionError(otherwise)


def drain(tier: Tier) -> None:
    """Nothing is under way any more."""
    ensure(tier.drain(_PATIENCE), f"not drained within {_PATIENCE:g} s")


def is_readable(tier: Tier, seconds: float) -> bool:
    """Returns whether its descriptor is, by then."""
    return descriptors.is_readable_within(tier.fileno(), seconds)


class TierConformance:
    """The promises of `memlane.tiers.Tier`.

    Attributes:
        row_bytes: of the rows that the tests make.
        is_local: it also keeps what was stored after `close`, knows what it has, and is bounded.
    """

    row_bytes = 4096
    is_local = False

    def open(self, place: Path, rows: Any, **options: Any) -> Any:
        """A new tier on that place, as a context manager.

        Args:
            place: an empty folder of the test's; the same again for a restart.
            rows: of shape (count, row_bytes).
            options: `namespace`, bytes; `timeout`, seconds; of local tiers `capacity`, blocks.
        """
        raise NotImplementedError

    def rows(self, count: int = 8) -> Blocks:
        """Rows, row `i` with the content of key `i`."""
        return np.stack([content(number, self.row_bytes) for number in range(count)])

    @contextmanager
    def stored(self, place: Path, count: int = 8, **options: Any) -> Iterator[tuple[Any, Blocks]]:
        """A tier that has keys 0 to `count`, and its rows, zeroed since."""
        rows = self.rows(count)
        with self.open(place, rows, **options) as tier:
            done = wait_for(tier, tier.store([key(i) for i in range(count)], range_of(count)))
            ensure(done.ok.all(), f"a store failed: {done.error}")
            rows[:] = 0
            yield tier, rows

    def check(self, rows: Blocks, at: int, number: int) -> None:
        """The row has the content of that key."""
        np.testing.assert_array_equal(rows[at], content(number, self.row_bytes))

    def test_it_is_a_tier(self, tmp_path: Path) -> None:
        with self.open(tmp_path, self.rows()) as tier:
            ensure(isinstance(tier, Tier), "it lacks a method of Tier")

    def test_what_was_stored_is_loaded(self, tmp_path: Path) -> None:
        """Into any row, in any order, with the number of bytes moved."""
        with self.stored(tmp_path) as (tier, rows):
            done = wait_for(tier, tier.load([key(3), key(1)], [0, 7]))
            expect(done.ok.tolist(), [True, True])
            expect((done.error, done.bytes), (None, 2 * self.row_bytes))
            ensure(0 <= done.seconds < _PATIENCE, f"it took {done.seconds} s")
            self.check(rows, 0, 3)
            self.check(rows, 7, 1)
            ensure(not rows[1:7].any(), "other rows were written to")

    def test_a_missing_key_is_a_miss_alone(self, tmp_path: Path) -> None:
        with self.stored(tmp_path) as (tier, rows):
            done = wait_for(tier, tier.load([key(1), key(99), key(2)], [0, 1, 2]))
            expect(done.ok.tolist(), [True, False, True])
            expect(done.error, None)
            self.check(rows, 0, 1)
            self.check(rows, 2, 2)

    def test_no_keys_at_all(self, tmp_path: Path) -> None:
        with self.open(tmp_path, self.rows()) as tier:
            for call in (tier.store, tier.load):
                expect(wait_for(tier, call([], [])).ok.shape, (0,))

    def test_each_call_is_reported_once(self, tmp_path: Path) -> None:
        with self.stored(tmp_path) as (tier, _):
            tickets = [tier.load([key(i % 8)], [i % 8]) for i in range(50)]
            drain(tier)
            expect(sorted(done.ticket for done in tier.poll()), sorted(tickets))
            expect(tier.poll(), [])

    def test_has_tells_what_is_there(self, tmp_path: Path) -> None:
        """Or that it does not know."""
        with self.stored(tmp_path) as (tier, _):
            there, absent = tier.has([key(1), key(99)])
            ensure(there is not False, "it has lost a key")
            ensure(absent is not True, "it has a key that was never stored")
            if self.is_local:
                expect((there, absent), (True, False))

    def test_a_key_is_stored_once(self, tmp_path: Path) -> None:
        """Storing it again succeeds; the first block stays."""
        with self.stored(tmp_path) as (tier, rows):
            ensure(
                wait_for(tier, tier.store([key(1)], [0])).ok.all(), "a block failed"
            )  # row 0 is zeroes now
            wait_for(tier, tier.load([key(1)], [5]))
            self.check(rows, 5, 1)

    def test_a_key_is_stored_twice_at_a_time(self, tmp_path: Path) -> None:
        rows = self.rows()
        with self.open(tmp_path, rows) as tier:
            tickets = [tier.store([key(1)], [1]) for _ in range(5)]
            drain(tier)
            done = {each.ticket: each.ok.tolist() for each in tier.poll()}
            expect(done, {ticket: [True] for ticket in tickets})

    def test_a_forgotten_key_is_a_miss(self, tmp_path: Path) -> None:
        """Also after a restart; the others are there."""
        with self.stored(tmp_path) as (tier, _):
            tier.forget([key(1), key(99)])
            self.check_missing(tier, [1])
        if self.is_local:
            with self.open(tmp_path, self.rows()) as tier:
                self.check_missing(tier, [1])
                expect(tier.has([key(2)]), [True])

    def test_a_key_is_forgotten_while_it_is_stored(self, tmp_path: Path) -> None:
        rows = self.rows()
        with self.open(tmp_path, rows) as tier:
            ticket = tier.store([key(1), key(2)], [1, 2])
            tier.forget([key(1)])
            # What was stored before it was forgotten may be reported so.
            expect(wait_for(tier, ticket).ok.tolist()[1], True)
            self.check_missing(tier, [1])
        if self.is_local:
            with self.open(tmp_path, rows) as tier:
                self.check_missing(tier, [1])
                expect(tier.has([key(2)]), [True])

    def test_nothing_is_there_after_clear(self, tmp_path: Path) -> None:
        """Also after a restart, and not what is under way; new keys are stored as ever."""
        with self.stored(tmp_path) as (tier, rows):
            ticket = tier.store([key(20)], [0])
            tier.clear()
            wait_for(tier, ticket)
            self.check_missing(tier, [1, 2, 20])
            rows[0] = content(30, self.row_bytes)
            ensure(wait_for(tier, tier.store([key(30)], [0])).ok.all(), "a block failed")
        if self.is_local:
            with self.open(tmp_path, rows) as tier:
                self.check_missing(tier, [1, 2, 20])
                wait_for(tier, tier.load([key(30)], [4]))
                self.check(rows, 4, 30)

    def check_missing(self, tier: Any, numbers: Sequence[int]) -> None:
        """A load finds none of them."""
        keys = [key(number) for number in numbers]
        ensure(True not in tier.has(keys), "it has what must be missing")
        done = wait_for(tier, tier.load(keys, range_of(len(keys))))
        ensure(not done.ok.any(), "it loads what must be missing")

    def test_namespaces_do_not_mix(self, tmp_path: Path) -> None:
        """The same key of another model is another block."""
        with self.stored(tmp_path, namespace=b"one") as (tier, _):
            ensure(tier.has([key(1)]) != [False], "it has lost a key")
        with self.open(tmp_path, self.rows(), namespace=b"other") as tier:
            self.check_missing(tier, [1, 2])

    @pytest.mark.parametrize(
        ("keys", "ids", "error"),
        [
            (["text"], [0], InvalidType),
            ([b""], [0], InvalidArgument),
            ([b"x" * 256], [0], InvalidArgument),
            ([b"a", b"a"], [0, 1], InvalidArgument),
            ([b"a", b"b"], [0, 0], InvalidArgument),
            ([b"a", b"b"], [0], InvalidArgument),
            ([b"a"], [-1], InvalidArgument),
            ([b"a"], [8], InvalidArgument),
            ([b"a"], [0.0], InvalidType),
            ([b"a"], [[0]], InvalidArgument),
            ([b"a"], [[0], [1, 2]], InvalidArgument),
            (None, [0], InvalidType),
        ],
    )
    def test_bad_input_changes_nothing(
        self, tmp_path: Path, keys: Any, ids: list[Any], error: type[Exception]
    ) -> None:
        with self.open(tmp_path, self.rows()) as tier:
            for call in (tier.store, tier.load):
                with pytest.raises(error):
                    call(keys, ids)
            drain(tier)
            expect(tier.poll(), [])
            ensure(True not in tier.has([b"a"]), "something was stored")

    def test_rows_that_are_none(self, tmp_path: Path) -> None:
        rows = self.rows()
        frozen = rows.copy()
        frozen.flags.writeable = False
        for wrong in (rows[:, :-1], rows[0], rows[:0], frozen, bytes(100)):
            with pytest.raises(InvalidArgument, match="rows must"):
                self.open(tmp_path, wrong)
        for kind in (7, np.zeros((2, 8), "datetime64[s]"), np.zeros((2, 8), object)):
            with pytest.raises(InvalidType, match="rows must"):
                self.open(tmp_path, kind)

    def test_a_deadline_that_has_passed_is_a_miss(self, tmp_path: Path) -> None:
        """Reported, and the row is nobody's from then on."""
        with self.stored(tmp_path) as (tier, rows):
            for _ in range(20):
                done = wait_for(tier, tier.load([key(1), key(2)], [0, 1], timeout=0))
                missed = np.flatnonzero(~done.ok)
                rows[missed] = 7
                drain(tier)
                ensure((rows[missed] == 7).all(), "a row was written to after its report")
                for at in done.ok.nonzero()[0]:
                    self.check(rows, int(at), int(at) + 1)
            done = wait_for(tier, tier.store([key(40)], [0], timeout=0))
            drain(tier)
            expect(done.ok.shape, (1,))

    def test_a_report_makes_the_descriptor_readable(self, tmp_path: Path) -> None:
        """And it is not readable for ever: a report may be taken before the wake-up that belongs
        to it has come, so the tier is drained and polled first."""
        with self.stored(tmp_path) as (tier, _):
            drain(tier)
            tier.poll()
            ensure(not is_readable(tier, 0), "readable, with nothing to report")
            tier.load([key(1)], [0])
            ensure(is_readable(tier, _PATIENCE), "the descriptor is silent")
            while not tier.poll():
                is_readable(tier, _PATIENCE)
            drain(tier)
            tier.poll()
            ensure(not is_readable(tier, 0), "readable, with nothing to report")

    def test_drain_leaves_the_reports(self, tmp_path: Path) -> None:
        with self.stored(tmp_path) as (tier, _):
            tickets = {tier.load([key(1)], [0]), tier.load([key(2)], [1])}
            drain(tier)
            ensure(is_readable(tier, 0), "the descriptor is silent")
            expect({done.ticket for done in tier.poll()}, tickets)

    def test_held_blocks_stay(self, tmp_path: Path) -> None:
        """Whatever is stored meanwhile, until they are released."""
        options = {"capacity": 8} if self.is_local else {}
        with self.stored(tmp_path, **options) as (tier, rows):
            with tier.hold([key(1), key(99)]) as held:
                expect(held.there, [True, False])
                for number in range(100, 150):
                    rows[0] = content(number, self.row_bytes)
                    wait_for(tier, tier.store([key(number)], [0]))
                ensure(wait_for(tier, tier.load([key(1)], [1])).ok.all(), "a block failed")
                self.check(rows, 1, 1)
            held.release()

    def test_closed(self, tmp_path: Path) -> None:
        """The rows are the caller's again; calls are refused; closing again does nothing."""
        memory = bytearray(8 * self.row_bytes)
        rows = memoryview(memory).cast("B", (8, self.row_bytes))
        tier = self.open(tmp_path, rows)
        tier.store([key(1)], [1])
        tier.close()
        tier.close()
        rows.release()
        memory.extend(b"x")  # a BufferError while somebody refers to it
        for call in (tier.poll, tier.fileno, tier.clear, partial(tier.has, [key(1)])):
            with pytest.raises(Closed):
                call()
        if self.is_local:
            with self.open(tmp_path, self.rows()) as again:
                expect(again.has([key(1)]), [True])

    def test_a_forked_child_has_no_tier(self, tmp_path: Path) -> None:
        """The child's calls are refused, its end changes nothing, and the parent goes on."""
        with self.stored(tmp_path) as (tier, rows):
            ticket = tier.load([key(1)], [1])
            child = os.fork()
            if child == 0:
                with_error = 1
                try:
                    tier.poll()
                except WrongProcess:
                    tier.close()
                    with_error = 0
                finally:
                    os._exit(with_error)
            expect(os.waitpid(child, 0)[1], 0)
            ensure(wait_for(tier, ticket).ok.all(), "a block failed")
            self.check(rows, 1, 1)

    def test_signals_lose_nothing(self, tmp_path: Path) -> None:
        """A handler that raises ends the call that it interrupts, not what is under way."""

        class Interrupted(Exception):
            pass

        is_armed = False

        def interrupt(*_: object) -> None:
            nonlocal is_armed
            if is_armed:
                is_armed = False
                raise Interrupted

        with self.stored(tmp_path) as (tier, rows):
            before = signal.signal(signal.SIGALRM, interrupt)
            tickets, seen = [], []
            try:
                for number in range(200):
                    tickets.append(tier.load([key(number % 8)], [number % 8]))
                    with contextlib.suppress(Interrupted):
                        is_armed = True
                        # CPython 3.11 may overlook one signal; so they come again and again.
                        signal.setitimer(signal.ITIMER_REAL, 1e-5 * (number % 20 + 1), 0.01)
                        while is_armed:
                            tier.drain(_PATIENCE)
                            tier.load([key(99)], [0])
                            tier.has([key(1)])
                    seen += [done.ticket for done in tier.poll()]
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
            drain(tier)
            seen += [done.ticket for done in tier.poll()]
            expect(len(set(seen)), len(seen))
            ensure(set(tickets) <= set(seen), "a report was lost")
            self.check(rows, 7, 7)

    def test_threads_take_turns(self, tmp_path: Path) -> None:
        with self.stored(tmp_path) as (tier, _):
            tickets: list[Ticket] = []

            def load(row: int) -> None:
                for number in range(50):
                    tickets.append(tier.load([key(number % 8)], [row]))
                    tier.has([key(number)])

            _in_threads([partial(load, row) for row in range(4)])
            drain(tier)
            done = tier.poll()
            expect(sorted(each.ticket for each in done), sorted(tickets))
            ensure(all(each.ok.all() for each in done), "a load failed")

    def test_an_answer_that_is_awaited_makes_the_descriptor_readable(self, tmp_path: Path) -> None:
        """A tier that does not know yet whether it has a key wakes its caller once it does."""
        asked = [key(0), key(99)]
        with self.stored(tmp_path) as (tier, _):
            found = tier.has(asked)
            while None in found:
                ensure(
                    is_readable(tier, _PATIENCE), "has() was None, and nothing says that it knows"
                )
                tier.poll()
                found = tier.has(asked)
            expect(found, [True, False])

    def test_blocks_of_another_epoch_are_misses(self, tmp_path: Path) -> None:
        """Blocks of the first epoch are there again with it."""
        with self.stored(tmp_path) as (tier, rows):
            if not has_epochs(tier):
                pytest.skip("the tier has no epochs")
            tier.set_epoch(7)
            done = wait_for(tier, tier.load([key(0), key(1)], [0, 1]))
            expect((done.ok.tolist(), done.error), ([False, False], None))
            rows[2] = content(99, self.row_bytes)
            ensure(wait_for(tier, tier.store([key(0)], [2])).ok.all(), "a store failed")
            ensure(wait_for(tier, tier.load([key(0)], [3])).ok.all(), "a load failed")
            self.check(rows, 3, 99)
            tier.set_epoch("")
            ensure(wait_for(tier, tier.load([key(0)], [3])).ok.all(), "a load failed")
            self.check(rows, 3, 0)

    def test_a_restart_finds_everything(self, tmp_path: Path) -> None:
        if not self.is_local:
            pytest.skip("only local tiers promise that")
        with self.stored(tmp_path):
            pass
        rows = np.zeros((8, self.row_bytes), np.uint8)
        with self.open(tmp_path, rows) as tier:
            expect(tier.has([key(i) for i in range(8)]), [True] * 8)
            ensure(
                wait_for(tier, tier.load([key(i) for i in range(8)], range_of(8))).ok.all(),
                "a block failed",
            )
            for number in range(8):
                self.check(rows, number, number)

    def test_capacity_is_never_exceeded(self, tmp_path: Path) -> None:
        """The oldest go; what the tier says it has is right."""
        if not self.is_local:
            pytest.skip("only local tiers promise that")
        rows = self.rows()
        with self.open(tmp_path, rows, capacity=5) as tier:
            for number in range(30):
                rows[0] = content(number, self.row_bytes)
                wait_for(tier, tier.store([key(number)], [0]))
                ensure(sum(tier.has([key(each) for each in range(30)])) <= 5, "it has too many")
            there = tier.has([key(each) for each in range(30)])
            ensure(1 <= sum(there) <= 5, f"it has {sum(there)} of 5")
            for number in np.flatnonzero(there).tolist():
                ensure(wait_for(tier, tier.load([key(number)], [1])).ok.all(), "a block failed")
                self.check(rows, 1, number)


def range_of(count: int) -> npt.NDArray[np.int32]:
    """Rows 0 to `count`."""
    return np.arange(count, dtype=np.int32)


def _in_threads(work: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
        ensure(not thread.is_alive(), "a thread hangs")
