"""The thread that owns every request under way: it hands batches to the workers, ends calls at
their deadlines, and reports them.

Callers only submit requests and take reports, so an exception of a signal's handler, which runs in
the main thread, can leave nothing half done.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from queue import Empty, PriorityQueue, SimpleQueue

from memlane._base.diagnosis import warn
from memlane._base.lifetime import start_thread
from memlane.errors import Closed
from memlane.tiers.remote.answers import Answers
from memlane.tiers.remote.blocks import Blocks
from memlane.tiers.remote.health import Health
from memlane.tiers.remote.requests import (
    LATE,
    Awaited,
    Batch,
    Call,
    Drain,
    Order,
    Question,
    Request,
    Work,
)
from memlane.tiers.remote.transport import ENDING, Transport
from memlane.tiers.remote.worker import Connect, Line, Queue, Worker
from memlane.tiers.reports import Reports
from memlane.tiers.tier import CHANGED, Done, Ticket
from memlane.tiers.waiting import Outage, Wakeup

_MOST_QUESTIONS = 1000  # that are asked together
_LONGEST_WAIT = 3600.0  # seconds
_AHEAD = 64  # batches of stores that a load may overtake


@dataclass(frozen=True)
class Ending:
    """Ends the dispatcher's thread."""


@dataclass(eq=False)
class State:
    """The state of a dispatcher that callers may read at any time.

    Attributes:
        counts: blocks by what became of them, since the tier was opened.
        under_way: blocks of stores and loads.
        outage: whether the server does not answer.
        failure: why the dispatcher has ended, if it was an error of its own.
        is_ended: no request is taken any more.
    """

    counts: Counter[str] = field(default_factory=Counter)
    under_way: int = 0
    outage: Outage = field(default_factory=Outage)
    failure: str | None = None
    is_ended: bool = False

    def is_stalled(self) -> bool:
        """Returns whether nothing is tried at the moment."""
        return self.failure is not None or self.outage.lasts(time.monotonic())


