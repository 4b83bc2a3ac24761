"""Requests, orders and errors of tiers on servers, on a server that is a dictionary."""

import contextlib
import errno
import itertools
import logging
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from memlane import InvalidArgument, SystemFault
from memlane._base.deadline import Deadline
from memlane.tiers.conformance import key, wait_for
from memlane.tiers.remote.dispatcher import Dispatcher
from memlane.tiers.remote.requests import LATE
from memlane.tiers.remote.transport import Late, Refusal, Refused, Unanswered
from memlane.tiers.tier import Done
from tests.support import PATIENCE, until
from tests.support.remote_tiers import MemoryTransport, load, rows_of, store, tier_in_memory


class Slow(MemoryTransport):
    pause = 0.005


@pytest.mark.parametrize("call", ["clear", "forget"])
def test_an_order_is_done_beside_threads_that_store(call: str) -> None:
    """It waits for the stores that were begun before it, not for later ones."""
    with tier_in_memory(rows_of(4), Slow, connections=4) as tier:
        assert store(tier, 0).ok.all()
        over = threading.Event()

        def work(row: int) -> None:
            number = 0
            while not over.is_set():
                number += 1
                numbered = key(1) if call == "forget" else key(1000 * row + number)
                tier.store([numbered], [row])
                time.sleep(0.001)

        threads = [threading.Thread(target=work, args=(row,)) for row in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: tier.statistics().stored > 20, "all store")
        try:
            tier.clear() if call == "clear" else tier.forget([key(0), key(1)])
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert tier.drain(20)
        assert not load(tier, 0).ok.any()


def test_a_forgotten_key_that_was_late_is_an_error() -> None:
    """Also one of several: they may still be there."""

    class Stuck(MemoryTransport):
        def remove(self, names: Sequence[bytes], deadline: Deadline) -> None:
            time.sleep(2 * deadline.left())

    with tier_in_memory(rows_of(2), Slow, connections=1, timeout=0.2) as tier:
        tier.store([key(number) for number in range(2)], [0, 1], 5)
        for _ in range(100):
            tier.load([key(0)], [0], 5)
        with pytest.raises(SystemFault, match="the deadline has passed"):
            tier.forget([key(0), key(1)])
        assert tier.drain(20)


def test_an_answer_from_before_a_clear_is_not_remembered() -> None:
    """A question that is still under way while everything is removed."""
    asked, may_answer = threading.Event(), threading.Event()

    class Held(MemoryTransport):
        def ask(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
            found = super().ask(names, deadline)
            asked.set()
            may_answer.wait(10)
            return found

    with tier_in_memory(rows_of(1), Held) as tier:
        assert store(tier, 0).ok.all()
        tier.has([key(0)])
        time.sleep(1.1)  # as long as an answer is believed
        assert tier.has([key(0)]) == [None]
        assert asked.wait(10)
        tier.clear()
        may_answer.set()
        assert tier.drain(PATIENCE)
        until(lambda: tier.has([key(0)]) == [False], "it is asked again")


def test_an_answer_makes_the_descriptor_readable() -> None:
    """An engine that waits for it need not ask again and again."""
    with tier_in_memory(rows_of(1), Slow) as tier:
        assert tier.has([key(0)]) == [None]
        end = time.monotonic() + 10
        while tier.has([key(0)]) == [None]:
            assert wait_until_readable(tier, end)
            assert tier.poll() == []
        assert tier.has([key(0)]) == [False]


def wait_until_readable(tier: Any, end: float) -> bool:
    return bool(select.select([tier.fileno()], [], [], end - time.monotonic())[0])


# Errors of its own --------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [[], [None, None]])
def test_a_transport_that_answers_about_other_blocks(outcome: list[Refusal | None]) -> None:
    """Has not answered: its blocks fail, others go on."""

    class Wrong(MemoryTransport):
        is_wrong = True

        def put(self, *_: Any) -> list[Refusal | None]:
            return outcome

    with tier_in_memory(rows_of(1), Wrong) as tier:
        done = store(tier, 0)
        assert not done.ok.any()
        assert "it answers about" in (done.error or "")
        assert tier.drain(5)


def test_a_panic_in_a_transport_is_no_answer() -> None:
    """obstore raises exceptions of Rust that are no `Exception`."""

    class Panic(BaseException):
        pass

    class Panics(MemoryTransport):
        def get(self, *_: Any) -> list[int | Refusal]:
            raise Panic("a bug in Rust")

    with tier_in_memory(rows_of(1), Panics) as tier:
        assert store(tier, 0).ok.all()
        assert load(tier, 0).error == "Panic: a bug in Rust"


FAILING: dict[str, Callable[[Any], None]] = {
    "a call": lambda tier: tier.store([key(2)], [0]),
    "an order": lambda tier: tier.forget([key(2)]),
    "a drain": lambda tier: tier.drain(PATIENCE),
    "an answer": lambda tier: tier.has([key(2)]),
}


@pytest.mark.parametrize("where", ["_finish", "_hand_out", "_serve_waiting", "_expire"])
@pytest.mark.parametrize("what", FAILING)
def test_an_error_of_the_dispatcher_is_the_end_of_its_tier(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str, what: str
) -> None:
    """The log says so, every job is reported, nobody waits, and the tier can be closed."""
    rows = rows_of(2)
    tier = tier_in_memory(rows, Slow, connections=1)
    assert store(tier, 0).ok.all()

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, where, fail)
        tickets = {
            tier.load([key(0)], [1], 0.05 if where == "_expire" else PATIENCE) for _ in range(40)
        }
        with contextlib.suppress(SystemFault):
            FAILING[what](tier)
        until(lambda: tier.statistics().stalled, "it has failed")
    seen: list[Done] = []
    until(lambda: seen.extend(tier.poll()) or tickets <= {done.ticket for done in seen}, "reported")
    assert len({done.ticket for done in seen}) == len(seen)
    for done in seen:  # a worker, too, finds that a deadline has passed
        is_late = where == "_expire" and done.error == LATE
        assert done.error is None or "a bug" in done.error or is_late
    assert tier.has([key(0)]) == [False]
    done = wait_for(tier, tier.store([key(3)], [0]))
    assert (done.ok.tolist(), "internal error" in (done.error or "")) == ([False], True)
    for order in (tier.clear, lambda: tier.forget([key(0)])):
        with pytest.raises(SystemFault, match="internal error"):
            order()
    assert tier.drain(PATIENCE)
    tier.close(PATIENCE)
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [line for line in lines if "RuntimeError: a bug" in line]


