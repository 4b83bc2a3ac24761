"""What all tiers on other machines share: calls and their deadlines, threads, and checked bytes.

Whoever calls only leaves requests, and takes reports. One thread, the desk, owns all that is under
way: it hands blocks to the carriers, which each have a connection, and ends calls at their
deadlines. So an exception of a signal's handler, which strikes the main thread alone, can leave
nothing half done.

A block is stored as a header of 16 bytes, whose CRC-32C is of the key's digest and the row, and the
row. It is loaded into memory of the carrier's, checked, and copied into its row unless its call is
over by then.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from queue import Empty, PriorityQueue, SimpleQueue
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from memlane import _native
from memlane._base.deadline import Deadline, seconds_of
from memlane._base.diagnosis import warn
from memlane.errors import Closed, TimedOut, WrongProcess, system_fault
from memlane.tiers._waiting import Bell, Outage
from memlane.tiers.tier import CHANGED, DIGEST_BYTES, Done, Namespace, Rows, Ticket

HEADER = struct.Struct("<4sIII")  # magic, bytes of the row, CRC, reserved
MAGIC = b"MLT1"
_BATCH_BYTES = 4 << 20
_MOST_BLOCKS = 32  # of a batch
_REMEMBERED = 1.0  # seconds that an answer about a key is believed
_UNREAD = 10.0  # the same, until somebody has read it: an engine's step may take long
_MOST_QUESTIONS = 1000  # that are asked together
_LONGEST_CALL = 3600.0  # seconds that a server may take, whatever the deadline
_GRACE = 0.05  # seconds, for the desk to say that nothing is under way
_FAIR = 1.0  # seconds of waiting, in one call or several, after which a server counts as silent
_AHEAD = 64  # batches of stores that a load may overtake
_LATE = "the deadline has passed"

Kind = Literal["store", "load", "ask", "forget", "clear"]


class Unanswered(Exception):
    """The server is not there, or does not answer: it is left alone for a while. The text says
    why.

    Attributes:
        was_cut: the connection has ended, as idle ones do: another may do better.
    """

    was_cut = False


class Cut(Unanswered):
    was_cut = True


class Late(Unanswered):
    """Nothing came in time."""

    def __init__(self, why: str = "it did not answer in time") -> None:
        super().__init__(why)


class Refused(Exception):
    """The server answers that it will not do this, to a question or an order. The text says why."""


class Refusal(str):
    """Why a server that answers has not done something with one block."""


def digest_of(name: bytes) -> bytes:
    """Of the key of a block that has that name."""
    return name[-DIGEST_BYTES:]


class Carrier(Protocol):
    """One connection, used by one thread. Every call has a timeout in seconds, and raises
    Unanswered, after which the connection is closed. `ask`, `forget` and `clear` raise Refused."""

    def store(
        self, names: Sequence[bytes], values: Sequence[tuple[bytes, memoryview]], timeout: float
    ) -> list[Refusal | None]:
        """Stores each value, of two parts, unless there is one of that name."""
        ...

    def load(
        self, names: Sequence[bytes], into: Sequence[memoryview], timeout: float
    ) -> list[int | Refusal]:
        """Reads values, and returns their sizes: -1 if there is none of that name. A value of
        another size than its memory is not in the memory."""
        ...

    def ask(self, names: Sequence[bytes], timeout: float) -> list[bool]:
        """Which there are."""
        ...

    def forget(self, names: Sequence[bytes], timeout: float) -> None:
        """Removes them."""
        ...

    def clear(self, prefix: bytes, timeout: float) -> None:
        """Removes all whose names begin with it."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class RemoteStatistics:
    """Of a remote tier since it was opened, and now.

    Attributes:
        stored, loaded: blocks.
        missed: loads of keys that were not there.
        errors: blocks that the server refused, or did not answer about.
        corrupt: loads whose bytes were not those that were stored: of another version, size or key.
        expired: blocks that missed their deadline.
        queue: blocks under way, now.
        stalled: whether the server did not answer, and is left alone for a while.
    """

    stored: int
    loaded: int
    missed: int
    errors: int
    corrupt: int
    expired: int
    queue: int
    stalled: bool


