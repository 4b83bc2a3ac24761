"""Receives the answers of all workers, and notices their deaths.

One thread at a time receives, for all that wait (`_leader`). A signal handler may raise wherever
Python is called. So no call comes between the gather's and the note of what it has returned
(`_came`) or raised (`_failed`), and what is noted is handled, or handled again, before the next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from memlane import (
    CallTimedOut,
    Closed,
    ConcurrentUse,
    Gather,
    InvalidArgument,
    PeerDied,
    TimedOut,
    WorkerDied,
    WriterDied,
)
from memlane._base.deadline import NEVER, Deadline
from memlane._importing import fork_waits
from memlane.workers.processes import Processes
from memlane.workers.serving import rebuilt
from memlane.workers.table import Pending, Table

if TYPE_CHECKING:
    from memlane.workers.awaiting import Loops

_log = logging.getLogger("memlane.workers")

REENTRY = (
    "this call is made in the middle of another one of this group, by a signal handler or while "
    "its arguments are pickled: make it when that has returned"
)
_AT_ONCE = 64  # answers that are taken by one call
_STACK_SECONDS = 1.0  # timeouts from which on errors have stacks
_DYING_SECONDS = 1.0  # a process drops its locks one by one, before its exit code is known


class Answers:
    """The way back from the workers.

    Attributes:
        followers: what is released when an answer has come: locks of threads, and coroutines.
        is_closed: nothing comes any more.
    """

    def __init__(self, table: Table, processes: Processes, gather: Gather[Any]) -> None:
        self._table, self._processes, self._gather = table, processes, gather
        self._dequeue_many = gather.dequeue_many
        self._leader: dict[str, int] = {}  # the thread that receives
        self.followers: list[Any] = []
        self._came: list[Any] = []  # answers that were taken, until they are handed on
        self._failed: BaseException | None = None  # perhaps instead of an answer
        self._dying: int | None = None  # a worker that is being buried
        self._is_closing = self.is_closed = False
        self._loops: Loops | None = None

    @property
    def is_in_a_call(self) -> bool:
        """This thread receives, and a signal handler has interrupted it."""
        return bool(self._leader) and self._leader == {"is": threading.get_ident()}

    @property
    def loops(self) -> Loops:
        """The event loops that wait for answers."""
        if self._loops is None:
            with fork_waits:
                from memlane.workers.awaiting import Loops  # which imports asyncio

            self._loops = Loops(self, self._gather)
        return self._loops

    def wait(self, is_done: Callable[[], bool], deadline: Deadline) -> bool:
        """Receives answers until `is_done`; returns False at the deadline, or once it is closed.

        Raises ConcurrentUse in a signal handler that has interrupted such a wait.
        """
        if self.is_in_a_call:
            raise ConcurrentUse(REENTRY)
        mine = {"is": threading.get_ident()}
        while not is_done():
            try:
                if self._leader.setdefault("is", mine["is"]) == mine["is"]:
                    while not is_done():
                        if not self._take(deadline.timeout_left()):
                            return is_done()
                    return True
            finally:
                if self._leader == mine:  # no call before it, in which a handler could raise
                    self._leader.clear()
                    if self.followers:
                        self._wake()
            self._follow(is_done, deadline)
            if deadline.has_passed():
                return is_done()
        return True

    def _follow(self, is_done: Callable[[], bool], deadline: Deadline) -> None:
        """Sleeps while another thread receives. No Condition: a handler may raise at any step."""
        sleeper = threading.Lock()
        sleeper.acquire()
        self.followers.append(sleeper)  # before the look: what changes `is_done` wakes it
        try:
            if self._leader and not is_done():
                sleeper.acquire(timeout=deadline.left(1.0))
        finally:
            self.followers.remove(sleeper)

    def _wake(self) -> None:
        for sleeper in [*self.followers]:
            with suppress(RuntimeError):  # it is awake
                sleeper.release()

    def _take(self, timeout: float | None) -> bool:
        """Takes the messages that are there, or notes a death. Returns False if nothing has come,
        or will come."""
        if self._dying is not None:
            self._bury(self._dying)
        if self._failed is not None:
            self._is_of_an_answer(self._failed)
        try:
            if not self._came:
                self._came = self._dequeue_many(_AT_ONCE, timeout)
        except BaseException as error:
            self._failed = error  # as above: no call before it
            if not self._is_of_an_answer(error):
                return self._ends(error)
        else:
            while came := self._came:
                answer = came[0]
                rank, number, has_returned, value = answer
                if has_returned and number:
                    self._table.answer(rank, number, value, None)
                else:
                    self._hand_on(rank, number, has_returned, value)
                if came and came[0] is answer:  # else a handler that called has handed it on
                    del came[0]
        if self.followers:
            self._wake()
        return True

    def _is_of_an_answer(self, error: BaseException) -> bool:
        """Fails the calls whose answers were taken, and not returned, because of the error."""
        lost = False
        if not self._is_closing:
            for writer in self._gather.statistics().writers:
                lost |= self._table.lose(writer.rank, writer.taken, error)
        self._failed = None
        return lost

    def _ends(self, error: BaseException) -> bool:
        """Notes a death, or raises. Returns False if nothing has come, or will come."""
        if isinstance(error, TimedOut) or (isinstance(error, Closed) and self._is_closing):
            return False
        if not isinstance(error, WriterDied) or error.rank is None:
            raise error
        self._bury(error.rank)
        return True

    def _hand_on(self, rank: int, number: int, has_returned: bool, value: Any) -> None:
        error = None
        if not has_returned:
            error = rebuilt(value, f"worker {rank} (pid {self._processes.of(rank).pid})")
        self._table.answer(rank, number, value, error)
        if number == 0:  # of its start: the name of its ring can go
            with suppress(TimedOut, PeerDied):
                self._gather.wait_until_ready(0)

    def note_death(self, rank: int) -> None:
        """Takes all that a worker has said whose process has ended, or was killed."""
        if self._gather.statistics().writers[rank].state == "absent":  # it will never be there
            self._end(rank)
            self._note(rank)
        elif not self.wait(lambda: rank in self._table.deaths, Deadline(_DYING_SECONDS)):
            self._processes.of(rank).kill()  # it ends, and takes its time
            self.wait(lambda: rank in self._table.deaths, NEVER)

    def _bury(self, rank: int) -> None:
        """Notes that a worker has ended, of which all answers were taken; opens its place.

        A signal handler may raise in it: then it is done again.
        """
        self._dying = rank
        self._end(rank)
        with suppress(Closed):  # by another thread, meanwhile
            with suppress(InvalidArgument):
                self._gather.release_writer(rank)
            if not self._is_closing:
                self._gather.readmit(rank)
        self._note(rank)
        self._dying = None

    def _end(self, rank: int) -> None:
        process = self._processes.of(rank)
        process.has_ended(_DYING_SECONDS)
        process.end(0.0)

    def _note(self, rank: int) -> None:
        if rank not in self._table.deaths:
            process = self._processes.of(rank)
            death = WorkerDied(rank, process.pid, process.exitcode, self._table.state(rank))
            is_news = not (process.is_killed or self._is_closing or self._table.running(rank))
            if is_news:  # else it was wanted, or a call raises it
                _log.warning("%s", str(death))  # which keeps nothing alive
            self._table.die(rank, death)

    def begin_to_close(self) -> None:
        """Deaths are expected from now on."""
        self._is_closing = True

    def close(self) -> None:
        """Wakes all that wait."""
        self.is_closed = True
        self._wake()
        self._gather.close()

    def timed_out(self, call: Pending, timeout: float | None) -> CallTimedOut:
        """Returns the error of a call that some workers have not answered."""
        return self.late(f"no answer to {call.name}()", [*call.missing], timeout)

    def late(self, text: str, ranks: Iterable[int], timeout: float | None) -> CallTimedOut:
        """Returns the error that names the workers, what they run, and where, if py-spy is there.

        A short timeout asks again soon, and gets no stacks.
        """
        late = tuple(ranks)
        pids = {rank: self._processes.of(rank).pid for rank in late}
        places: dict[int, str] = {}
        if timeout is not None and timeout >= _STACK_SECONDS:
            with fork_waits:
                from memlane.workers.places import places_of  # which few need

            places = places_of(pids.values())
        workers = ", ".join(
            f"worker {rank} (pid {pid}, in {self._table.running(rank) or 'no call'}"
            f"{places.get(pid, '')})"
            for rank, pid in pids.items()
        )
        return CallTimedOut(f"timed out after {timeout} s; {text}: {workers}", timeout, late)
