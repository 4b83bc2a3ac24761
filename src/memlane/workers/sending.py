"""Sends calls: by one queue to all workers, and by a lane to each, once calls to some are made.

One thread sends at a time. A signal handler may raise at any step: a call that is being sent is
noted before it (`_unsure`), and the next thread that sends finds out from the queue's counter
whether it was sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from memlane import (
    Closed,
    ConcurrentUse,
    Handle,
    InvalidArgument,
    MemlaneError,
    MessageQueue,
    QueueStatistics,
    ReaderDied,
    TimedOut,
)
from memlane._base.deadline import NEVER, Deadline
from memlane._locks import Lock
from memlane.workers.answers import REENTRY, Answers
from memlane.workers.store import WorkersStore
from memlane.workers.table import Pending, Table
from memlane.workers.ticket import END, LANES

T = TypeVar("T")
_SLICE = 0.1  # seconds of a wait for space in the queue, in which nobody may receive


class Sender:
    """The way to the workers.

    Attributes:
        heal: called before each call of some ranks: replaces workers that have died, or raises.
        needs_heal: returns whether that would do anything.
        store: of the group, or None.
        calls: the queue to all workers.
    """

    heal: Callable[[Iterable[int]], None]
    needs_heal: Callable[[], bool]
    store: WorkersStore | None = None

    def __init__(
        self,
        table: Table,
        answers: Answers,
        ranks: Sequence[int],
        name: str,
        ring: dict[str, Any],
    ) -> None:
        self._table, self._answers, self._ranks = table, answers, ranks
        self._name, self._ring = name, ring
        self.lock = Lock()  # of the thread that sends, or replaces workers
        self._is_sending = False  # whether the holder of the lock is in the middle of a send
        self._sent: dict[MessageQueue[Any], int] = {}
        self._unsure: tuple[MessageQueue[Any], int, Pending, Sequence[int]] | None = None
        self._lanes: list[MessageQueue[Any]] = []  # once one is needed
        self._opening = Pending("open", [])
        self._cancelled: list[set[int]] = [set() for _ in ranks]  # numbers by rank
        self._cancels: MessageQueue[Any] = MessageQueue(
            len(ranks), len(ranks), mode="latest", max_chunk_bytes=4096, name=f"{name}.cancels"
        )
        self._cancelling = Lock()
        self._ended: deque[tuple[int, Sequence[int]]] = deque()  # streams that workers still have
        self._has_opened_lanes = False
        self._is_closed = False
        self.calls = self._queue("calls", *ranks)

    def _queue(self, name: str, *ranks: int) -> MessageQueue[Any]:
        queue: MessageQueue[Any] = MessageQueue(
            len(ranks),
            len(ranks),
            local_reader_ranks=ranks,
            name=f"{self._name}.{name}",
            **self._ring,
        )
        self._sent[queue] = 0
        return queue

    def handles(self, rank: int) -> tuple[Handle, Handle, None]:
        """Returns the handles of the queues for a worker, as `readmit`."""
        return self.calls.export_handle(rank), self._cancels.export_handle(rank), None

    def wait_until_ready(self, deadline: Deadline, pids: Iterable[int]) -> None:
        """Returns when all workers have attached. Raises as the queue's."""
        self.calls.wait_until_ready(deadline.timeout_left(), processes=pids)
        with self._cancelling:  # which workers attach at the same moment
            self._cancels.wait_until_ready(deadline.timeout_left(), processes=pids)

    def statistics(self) -> QueueStatistics:
        """Returns those of the queue to all workers."""
        return self.calls.statistics()

    def readmit(self, rank: int) -> tuple[Handle, Handle, Handle | None]:
        """Returns the handles of the queues for a process in the place of one that has ended."""
        self.release(rank)
        with self._cancelling:
            self._cancelled[rank].clear()  # its numbers begin anew
            cancels = self._cancels.readmit(rank)
        lane = self._nameless(rank) if self._has_opened_lanes else None
        return self.calls.readmit(rank), cancels, lane

    def release(self, rank: int) -> None:
        """No queue waits for that worker any more, which has ended, or never was."""
        with self._cancelling:
            for queue in (self.calls, self._cancels, *self._lanes[rank : rank + 1]):
                self._release(queue, rank)

    def _release(self, queue: MessageQueue[Any], rank: int) -> None:
        with suppress(InvalidArgument):  # it was released already
            queue.release_reader(rank)

    def cancel(self, pending: Pending) -> None:
        """Tells the workers to skip the call."""
        with self._cancelling:
            for rank, number in self._table.numbers(pending).items():
                past = self._table.answered(rank)
                self._cancelled[rank] = {n for n in self._cancelled[rank] if n > past} | {number}
            while True:
                try:
                    return self._cancels.enqueue(self._cancelled)
                except ReaderDied as error:  # the others get it
                    self._release(self._cancels, error.rank)

    def begin_to_close(self) -> None:
        """No call is sent any more."""
        self._is_closed = True

    def close(self) -> None:
        """Workers end when they have run what was sent."""
        for queue in [*self._sent, self._cancels]:
            queue.close()

    def submit(self, pending: Pending, message: list[Any], deadline: Deadline) -> None:
        """Sends a call. Waits while one of its workers owes as many answers as it may.

        Raises:
            WorkerDied, CallTimedOut, ConcurrentUse, Closed: no worker gets the call.
            Exception: what pickling the arguments raises.
        """
        while (waits := self.attempt(pending, message, deadline)) is not None:
            may_send, full = waits
            self.must_be_in_time(self._answers.wait(may_send, deadline), pending, full, deadline)

    def attempt(
        self, pending: Pending, message: list[Any], deadline: Deadline
    ) -> tuple[Callable[[], bool], list[int]] | None:
        """Sends a call, and returns None. Or returns what to wait for before the next attempt, and
        the workers that owe too many answers. Raises as `submit`."""
        if (self._is_sending and self.lock.is_mine()) or self._answers.is_in_a_call:
            raise ConcurrentUse(REENTRY)
        ranks = pending.ranks
        may_send: Callable[[], bool] | None = None
        with self.lock:
            if self._is_closed:
                raise Closed("this group of workers is closed")
            if self.needs_heal():
                self.heal(ranks)
            full = self._table.full(ranks)
            try:
                if not full:
                    self._is_sending = True
                    try:
                        if self._send(pending, message, deadline):
                            return None
                    finally:
                        self._is_sending = False
                    self._answers.wait(lambda: False, Deadline(0))  # they may keep the space
            except ReaderDied as error:  # its answers end with its death, too
                if error.rank in self._table.deaths:  # while another one is recovered
                    self._release_dead()
                else:
                    before = self._table.died[error.rank]
                    may_send = partial(self._has_died, error.rank, before)
        return may_send or partial(self._may_send, ranks), full

    def attempt_at_once(
        self, pending: Pending, message: list[Any]
    ) -> tuple[bool, tuple[Callable[[], bool], list[int]] | None]:
        """Returns whether no other thread sends, and if so what `attempt` returns. Raises as
        `submit`."""
        return self._if_free(lambda: self.attempt(pending, message, Deadline(0)))

    def _if_free(self, call: Callable[[], T]) -> tuple[bool, T | None]:
        """Returns whether no other thread has the lock, and if so what `call` returns with it. A
        signal handler that raises leaves the lock free, too."""
        try:
            if not self.lock.acquire(blocking=False):
                return False, None
            return True, call()
        finally:
            try:  # noqa: SIM105
                self.lock.release()  # no call before it, in which a handler could raise
            except RuntimeError:
                pass  # it is another thread's

    def must_be_in_time(
        self, has_room: bool, pending: Pending, full: list[int], deadline: Deadline
    ) -> None:
        """Raises CallTimedOut if a wait after an attempt has taken too long."""
        if not has_room or (not full and deadline.has_passed()):
            text = f"no room for {pending.name}()"
            raise self._answers.late(text, full or pending.ranks, deadline.timeout)

    def heal_now(self, ranks: Iterable[int]) -> None:
        """Heals, once no other thread sends or heals."""
        with self.lock:
            self.heal(ranks)

    def _has_died(self, rank: int, before: int) -> bool:
        """Another thread may have replaced it meanwhile."""
        return self._table.died[rank] > before

    def _may_send(self, ranks: Iterable[int]) -> bool:
        return bool(self._table.deaths) or self._is_closed or not self._table.full(ranks)

    def _send(self, pending: Pending, message: list[Any], deadline: Deadline) -> bool:
        """Returns whether the workers get the call; if it raises, none does."""
        if self._unsure is not None:
            self._find_out()
        if self._ended:
            self._end_streams()
        pending.died = [*self._table.died]
        if len(pending.ranks) == len(self._ranks):
            return self._send_by(self.calls, pending, self._ranks, message, deadline)
        if not self._has_opened_lanes and not self._open_lanes(deadline):
            return False
        for at, rank in enumerate(pending.ranks):
            lane = self._lanes[rank]
            try:
                while not self._send_by(lane, pending, [rank], message, deadline):
                    if at == 0:
                        return False
                    self._answers.wait(lambda: False, Deadline(0))
            except ReaderDied:
                if at == 0:
                    raise
                # Others have it already: it counts as sent, and lost.
                self._answers.wait(partial(self._table.deaths.__contains__, rank), NEVER)
                pending.take(rank, None, self._table.deaths[rank])
        return True

    def _send_by(
        self,
        queue: MessageQueue[Any],
        pending: Pending,
        ranks: Sequence[int],
        message: list[Any],
        deadline: Deadline,
    ) -> bool:
        """Returns False if there is no space for it now."""
        before = self._sent[queue]
        self._unsure = (queue, before, pending, ranks)
        try:
            message[0] = self._table.begin(pending, ranks)
            if self.store is None:
                queue.enqueue(message, deadline.left(_SLICE))
            else:
                try:
                    self.store._begin_to_send(pending)
                    queue.enqueue(message, deadline.left(_SLICE))
                finally:
                    self.store._sending = None
        except BaseException as error:
            self._find_out()
            if isinstance(error, TimedOut):
                return False
            raise
        self._sent[queue] = before + 1
        if self._table.deaths or pending is self._opening:
            self._was_sent(pending, ranks)
        self._unsure = None
        return True

    def _was_sent(self, pending: Pending, ranks: Sequence[int]) -> None:
        self._has_opened_lanes |= pending is self._opening
        if self._table.deaths:
            for rank in ranks:  # one was noted before the call was
                if (death := self._table.deaths.get(rank)) is not None:
                    self._table.fail(rank, death)

    def end_stream(self, key: int, ranks: Sequence[int]) -> None:
        """Ends a stream at once, or with the next call. Never waits: it may be called anywhere."""
        self._ended.append((key, ranks))
        if not (self.lock.is_mine() or self._answers.is_in_a_call):
            self._if_free(self._end_streams_now)

    def _end_streams_now(self) -> None:
        self._is_sending = True
        try:
            with suppress(MemlaneError):  # of a worker that has died
                self._find_out()
                self._end_streams()
        finally:
            self._is_sending = False

    def _end_streams(self) -> None:
        """Sends the ends of streams, as far as there is space."""
        while self._ended and not self._is_closed:
            key, ranks = self._ended[0]
            queues = [self.calls]
            if len(ranks) < len(self._ranks):
                queues = [self._lanes[rank] for rank in ranks if self._has_opened_lanes]
            for queue in queues:  # again, if an end was sent by some: that changes nothing
                try:
                    if not self._send_by(queue, Pending("end", []), [], [0, END, key], Deadline(0)):
                        return
                except ReaderDied:
                    if queue is self.calls:  # the others have not got it
                        raise
            self._ended.popleft()

    def _find_out(self) -> None:
        """Finds out whether a call was sent in which a signal handler has raised."""
        if self._unsure is None:
            return
        queue, before, pending, ranks = self._unsure
        self._sent[queue] = queue.statistics().messages
        if self._sent[queue] == before:
            self._table.take_back(pending, ranks)
        else:
            self._was_sent(pending, ranks)
        self._unsure = None

    def _open_lanes(self, deadline: Deadline) -> bool:
        """Gives each worker a queue of its own, so that a busy one delays no call of another."""
        while len(self._lanes) < len(self._ranks):
            rank = len(self._lanes)
            self._lanes.append(self._queue(f"calls[{rank}]", rank))
        message = [0, LANES, [self._nameless(rank) for rank in self._ranks]]
        return self._send_by(self.calls, self._opening, [], message, deadline)

    def _nameless(self, rank: int) -> Handle:
        """Removes the name of a lane's segment: its worker attaches by this process's descriptor,
        and nothing is left behind, however long that takes."""
        lane = self._lanes[rank]
        self._release(lane, rank)  # it may be open already
        lane.wait_until_ready(0)
        return lane.readmit(rank)

    def _release_dead(self) -> None:
        for rank in [*self._table.deaths]:
            self.release(rank)