@dataclass(eq=False)
class _Call:
    """A `store` or a `load`."""

    ticket: Ticket
    kind: Kind
    digests: list[bytes]
    rows: npt.NDArray[np.int32]
    begun: float
    deadline: float
    ok: npt.NDArray[np.bool_]
    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False  # with the lock: its rows are the caller's
    error: str | None = None
    nbytes: int = 0


@dataclass(eq=False)
class _Query:
    """A question or an order, of no call."""

    kind: Kind
    digests: list[bytes]
    deadline: float
    begun: float = field(default_factory=time.monotonic)
    # Of C: a signal's handler that raises in a wait of `threading` may leave its lock held.
    done: SimpleQueue[None] = field(default_factory=SimpleQueue)
    error: str | None = None

    def wait(self, seconds: float) -> bool:
        """Whether it is done by then."""
        with suppress(Empty):
            self.done.get(timeout=seconds)
            return True
        return False


@dataclass(eq=False, slots=True)
class _Answer:
    """Whether a key is there, since when that is known, and until when it is believed."""

    is_there: bool
    since: float
    until: float

    @classmethod
    def of(cls, is_there: bool, now: float, seconds: float = _REMEMBERED) -> _Answer:
        return cls(is_there, now, now + seconds)

    def read(self, now: float) -> bool | None:
        """The answer, if it is believed still: for a second from now on."""
        if self.until <= now:
            return None
        self.until = min(self.until, now + _REMEMBERED)
        return self.is_there


@dataclass(eq=False)
class _Batch:
    """What a carrier does at once, and what became of it."""

    of: _Call | _Query
    places: range
    outcomes: list[bool | str] = field(default_factory=list)  # False: not there; text: why not
    unanswered: str | None = None
    waited: float = 0.0  # seconds, for an answer that did not come
    refused: str | None = None  # of a query

    @property
    def digests(self) -> list[bytes]:
        return self.of.digests[self.places.start : self.places.stop]


class _Stop:
    """Tells the desk's thread to end."""