class Dispatcher:
    """Callers have two methods: `submit` and `stop`."""

    def __init__(
        self,
        what: str,
        prefix: bytes,
        blocks: Blocks,
        reports: Reports,
        wakeup: Wakeup,
        answers: Answers,
        connect: Connect,
        connections: int,
        first: Transport,
    ) -> None:
        """Starts the threads. `first` is the connection of the first worker; the others connect
        when they have work.

        Raises:
            SystemFault: no thread can be started; `first` is closed.
        """
        self.state = State()
        self._what, self._blocks = what, blocks
        self._reports, self._answers = reports, answers
        self._wakeup = wakeup
        self._inbox: SimpleQueue[Request | Batch | Ending] = SimpleQueue()
        self._item: Request | Batch | Ending | None = None  # that is being served
        self._work: Queue = PriorityQueue()
        self._numbers = count()
        self._open: dict[Ticket, Call] = {}  # calls that are not reported
        self._deadlines: list[tuple[float, Ticket]] = []  # a heap of those, and of others
        self._storing: dict[Ticket, Call] = {}  # stores with batches at the workers
        self._questions: list[Question] = []  # that are not asked yet
        self._orders: deque[Order] = deque()  # that wait for stores
        self._drains: deque[Drain] = deque()
        self._batches = 0  # at the workers
        self._health = Health(what, self.state.outage)
        self._workers: list[Worker] = []
        self._thread = threading.Thread(target=self._run, name="memlane-tier", daemon=True)
        try:
            for number in range(connections):
                transport = None if number else first
                self._workers.append(
                    Worker(
                        *(number, prefix, blocks, connect, transport),
                        *(self._work, self._inbox, self.state.outage),
                    )
                )
            start_thread(self._thread)
            for worker in self._workers:
                worker.start()
        except BaseException:
            self._abandon(first)
            raise

    def _abandon(self, first: Transport) -> None:
        """Ends what was started."""
        if self._thread.ident is not None:
            self.stop()
        with suppress(Exception):
            first.close()

    def submit(self, request: Request) -> None:
        """Takes a request. Every call is reported, every awaited request ends.

        Raises:
            Closed: the dispatcher was stopped.
        """
        self._inbox.put(request)
        if self.state.is_ended:  # perhaps before the request came
            if self.state.failure is None:
                raise Closed(f"{self._what} is closed")
            self._refuse_all()

    def stop(self, seconds: float | None = None) -> bool:
        """Ends the threads, once nothing is under way. Any thread but its own may call it, and
        several times.

        Args:
            seconds: how long to wait; 0: not at all; None: until it has ended.

        Returns:
            Whether it has ended.
        """
        self._inbox.put(Ending())
        if seconds != 0:
            self._thread.join(None if seconds is None else min(seconds, _LONGEST_WAIT))
        return not self._thread.is_alive()

    # Its thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            kind = type(error).__name__
            self.state.failure = f"{kind}: {error} ({where.name}, line {where.lineno})"
        try:
            self._end()
        finally:
            if self.state.failure is not None:
                with suppress(Exception):
                    warn(
                        "%s has stopped after an internal error (%s); close it and open it again",
                        *(self._what, self.state.failure),
                    )

    def _serve(self) -> None:
        while True:
            soonest = self._deadlines[0][0] if self._deadlines else inf
            wait = None
            if soonest < inf:
                wait = min(_LONGEST_WAIT, max(0.0, soonest - time.monotonic()))
            item = self._item = None
            with suppress(Empty):
                item = self._item = self._inbox.get(timeout=wait)
            now = time.monotonic()
            match item:
                case Ending():
                    return
                case Call():
                    self._begin(item, now)
                case Question():
                    item.digests = self._answers.begin(item.digests)
                    if item.digests:
                        self._questions.append(item)
                case Order():
                    item.waits_for = {
                        ticket
                        for ticket, call in self._storing.items()
                        if item.kind == "clear" or not set(item.digests).isdisjoint(call.digests)
                    }
                    self._orders.append(item)
                case Drain():
                    self._drains.append(item)
                case Batch():
                    self._finish(item, now)
            while self._deadlines and self._deadlines[0][0] <= now:
                ticket = heappop(self._deadlines)[1]
                if ticket in self._open:
                    self._expire(self._open[ticket], now)
            self._ask_all()
            self._serve_waiting()

    def _end(self) -> None:
        """Reports what is still open, and ends the workers and all who wait."""
        self.state.is_ended = True  # first: a request that comes later is refused by its caller
        if self.state.failure is not None:  # first: a row is the caller's from its report on
            for call in [*self._open.values()]:
                self._refuse(call)
        for _ in self._workers:
            self._work.put((inf, next(self._numbers), None))
        for worker in self._workers:
            worker.join()
        self._blocks.release()
        self.state.under_way = 0
        for awaited in (*self._orders, *self._drains, self._item):
            self._refuse(awaited)
        self._refuse_all()

    def _failure(self) -> str:
        return f"the tier has stopped after an internal error: {self.state.failure}"

    def _refuse_all(self) -> None:
        """Ends what nobody serves any more. Any thread may call it."""
        with suppress(Empty):
            while True:
                self._refuse(self._inbox.get_nowait())

    def _refuse(self, item: object) -> None:
        if isinstance(item, Batch):  # the workers did it before they ended
            item = item.of
        if isinstance(item, Awaited):
            self._release(item)
        elif isinstance(item, Call) and self.state.failure is not None:
            with item.lock:  # a copy into one of its rows ends first
                is_new, item.is_over = not item.is_over, True
            if is_new:
                self.state.counts["errors"] += item.left
                seconds = time.monotonic() - item.begun
                done = Done(item.ticket, item.ok.copy(), self._failure(), item.nbytes, seconds)
                self._reports.add(done)

    def _release(self, awaited: Awaited) -> None:
        if self.state.failure is not None:
            awaited.error = self._failure()
        awaited.ended.put(None)

    def _begin(self, call: Call, now: float) -> None:
        self._open[call.ticket] = call
        self.state.under_way += call.left
        if call.left == 0:
            self._report(call, now)
            return
        if call.deadline < inf:
            heappush(self._deadlines, (call.deadline, call.ticket))
        if call.kind == "store":
            self._storing[call.ticket] = call
        self._hand_out(call)

    def _ask_all(self) -> None:
        """Asks the questions that have come: engines ask for one key at a time."""
        questions = self._questions
        if questions and (self._inbox.empty() or len(questions) >= _MOST_QUESTIONS):
            self._questions = []
            digests = [digest for each in questions for digest in each.digests]
            self._hand_out(Question(digests, questions[0].deadline))

    def _hand_out(self, of: Work) -> None:
        blocks = max(1, len(of.digests))
        most = self._blocks.batch if isinstance(of, Call) else blocks
        is_store = isinstance(of, Call) and of.kind == "store"
        for at in range(0, blocks, most):
            self._batches += 1
            batch = Batch(of, range(at, min(blocks, at + most)))
            number = next(self._numbers)  # somebody waits for loads and answers
            self._work.put((number + _AHEAD * is_store, number, batch))

    def _serve_waiting(self) -> None:
        """Begins orders whose stores have ended; ends drains if nothing is under way."""
        for _ in range(len(self._orders)):
            order = self._orders.popleft()
            if order.waits_for:
                self._orders.append(order)
            else:
                self._hand_out(order)
        if not self._batches and not self._questions and not self._orders:
            while self._drains:
                self._release(self._drains.popleft())

    def _finish(self, batch: Batch, now: float) -> None:
        self._batches -= 1
        self._log_all(self._health.judge(batch, now))
        if batch.unanswered is not None:
            batch.end(batch.unanswered)
        match batch.of:
            case Call() as call:
                self._finish_blocks(call, batch, now)
            case Question() as question:
                # One without an answer is answered, too: nobody must wait for ever.
                outcomes = batch.outcomes if batch.refused is None else ()
                there = [outcome is True for outcome in outcomes] or [False] * len(batch.digests)
                self._answers.end(question.digests, there, question.begun, now)
                self._wakeup.wake()  # for those who wait for an answer
            case Order() as order:
                self._finish_order(order, batch, now)

    def _log_all(self, lines: Iterable[Line]) -> None:
        """Has a worker log them: that may take its time."""
        for line in lines:
            self._work.put((0, next(self._numbers), line))

    def _finish_blocks(self, call: Call, batch: Batch, now: float) -> None:
        counts = self.state.counts
        if batch.unanswered is None:
            known = (CHANGED, LATE, ENDING)
            texts = [each for each in batch.outcomes if isinstance(each, str)]
            refused = [each for each in texts if each not in known]
            self._log_all(self._health.refused(refused, now))
        self.state.under_way -= len(batch.places)
        for place, outcome in zip(batch.places, batch.outcomes, strict=True):
            if outcome is True or outcome is False or outcome == CHANGED:
                self._answers.learn(call.digests[place], outcome is True, now)
            counts[_counter(call, outcome)] += not (outcome == LATE and call.is_over)
            if call.is_over:
                continue
            call.ok[place] = outcome is True
            if isinstance(outcome, str) and call.error is None:
                call.error = outcome
            call.nbytes += self._blocks.row_bytes * (outcome is True)
        call.left -= len(batch.places)
        if call.left == 0:
            if self._storing.pop(call.ticket, None) is not None:
                for order in self._orders:
                    order.waits_for.discard(call.ticket)
            if not call.is_over:
                self._report(call, now)
        self._answers.tidy(now)

    def _finish_order(self, order: Order, batch: Batch, now: float) -> None:
        error = batch.unanswered or batch.refused or (LATE if batch.is_late() else None)
        if error is None:
            if order.kind == "clear":
                self._answers.clear(now)
            for digest in order.digests:
                self._answers.learn(digest, False, now)
        order.is_refused = batch.unanswered is None and batch.refused is not None
        order.error = error
        order.ended.put(None)

    def _expire(self, call: Call, now: float) -> None:
        with call.lock:  # a copy into one of its rows ends first
            call.is_over = True
        self.state.counts["expired"] += call.left
        call.error = call.error or LATE
        self._report(call, now)

    def _report(self, call: Call, now: float) -> None:
        report = Done(call.ticket, call.ok.copy(), call.error, call.nbytes, now - call.begun)
        call.is_over = True
        del self._open[call.ticket]
        self._reports.add(report)


def _counter(call: Call, outcome: bool | str) -> str:
    """Returns which counter a block belongs to."""
    if outcome is True:
        return "stored" if call.kind == "store" else "loaded"
    if outcome is False:
        return "missed"
    return {CHANGED: "corrupt", LATE: "expired"}.get(outcome, "errors")