def test_refusals_are_no_outage() -> None:
    class Refuses(MemoryTransport):
        def ask(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
            raise Refused("not today")

        def clear(self, prefix: bytes, deadline: Deadline) -> None:
            raise Refused("not today")

    with tier_in_memory(rows_of(1), Refuses) as tier:
        assert tier.has([key(0)]) == [None]
        until(lambda: tier.has([key(0)]) == [False], "answered")
        with pytest.raises(SystemFault, match="cannot clear blocks: not today") as refused:
            tier.clear()
        assert refused.value.errno == errno.EIO  # it has answered
        assert not tier.statistics().stalled
        assert store(tier, 0).ok.all()


def test_a_server_that_cannot_be_reached_is_not_tried_at_once() -> None:
    attempts: list[float] = []

    class Unreachable(MemoryTransport):
        def get(self, *_: Any) -> list[int | Refusal]:
            attempts.append(time.monotonic())
            raise Unanswered("it is gone")

    with tier_in_memory(rows_of(1), Unreachable) as tier:
        assert load(tier, 0).error == "it is gone"
        for _ in range(20):
            was_skipped = load(tier, 0).error == "it did not answer a moment ago"
            assert was_skipped or time.monotonic() - attempts[0] >= 1.0
        assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(attempts))


def test_arguments_are_checked_before_anything_is_begun() -> None:
    with tier_in_memory(rows_of(2)) as tier:
        with pytest.raises(InvalidArgument):
            tier.store([b""], [0])
        assert tier.drain(0)
        assert tier.poll() == []


def test_small_answers_do_not_end_the_outage_of_large_ones() -> None:
    """A server that answers whether a key is there, and never sends a block, is tried more and more
    rarely."""

    class Silent(MemoryTransport):
        def get(self, *_: Any) -> list[int | Refusal]:
            time.sleep(1.1)
            raise Late

    with tier_in_memory(rows_of(2), Silent) as tier:
        pauses = []
        for number in (0, 1):
            assert not wait_for(tier, tier.load([key(number)], [0])).ok.any()
            pauses.append(tier._state.outage._pause)
            until(lambda: not tier.statistics().stalled)
            tier.has([key(2)])
            until(lambda: tier.has([key(2)]) == [False])
            assert tier.drain()
        assert pauses == [1.0, 2.0]
        assert tier._state.outage.is_open