class RemoteTier:
    """A `Tier` on a server. `connect` makes a carrier, or raises Unanswered; `connect_first` raises
    the errors of the constructor.

    Blocks have the names `prefix`, then 24 bytes of the digest of namespace and key.
    """

    what = "a remote tier"
    is_read_only = False
    stores_once = True  # it looks itself whether a key is there
    logs_outages = True

    def __init__(
        self,
        rows: Any,
        connect: Callable[[float], Carrier],
        connect_first: Callable[[float], Carrier],
        *,
        prefix: bytes,
        namespace: str | bytes,
        timeout: float,
        connections: int,
        crc_of_key: Callable[[bytes], int] = _native.crc32c,
        reports_changed: bool = True,
    ) -> None:
        """`crc_of_key`: of a digest, what a block's CRC begins with. `reports_changed`: whether a
        load of other bytes than were stored is an error, or a mere miss."""
        held = Rows(rows)
        self._namespace = Namespace(namespace)
        self._timeout = seconds_of(timeout)
        self._rows = held
        self._pid = os.getpid()
        first = connect_first(min(max(self._timeout, 1.0), 5.0))
        try:
            self._desk = _Desk(
                *(rows, held, connect, prefix + self._namespace.id.hex().encode() + b":"),
                *(self.what, crc_of_key, CHANGED if reports_changed else False),
            )
        except BaseException:
            first.close()
            raise
        self._desk.start(connections, first)
        self._tickets = iter(range(1, 1 << 62))
        # Of each thread, what its last poll has taken, and whether it has returned it: only then
        # does the next poll, of any thread, delete these reports. A handler that raises loses none.
        self._claims: dict[int, tuple[list[Ticket], bool]] = {}
        self._polling = threading.RLock()
        self._turn: object = None  # of the poll that has begun last
        self._is_closed = False

    def _check(self) -> None:
        if self._is_closed:
            raise Closed(f"{self.what} is closed")
        if os.getpid() != self._pid:
            raise WrongProcess(f"{self.what} was opened in the parent process")

    # Keys ----------------------------------------------------------------------------------------

    def has(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Whether each is there, as far as it is known; None: it is being asked for, and the answer
        comes within the tier's timeout. Nothing is, from when the server has not answered until it
        does.

        Raises:
            InvalidType, InvalidArgument: a key is not 1 to 255 bytes, or comes twice.
            Closed, WrongProcess: it is closed, or this is a forked child.
        """
        self._check()
        digests = self._namespace.digests(keys)
        if self._desk.is_stalled:
            return [False] * len(digests)
        known, asking = self._desk.known, self._desk.asking
        now = time.monotonic()
        found: list[bool | None] = []
        unknown = []
        for digest in digests:
            answer = known.get(digest)
            is_there = None if answer is None else answer.read(now)
            if is_there is None and digest not in asking:
                unknown.append(digest)
            found.append(is_there)
        if unknown:
            self._desk.inbox.put(_Query("ask", unknown, now + self._timeout))
        if self._desk.is_out:  # then nobody waits for the answer
            return [is_there is True for is_there in found]
        return found

    def hold(self, keys: Sequence[bytes]) -> RemoteHold:
        """What is known to be there. Nothing keeps a server from removing it.

        Raises:
            InvalidType, InvalidArgument, Closed, WrongProcess: as `has`.
        """
        return RemoteHold([is_there is True for is_there in self.has(keys)])

    def touch(self, keys: Sequence[bytes]) -> None:
        """Does nothing: a server knows what is read.

        Raises:
            InvalidType, InvalidArgument, Closed, WrongProcess: as `has`.
        """
        self._check()
        self._namespace.digests(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Nobody finds these keys any more, once those that are being stored are.

        Raises:
            InvalidType, InvalidArgument, Closed, WrongProcess: as `has`.
            SystemFault: the server does not answer.
        """
        self._check()
        if digests := self._namespace.digests(keys):
            self._order("forget", digests)

    def clear(self) -> None:
        """Nobody finds anything of this namespace any more.

        Raises:
            Closed, WrongProcess: as `has`.
            SystemFault: the server does not answer.
        """
        self._check()
        self._order("clear", [])

    def _order(self, kind: Kind, digests: list[bytes]) -> None:
        deadline = Deadline(self._timeout)
        query = _Query(kind, digests, deadline.end)
        self._put(query)
        error = query.error if query.wait(deadline.left(3600)) else _LATE
        if self._desk.is_ended:
            raise Closed(f"{self.what} is closed")
        if error is not None:
            raise system_fault(errno.ETIMEDOUT, f"{self.what} cannot {kind} blocks: {error}")

    # Blocks --------------------------------------------------------------------------------------

    def store(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
        """Begins to store rows. A key that is there already is not stored again.

        Args:
            keys: what to find them by.
            ids: rows, in the same order.
            timeout: seconds until blocks that are not stored yet are reported as failed.

        Raises:
            InvalidType, InvalidArgument: a key or a row is none, or comes twice; nothing is stored.
            Closed, WrongProcess: as `has`.
        """
        return self._begin("store", keys, ids, timeout)

    def load(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
        """Begins to load blocks into rows.

        Args:
            keys: what they were stored under.
            ids: rows, in the same order. What a row has is undefined unless its block is ok.
            timeout: seconds until blocks that are not loaded yet are reported as missing.

        Raises:
            InvalidType, InvalidArgument: a key or a row is none, or comes twice; nothing is loaded.
            Closed, WrongProcess: as `has`.
        """
        return self._begin("load", keys, ids, timeout)

    def _begin(
        self, kind: Kind, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None
    ) -> Ticket:
        self._check()
        digests = self._namespace.digests(keys)
        rows = self._rows.ids(len(digests), ids)
        seconds = self._timeout if timeout is None else seconds_of(timeout)
        now = time.monotonic()
        ok = np.zeros(len(digests), np.bool_)
        ticket = Ticket(next(self._tickets))
        call = _Call(ticket, kind, digests, rows, now, now + seconds, ok, len(digests))
        self._put(call)
        return ticket

    def _put(self, item: _Call | _Query) -> None:
        self._desk.inbox.put(item)
        if self._desk.is_ended:  # perhaps before it was there
            raise Closed(f"{self.what} is closed")

    def poll(self) -> list[Done]:
        """What is done since the last call, in any order. Does not wait.

        Raises:
            Closed, WrongProcess: as `has`.
        """
        self._check()
        me = threading.get_ident()
        claim: tuple[list[Ticket], bool] = ([], False)
        try:
            with self._polling:
                turn = self._turn = object()
                for who, one in [*self._claims.items()]:
                    tickets, is_returned = one
                    if is_returned:
                        for ticket in tickets:
                            self._desk.done.pop(ticket, None)
                        # Without a call in between: a handler may have polled, and claimed more.
                        if who in self._claims and self._claims[who] is one:
                            del self._claims[who]
                self._desk.bell.quiet()
                others = {
                    ticket
                    for who, (tickets, _) in [*self._claims.items()]
                    if who != me
                    for ticket in tickets
                }
                found = [*self._desk.done.items()]
                reports = [done for ticket, done in found if ticket not in others]
                tickets = [done.ticket for done in reports]
                if self._turn is not turn:  # a signal's handler has polled, and has them
                    return []
                claim = (tickets, False)
                returned = (tickets, True)
                self._claims[me] = claim
        except BaseException:
            if me in self._claims and self._claims[me] is claim:
                del self._claims[me]
            self._desk.bell.ring()
            raise
        # A signal's handler runs, and may raise or poll, after a call only: from here on there is
        # none.
        if self._claims[me] is not claim:
            return []
        self._claims[me] = returned
        return reports

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has something to report, for select, epoll and
        asyncio. It is the tier's: never read or close it.

        Raises:
            Closed, WrongProcess: as `has`.
        """
        self._check()
        return self._desk.bell.descriptor

    def statistics(self) -> RemoteStatistics:
        """Counts since it was opened, and how it is now.

        Raises:
            Closed, WrongProcess: as `has`.
        """
        self._check()
        counts = self._desk.counts
        return RemoteStatistics(
            stored=counts["stored"],
            loaded=counts["loaded"],
            missed=counts["missed"],
            errors=counts["errors"],
            corrupt=counts["corrupt"],
            expired=counts["expired"],
            queue=self._desk.under_way,
            stalled=self._desk.is_stalled,
        )

    # Life ----------------------------------------------------------------------------------------

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until nothing is under way, not even what was reported as failed.

        Args:
            timeout: in seconds; None: the tier's own.

        Returns:
            False if something was still under way then.

        Raises:
            InvalidType, InvalidArgument: `timeout` is no number.
            Closed, WrongProcess: as `has`.
        """
        self._check()
        deadline = Deadline(self._timeout if timeout is None else timeout)
        idle = _Query("ask", [], inf)
        self._put(idle)
        is_idle = idle.wait(max(_GRACE, deadline.left(3e6)))
        if self._desk.is_ended:
            raise Closed(f"{self.what} is closed")
        return is_idle

    def close(self, timeout: float | None = None) -> None:
        """Waits until nothing is under way, and closes: the rows are the caller's again. What was
        not polled is lost. Closing it again does nothing.

        Args:
            timeout: as of `drain`.

        Raises:
            TimedOut: something is still under way, and the tier is still open: its rows must stay.
            InvalidType, InvalidArgument: as `drain`.
        """
        if os.getpid() != self._pid:
            return
        with suppress(Closed):  # by another thread
            if not self.drain(timeout):
                text = f"{self.what} has work under way; its rows must not be freed"
                raise TimedOut(text, timeout)
        self._desk.end()
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_is_closed") and os.getpid() == self._pid:
            self._desk.inbox.put(_Stop())  # this may be the desk's own thread, or the exit


class RemoteHold:
    """What is known to be there; a context manager.

    Attributes:
        there: a bool for each key.
    """

    def __init__(self, there: list[bool]) -> None:
        self.there = there

    def release(self) -> None:
        """Ends it. Never raises; calling it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Desk:
    """Owns what is under way. Its thread alone changes it, but `poll` takes reports from `done`,
    and `has` shortens how long an answer in `known` is believed.

    Attributes:
        inbox: of calls, queries, finished batches, and the end.
        done: reports that were not taken, by ticket.
        known: whether a key is there, as far as was heard.
        asking: keys whose answers are under way.
        bell: rings when there is a report.
        is_ended: nothing is taken from the inbox any more.
        under_way: blocks of calls.
    """

    def __init__(
        self,
        rows: Any,
        shape: Rows,
        connect: Callable[[float], Carrier],
        prefix: bytes,
        what: str,
        crc_of_key: Callable[[bytes], int],
        mismatch: Literal[False] | str,
    ) -> None:
        self.inbox: SimpleQueue[_Call | _Query | _Batch | _Stop] = SimpleQueue()
        self.done: dict[Ticket, Done] = {}
        self.known: dict[bytes, _Answer] = {}
        self.asking: set[bytes] = set()
        self.counts: Counter[str] = Counter()
        self.under_way = 0
        self.bell = Bell()
        self.is_ended = False
        self._memory = memoryview(rows).cast("B")
        self._row_bytes = shape.nbytes
        self._prefix = prefix
        self._connect = connect
        # By priority and number; a line for the log; None is the end.
        self._work: PriorityQueue[tuple[float, int, _Batch | str | None]] = PriorityQueue()
        self._numbers = count()
        self._carriers: list[threading.Thread] = []
        self._thread: threading.Thread | None = None
        self._what = what
        self._crc_of_key = crc_of_key
        self._mismatch: Literal[False] | str = mismatch
        self._batch = max(1, min(_MOST_BLOCKS, _BATCH_BYTES // self._row_bytes))
        self._open: dict[Ticket, _Call] = {}  # not reported
        self._deadlines: list[tuple[float, Ticket]] = []  # a heap of those, and of others
        self._storing: Counter[bytes] = Counter()
        self._questions: list[_Query] = []  # that nobody was asked yet
        self._waiting: deque[_Query] = deque()  # for stores to end, or for all
        self._batches = 0  # with the carriers
        self._outage = Outage()
        self._waited = 0.0  # seconds since it has answered last, by all whose deadlines were short
        self._tidied = 0.0  # when what is known was

    @property
    def is_stalled(self) -> bool:
        return self._outage.lasts(time.monotonic())

    @property
    def is_out(self) -> bool:
        """Whether the server has not answered, and nothing has been heard of it since."""
        return self._outage.is_open

    def start(self, carriers: int, first: Carrier) -> None:
        """`first`: the connection of the first carrier; the others connect when they have work."""
        size = self._batch * (HEADER.size + self._row_bytes)
        try:
            memory = [bytearray(size) for _ in range(carriers)]
        except MemoryError:
            first.close()
            raise
        self._carriers = [
            threading.Thread(
                target=self._carry,
                args=(None if number else first, memory[number]),
                name=f"memlane-tier-{number}",
                daemon=True,
            )
            for number in range(carriers)
        ]
        desk = threading.Thread(target=self._run, name="memlane-tier", daemon=True)
        try:
            desk.start()
        except RuntimeError as error:  # no thread is left
            first.close()
            raise system_fault(errno.EAGAIN, f"cannot start a thread: {error}") from None
        self._thread = desk
        try:
            for thread in self._carriers:
                thread.start()
        except RuntimeError as error:
            if self._carriers[0].ident is None:
                first.close()
            self.end()
            raise system_fault(errno.EAGAIN, f"cannot start a thread: {error}") from None

    def end(self) -> None:
        """Once nothing is under way. May be repeated, in any thread but its own."""
        self.inbox.put(_Stop())
        if self._thread is not None:
            self._thread.join()

    # The desk's thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            soonest = self._deadlines[0][0] if self._deadlines else inf
            wait = (
                None if soonest == inf else min(_LONGEST_CALL, max(0.0, soonest - time.monotonic()))
            )
            try:
                item = self.inbox.get(timeout=wait)
            except Empty:
                item = None
            if isinstance(item, _Stop):
                return self._stop()
            now = time.monotonic()
            if isinstance(item, _Call):
                self._begin(item, now)
            elif isinstance(item, _Query):
                self._take(item)
            elif isinstance(item, _Batch):
                self._finish(item, now)
            while self._deadlines and self._deadlines[0][0] <= now:
                _, ticket = heappop(self._deadlines)
                if ticket in self._open:
                    self._expire(self._open[ticket], now)
            self._ask_all()
            self._serve_waiting()

    def _stop(self) -> None:
        for _ in self._carriers:
            self._work.put((inf, next(self._numbers), None))
        for thread in self._carriers:
            if thread.ident is not None:
                thread.join()
        self._memory.release()
        self.is_ended = True  # first: whoever puts something after this sees it
        left = [*self._waiting]
        with suppress(Empty):
            while True:
                item = self.inbox.get_nowait()
                if isinstance(item, _Batch):  # that the carriers did before they ended
                    item = item.of
                if isinstance(item, _Query):
                    left.append(item)
        for query in left:
            query.done.put(None)

    def _begin(self, call: _Call, now: float) -> None:
        self._open[call.ticket] = call
        self.under_way += call.left
        if call.left == 0:
            self._report(call, now)
            return
        if call.deadline < inf:
            heappush(self._deadlines, (call.deadline, call.ticket))
        if call.kind == "store":
            self._storing.update(call.digests)
        self._hand_out(call)

    def _take(self, query: _Query) -> None:
        if query.kind == "ask" and query.digests:
            query.digests = [digest for digest in query.digests if digest not in self.asking]
            self.asking.update(query.digests)
            if query.digests:
                self._questions.append(query)
        else:
            self._waiting.append(query)

    def _ask_all(self) -> None:
        """Engines ask for one key at a time: what has come together goes together."""
        questions = self._questions
        if questions and (self.inbox.empty() or len(questions) >= _MOST_QUESTIONS):
            self._questions = []
            digests = [digest for query in questions for digest in query.digests]
            self._hand_out(_Query("ask", digests, questions[0].deadline))

    def _hand_out(self, of: _Call | _Query) -> None:
        blocks = max(1, len(of.digests))
        most = self._batch if isinstance(of, _Call) else blocks
        for at in range(0, blocks, most):
            self._batches += 1
            batch = _Batch(of, range(at, min(blocks, at + most)))
            number = next(self._numbers)  # somebody waits for loads and questions
            self._work.put((number + _AHEAD * (of.kind == "store"), number, batch))

    def _serve_waiting(self) -> None:
        """Orders whose stores have ended, and whoever waits until nothing is under way."""
        for _ in range(len(self._waiting)):
            query = self._waiting.popleft()
            if query.kind == "ask":
                is_due = not self._batches and not self._questions
            elif query.kind == "clear":
                is_due = not self._storing
            else:
                is_due = not any(self._storing[digest] for digest in query.digests)
            if not is_due:
                self._waiting.append(query)
            elif query.kind == "ask":
                query.done.put(None)
            else:
                self._hand_out(query)

    def _finish(self, batch: _Batch, now: float) -> None:
        self._batches -= 1
        of = batch.of
        self._waited += batch.waited
        has_failed = batch.unanswered is not None or (batch.waited and self._waited >= _FAIR)
        if has_failed and self._outage.begin(now):
            why = batch.unanswered or str(Late())
            self._work.put((0, next(self._numbers), why))  # a log may take its time
        if batch.unanswered is not None:
            batch.outcomes = [batch.unanswered] * len(batch.places)
        elif batch.refused is None and batch.outcomes != [_LATE] * len(batch.places):
            self._outage.end()
            self._waited = 0.0
        if isinstance(of, _Query):
            self._answer(of, batch, now)
            return
        self.under_way -= len(batch.places)
        if of.kind == "store":
            for digest in batch.digests:
                self._storing[digest] -= 1
                if not self._storing[digest]:
                    del self._storing[digest]
        for place, outcome in zip(batch.places, batch.outcomes, strict=True):
            if outcome is True or outcome is False or outcome == CHANGED:
                self.known[of.digests[place]] = _Answer.of(outcome is True, now)
            self._count(of.kind, outcome)
            if of.is_over:
                continue
            self.counts["expired"] += outcome == _LATE
            of.ok[place] = outcome is True
            if isinstance(outcome, str) and of.error is None:
                of.error = outcome
            of.nbytes += self._row_bytes * (outcome is True)
        of.left -= len(batch.places)
        if of.left == 0 and not of.is_over:
            self._report(of, now)
        self._forget_old(now)

    def _count(self, kind: Kind, outcome: bool | str) -> None:
        if outcome is True:
            self.counts["stored" if kind == "store" else "loaded"] += 1
        elif outcome is False:
            self.counts["missed"] += 1
        elif outcome == CHANGED:
            self.counts["corrupt"] += 1
        elif outcome != _LATE:
            self.counts["errors"] += 1

    def _answer(self, query: _Query, batch: _Batch, now: float) -> None:
        if query.kind == "ask":
            # A question without an answer is answered, too: whoever asks must not wait for ever.
            outcomes = batch.outcomes if batch.refused is None else [False] * len(query.digests)
            for digest, outcome in zip(query.digests, outcomes, strict=True):
                known = self.known.get(digest)
                # What was stored or forgotten since the question was put is known better.
                if known is None or known.since < query.begun:
                    self.known[digest] = _Answer.of(outcome is True, now, _UNREAD)
            self.asking.difference_update(query.digests)
            self._forget_old(now)
            return
        error = batch.unanswered or batch.refused
        if error is None and batch.outcomes == [_LATE]:
            error = _LATE
        if error is None:
            if query.kind == "clear":
                self.known.clear()
            for digest in query.digests:
                self.known[digest] = _Answer.of(False, now)
        query.error = error
        query.done.put(None)

    def _expire(self, call: _Call, now: float) -> None:
        with call.lock:  # a copy into one of its rows ends first
            call.is_over = True
        self.counts["expired"] += call.left
        call.error = call.error or _LATE
        self._report(call, now)

    def _report(self, call: _Call, now: float) -> None:
        call.is_over = True
        del self._open[call.ticket]
        report = Done(call.ticket, call.ok.copy(), call.error, call.nbytes, now - call.begun)
        self.done[call.ticket] = report
        self.bell.ring()

    def _forget_old(self, now: float) -> None:
        if len(self.known) > 4096 and now >= self._tidied + _REMEMBERED:
            self._tidied = now
            self.known = {key: each for key, each in self.known.items() if each.until > now}

    # The carriers' threads -----------------------------------------------------------------------

    def _carry(self, carrier: Carrier | None, staging: bytearray) -> None:
        while (batch := self._work.get()[2]) is not None:
            if isinstance(batch, str):
                with suppress(Exception):
                    warn("%s is left out until it answers: %s", self._what, batch)
                continue
            carrier = self._attempt(carrier, batch, staging)
            self.inbox.put(batch)
        if carrier is not None:
            with suppress(Exception):
                carrier.close()

    def _attempt(
        self, carrier: Carrier | None, batch: _Batch, staging: bytearray
    ) -> Carrier | None:
        """Does it, or says why not. Returns the connection, if there still is one."""
        begun = time.monotonic()
        is_over = isinstance(batch.of, _Call) and batch.of.is_over
        if is_over or batch.of.deadline <= begun:
            batch.outcomes = [_LATE] * len(batch.places)
            return carrier
        if self._outage.lasts(begun):
            batch.unanswered = "it did not answer a moment ago"
            return carrier
        made: Carrier | None = carrier
        try:
            if made is None:
                made = self._connect(self._left(batch))
            try:
                self._do(made, batch, staging)
            except Cut:
                if made is not carrier:
                    raise
                made.close()  # servers end idle connections; all orders may be repeated
                made = None
                made = self._connect(self._left(batch))
                self._do(made, batch, staging)
            return made
        except Refused as error:
            batch.refused = str(error)
            return made
        except Late as error:
            batch.waited = time.monotonic() - begun
            if batch.waited < _FAIR:  # the deadline's fault
                batch.outcomes = [_LATE] * len(batch.places)
            else:
                batch.unanswered = str(error)
        except Unanswered as error:
            batch.unanswered = str(error)
        except Exception as error:  # of the library: as if it had not answered
            batch.unanswered = f"{type(error).__name__}: {error}"
        if made is not None:
            with suppress(Exception):
                made.close()
        return None

    def _left(self, batch: _Batch) -> float:
        left = batch.of.deadline - time.monotonic()
        if left <= 0:
            raise Late(_LATE)
        return min(_LONGEST_CALL, left)

    def _do(self, carrier: Carrier, batch: _Batch, staging: bytearray) -> None:
        names = [self._prefix + digest for digest in batch.digests]
        match batch.of:
            case _Call(kind="store"):
                batch.outcomes = self._store(carrier, batch, names)
            case _Call():
                batch.outcomes = self._load(carrier, batch, names, staging)
            case _Query(kind="ask"):
                batch.outcomes = [*carrier.ask(names, self._left(batch))]
            case _Query(kind="forget"):
                carrier.forget(names, self._left(batch))
            case _Query():
                carrier.clear(self._prefix, self._left(batch))

    def _row(self, call: _Call, place: int) -> memoryview:
        at = int(call.rows[place]) * self._row_bytes
        return self._memory[at : at + self._row_bytes]

    def _store(self, carrier: Carrier, batch: _Batch, names: list[bytes]) -> list[bool | str]:
        call = batch.of
        values = []
        for place, digest in zip(batch.places, batch.digests, strict=True):
            row = self._row(call, place)  # type: ignore[arg-type]
            crc = _native.crc32c(row, self._crc_of_key(digest))
            values.append((HEADER.pack(MAGIC, self._row_bytes, crc, 0), row))
        refusals = carrier.store(names, values, self._left(batch))
        return [True if refusal is None else str(refusal) for refusal in refusals]

    def _load(
        self,
        carrier: Carrier,
        batch: _Batch,
        names: list[bytes],
        staging: bytearray,
    ) -> list[bool | str]:
        size = HEADER.size + self._row_bytes
        memory = memoryview(staging)
        into = [memory[at * size : (at + 1) * size] for at in range(len(names))]
        found = carrier.load(names, into, self._left(batch))
        outcomes: list[bool | str] = [
            str(got) if isinstance(got, str) else False if got < 0 else self._mismatch
            for got in found
        ]
        whole = [at for at, got in enumerate(found) if got == size]
        call = batch.of
        with call.lock:  # type: ignore[union-attr]
            # The desk may be late itself: then whoever has waited may have the rows already.
            if call.is_over or time.monotonic() >= call.deadline:  # type: ignore[union-attr]
                right: list[bool | str] = [_LATE] * len(whole)
            else:
                right = [
                    is_right or self._mismatch
                    for is_right in _native.place_blocks(
                        [into[at] for at in whole],
                        [self._crc_of_key(batch.digests[at]) for at in whole],
                        self._memory,
                        self._row_bytes,
                        [int(call.rows[batch.places[at]]) for at in whole],  # type: ignore[union-attr]
                    )
                ]
        for at, outcome in zip(whole, right, strict=True):
            outcomes[at] = outcome
        if changed := [name for name, each in zip(names, outcomes, strict=True) if each == CHANGED]:
            with suppress(Refused):  # else they could not be stored again
                carrier.forget(changed, self._left(batch))
        return outcomes
