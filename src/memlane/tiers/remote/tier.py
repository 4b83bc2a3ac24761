"""The callers' side of a tier on a server: arguments, reports, and what is known of keys. Requests
under way are the dispatcher's."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from memlane import _native
from memlane._base.deadline import Deadline, seconds_of
from memlane.errors import Closed, TimedOut, WrongProcess, system_fault
from memlane.tiers.remote.answers import Answers
from memlane.tiers.remote.blocks import Blocks
from memlane.tiers.remote.dispatcher import Dispatcher
from memlane.tiers.remote.requests import LATE, Call, Drain, Kind, Order, OrderKind, Question
from memlane.tiers.remote.worker import Connect
from memlane.tiers.reports import Reports
from memlane.tiers.tier import CHANGED, Done, Namespace, Rows, Ticket, Tier, TierPin
from memlane.tiers.waiting import Wakeup

_GRACE = 0.05  # seconds for the dispatcher to answer that nothing is under way


@dataclass(frozen=True)
class RemoteStatistics:
    """Counters of a remote tier since it was opened, and its current state.

    Attributes:
        stored: blocks that were stored.
        loaded: blocks that were loaded.
        missed: loads of keys that were not there.
        errors: blocks that the server refused, or did not answer about.
        corrupt: loads whose bytes were not those that were stored: of another version, size or key.
        expired: blocks that missed their deadline.
        queue: blocks under way.
        stalled: whether the server did not answer, and is not tried for a while.
    """

    stored: int
    loaded: int
    missed: int
    errors: int
    corrupt: int
    expired: int
    queue: int
    stalled: bool


class RemoteTier(Tier):
    """A tier on a server; subclasses bring the connection.

    Blocks have the names `prefix`, then 24 bytes of the digest of namespace and key. Each has a
    CRC-32C seeded with its key. A server that does not answer is not tried for a second, then two,
    four, up to a minute; meanwhile its blocks fail at once, and the log says so once.
    """

    what = "a remote tier"
    stores_once = True
    logs_outages = True

    def __init__(
        self,
        rows: Any,
        connect: Connect,
        connect_first: Connect,
        *,
        prefix: bytes,
        namespace: str | bytes,
        timeout: float,
        connections: int,
        crc_of_key: Callable[[bytes], int] = _native.crc32c,
        reports_changed: bool = True,
    ) -> None:
        """Args:
        rows, namespace, timeout, connections: as of every `Tier`; timeout in seconds.
        connect: makes a connection, or raises Unanswered.
        connect_first: the same, for the constructor, which raises what this raises.
        prefix: what the names of all blocks begin with.
        crc_of_key: returns what the CRC of a block begins with, for the digest of its key.
        reports_changed: whether a load of other bytes than were stored is an error, or a miss.
        """
        shape = Rows(rows)
        self._namespace: Namespace = Namespace(namespace)
        self._timeout = seconds_of(timeout)
        self._rows = shape
        self._pid = os.getpid()
        first = connect_first(Deadline(min(max(self._timeout, 1.0), 5.0)))
        self._answers = Answers()
        try:
            self._wakeup = Wakeup()
            self._reports = Reports(self._wakeup)
            blocks = Blocks(rows, shape, crc_of_key, CHANGED if reports_changed else False)
        except BaseException:
            first.close()
            raise
        self._dispatcher = Dispatcher(
            self.what,
            prefix + self._namespace.id.hex().encode() + b":",
            blocks,
            self._reports,
            self._wakeup,
            self._answers,
            connect,
            connections,
            first,
        )
        self._state = self._dispatcher.state
        self._tickets = count(1)
        self._is_closed = False

    def _check(self) -> None:
        if self._is_closed:
            raise Closed(f"{self.what} is closed")
        if os.getpid() != self._pid:
            raise WrongProcess(f"{self.what} was opened in the parent process")

    # Keys ----------------------------------------------------------------------------------------

    def has(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Returns for each key whether it is there, or None: then the server is being asked, and
        answers within the tier's timeout. While the server does not answer, no key is there.
        Raises `Closed`, `WrongProcess`, `InvalidType`, `InvalidArgument`."""
        self._check()
        digests = self._namespace.digests(keys)
        if self._state.is_stalled():
            return [False] * len(digests)
        now = time.monotonic()
        found, unknown = self._answers.read(digests, now)
        if unknown:
            self._dispatcher.submit(Question(unknown, now + self._timeout))
        if self._state.outage.is_open:  # then nobody waits for the answer
            return [is_there is True for is_there in found]
        return found

    def hold(self, keys: Sequence[bytes]) -> TierPin:
        """Returns what is known to be there. Nothing keeps a server from removing it. Raises as
        `has`."""
        return TierPin([is_there is True for is_there in self.has(keys)])

    def touch(self, keys: Sequence[bytes]) -> None:
        """Does nothing: a server counts the reads itself. Raises as `has`."""
        self._check()
        self._namespace.digests(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        self._check()
        if digests := self._namespace.digests(keys):
            self._order("forget", digests)

    def clear(self) -> None:
        self._check()
        self._order("clear", [])

    def _order(self, kind: OrderKind, digests: list[bytes]) -> None:
        deadline = Deadline(self._timeout)
        order = Order(kind, digests, deadline.end)
        self._dispatcher.submit(order)
        error = order.error if order.wait(deadline.left(3600)) else LATE
        if error is not None:
            number = errno.EIO if order.is_refused else errno.ETIMEDOUT
            raise system_fault(number, f"{self.what} cannot {kind} blocks: {error}")
        self._check_open()

    def _check_open(self) -> None:
        """Raises Closed: another thread has closed it meanwhile."""
        if self._state.is_ended and self._state.failure is None:
            raise Closed(f"{self.what} is closed")

    # Blocks --------------------------------------------------------------------------------------

    def store(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
        return self._begin("store", keys, ids, timeout)

    def load(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
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
        self._dispatcher.submit(
            Call(ticket, kind, digests, rows, now, now + seconds, ok, len(digests))
        )
        return ticket

    def poll(self) -> list[Done]:
        self._check()
        return self._reports.take(self._wakeup.clear)

    def fileno(self) -> int:
        self._check()
        return self._wakeup.descriptor

    def statistics(self) -> RemoteStatistics:
        """Returns its counters and its current state. Raises `Closed`, `WrongProcess`."""
        self._check()
        counts = self._state.counts
        return RemoteStatistics(
            stored=counts["stored"],
            loaded=counts["loaded"],
            missed=counts["missed"],
            errors=counts["errors"],
            corrupt=counts["corrupt"],
            expired=counts["expired"],
            queue=self._state.under_way,
            stalled=self._state.is_stalled(),
        )

    # Life ----------------------------------------------------------------------------------------

    def drain(self, timeout: float | None = None) -> bool:
        self._check()
        deadline = Deadline(self._timeout if timeout is None else timeout)
        drain = Drain()
        self._dispatcher.submit(drain)
        is_idle = drain.wait(max(_GRACE, deadline.left(3e6)))
        self._check_open()
        return is_idle

    def close(self, timeout: float | None = None) -> None:
        if os.getpid() != self._pid:
            return
        deadline = Deadline(self._timeout if timeout is None else timeout)
        with suppress(Closed):  # by another thread
            is_idle = self.drain(deadline.left())
            # After a failure the workers may still read rows; else they have nothing to do.
            seconds = None if self._state.failure is None else max(_GRACE, deadline.left())
            if not is_idle or not self._dispatcher.stop(seconds):
                text = f"{self.what} has work under way; its rows must not be freed"
                raise TimedOut(text, timeout)
        self._dispatcher.stop()
        self._is_closed = True

    def __del__(self) -> None:
        if hasattr(self, "_is_closed") and os.getpid() == self._pid:
            self._dispatcher.stop(0)  # this may be its own thread, or the exit
