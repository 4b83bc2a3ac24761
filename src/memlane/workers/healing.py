"""Starts the workers of a group, and others in the places of those that have died."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import TYPE_CHECKING, Any

from memlane import Gather, PeerDied, TimedOut, WorkerDied
from memlane._base.deadline import Deadline
from memlane.workers.processes import Process, Processes, Starter, shielded
from memlane.workers.ticket import Ticket

if TYPE_CHECKING:
    from memlane import Handle
    from memlane.workers.answers import Answers
    from memlane.workers.sending import Sender
    from memlane.workers.table import Pending, Table

_MOST_STARTS = 3  # of a worker that dies each time before it is recovered


class Healing:
    """Starts the workers of a group, and replaces them.

    Args:
        start: starts the process of a ticket.
        on_death, timeout: as a group's.
        recover: that of the group, for the given ranks.

    Attributes:
        generation: how many workers were replaced.
        unrecovered: ranks whose new workers have not got their state yet.
    """

    def __init__(
        self,
        table: Table,
        processes: Processes,
        gather: Gather[Any],
        answers: Answers,
        sender: Sender,
        world: int,
        start: Callable[[Ticket], Any],
        on_death: str,
        recover: Callable[[list[int]], object],
        timeout: float | None,
    ) -> None:
        self._table, self._processes, self._gather = table, processes, gather
        self._answers, self._sender, self._start_process = answers, sender, start
        self._on_death, self._recover, self._timeout = on_death, recover, timeout
        self._ranks = tuple(range(world))
        self.generation = 0
        self.unrecovered: set[int] = set()
        self._starts = dict.fromkeys(self._ranks, 0)  # of replacements that were not recovered
        self._is_ready = self._is_under_way = False

    def start(self, deadline: Deadline) -> None:
        """Starts all workers, and returns when they are ready."""
        starts = [self._begin(rank, *self._sender.handles(rank)) for rank in self._ranks]
        self._until_ready(starts, deadline)
        self._is_ready = True

    def heal(self, ranks: Iterable[int]) -> None:
        """Replaces workers that have died, or raises for them, before a call of these. With the
        sender's lock held."""
        deaths = self._table.deaths
        if self._is_under_way:  # `recover` calls
            for rank in ranks:
                if rank in deaths:
                    raise copy(deaths[rank])
            return
        while deaths or self.unrecovered:
            for rank, death in [*deaths.items()]:
                if self._on_death == "raise" or self._starts[rank] >= _MOST_STARTS:
                    raise copy(death)  # whose traceback keeps this call's frames
            try:
                everybody = self._on_death == "restart" and deaths
                self.replace(self._ranks if everybody else [*deaths])
            except WorkerDied:
                if not deaths:
                    raise

    def replace(self, ranks: Iterable[int]) -> None:
        """Replaces these workers, dead or alive. With the sender's lock held."""
        self._is_under_way = True
        try:
            for rank in ranks:
                if rank not in self._table.deaths:
                    self._processes.of(rank).kill()
                    self._answers.note_death(rank)
            starts = []
            for rank in ranks:
                self.unrecovered.add(rank)
                self._starts[rank] += 1
                self.generation += 1
                starts.append(self._begin(rank, *self._sender.readmit(rank)))
            self._until_ready(starts, Deadline(self._timeout))
            new = sorted(self.unrecovered - self._table.deaths.keys())
            if new:
                self._recover(new)
            self._starts.update(dict.fromkeys(new, 0))
            self.unrecovered.difference_update(new)
        finally:
            self._is_under_way = False

    def _begin(self, rank: int, calls: Handle, cancels: Handle, lane: Handle | None) -> Pending:
        """Starts the process of a rank, and does not wait for it."""
        death, before = self._table.deaths.get(rank), self._processes.find(rank)
        try:
            start, answers = self._table.start(rank), self._gather.export_handle(rank)
            store = None if self._sender.store is None else self._sender.store._storage.handle()
            ticket = Ticket(rank, len(self._ranks), calls, answers, cancels, lane, store)
            is_ours = isinstance(
                self._start_process, Starter
            )  # others' processes stay interruptible
            with shielded(blocks_interrupts=is_ours):
                self._processes.add(Process(rank, self._start_process(ticket)))
        except BaseException:
            if death is not None and self._processes.find(rank) is before:  # it has no other one
                self._table.die(rank, death)
                self._sender.release(rank)
            raise
        return start

    def _until_ready(self, starts: list[Pending], deadline: Deadline) -> None:
        """Returns when all workers are ready; their queues have no names then."""
        pids, is_attached = self._processes.pids, True
        try:
            self._sender.wait_until_ready(deadline, pids)
            if not self._is_ready:  # else other threads may receive
                self._gather.wait_until_ready(deadline.timeout_left(), processes=pids)
        except TimedOut:
            is_attached = False
            self._answers.wait(lambda: False, Deadline(0))
        except PeerDied as error:
            rank = self._processes.rank_of(error.pid)
            if rank is not None:
                self._answers.note_death(rank)
        is_over = self._answers.wait(
            lambda: all(s.is_settled() for s in starts) or any(s.errors for s in starts), deadline
        )
        for start in starts:
            for rank, failure in start.errors.items():
                if self._is_ready:  # else all are killed
                    self._answers.note_death(rank)
                raise failure
            for rank, pid in start.values.items():
                self._processes.of(rank).pid = pid
        if not is_over or not (starts or is_attached):
            late = [rank for start in starts for rank in start.missing] or self.unrecovered
            raise self._answers.late("workers were not ready", late, deadline.timeout)
