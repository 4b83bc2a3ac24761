"""One thread with one connection: it does the batches that the dispatcher hands out, and gives each
back with its outcomes. It connects again by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import PriorityQueue, SimpleQueue
from typing import Any

from memlane._base.deadline import Deadline
from memlane._base.diagnosis import warn
from memlane._base.lifetime import start_thread
from memlane.tiers.remote.blocks import Blocks, changed
from memlane.tiers.remote.requests import LATE, Batch, Call, Order, Question
from memlane.tiers.remote.transport import FAIR, Cut, Late, Refusal, Refused, Transport, Unanswered
from memlane.tiers.waiting import Outage

_LONGEST = 3600.0  # seconds that a server may take, whatever the deadline

Connect = Callable[[Deadline], Transport]
"""Makes a connection, or raises Unanswered."""

Line = tuple[str, int | str, str]
"""A line of the log: the text, and what its %s and %d stand for."""

Queue = PriorityQueue[tuple[float, int, Batch | Line | None]]
"""Work by priority and number: a batch, a line for the log, or None, which ends a worker."""


class Worker:
    """A thread and its connection."""

    def __init__(
        self,
        number: int,
        prefix: bytes,
        blocks: Blocks,
        connect: Connect,
        transport: Transport | None,
        work: Queue,
        done: SimpleQueue[Any],
        outage: Outage,
    ) -> None:
        """Args:
        transport: the connection, if there is one already.
        work: where batches come from.
        done: where they go.
        outage: read only: whether the server is not to be tried.
        """
        self._prefix, self._blocks = prefix, blocks
        self._connect, self._transport = connect, transport
        self._work, self._done, self._outage = work, done, outage
        self._staging = blocks.staging()
        self._thread = threading.Thread(
            target=self._run, name=f"memlane-tier-{number}", daemon=True
        )

    def start(self) -> None:
        """Raises SystemFault: there is no thread left."""
        start_thread(self._thread)

    def join(self) -> None:
        """Waits until it has ended, if it was started; then its connection is closed."""
        if self._thread.ident is not None:
            self._thread.join()
        self._close()

    def _run(self) -> None:
        while (batch := self._work.get()[2]) is not None:
            if isinstance(batch, tuple):
                with suppress(Exception):
                    warn(*batch)
                continue
            self._attempt(batch)
            self._done.put(batch)
        self._close()

    def _close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            with suppress(Exception):
                transport.close()

    def _attempt(self, batch: Batch) -> None:
        """Does the batch, or notes why not."""
        begun = time.monotonic()
        if (isinstance(batch.of, Call) and batch.of.is_over) or batch.of.deadline <= begun:
            batch.end(LATE)
            return
        if self._outage.lasts(begun):
            batch.unanswered = "it did not answer a moment ago"
            return
        try:
            was_there = self._transport is not None
            try:
                self._do(batch)
            except Cut:
                if not was_there:
                    raise
                self._close()  # servers end idle connections; all requests may be repeated
                self._do(batch)
            return
        except Refused as error:
            batch.refused = str(error)
            return
        except Late as error:
            batch.waited = time.monotonic() - begun
            if batch.waited < FAIR:  # its deadline was too short
                batch.end(LATE)
            else:
                batch.unanswered = str(error)
        except Unanswered as error:
            batch.unanswered = str(error)
        except BaseException as error:  # of a library, a panic in Rust, too: as if unanswered
            batch.unanswered = f"{type(error).__name__}: {error}"
        self._close()

    def _left(self, batch: Batch) -> Deadline:
        left = batch.of.deadline - time.monotonic()
        if left <= 0:
            raise Late(LATE)
        return Deadline(min(_LONGEST, left))

    def _do(self, batch: Batch) -> None:
        if self._transport is None:
            self._transport = self._connect(self._left(batch))
        transport = self._transport
        names = [self._prefix + digest for digest in batch.digests]
        match batch.of:
            case Call(kind="store") as call:
                values = self._blocks.values(call, batch)
                refusals = transport.put(names, values, self._left(batch))
                outcomes = [True if each is None else str(each) for each in refusals]
            case Call() as call:
                into = self._blocks.into(batch, self._staging)
                found = transport.get(names, into, self._left(batch))
                outcomes = self._blocks.place(call, batch, into, found)
                if bad := changed(outcomes):
                    with suppress(Refused):  # else they could not be stored again
                        transport.remove([names[at] for at in bad], self._left(batch))
            case Question():
                found_there = transport.ask(names, self._left(batch))
                refused = [str(each) for each in found_there if isinstance(each, Refusal)]
                if refused and len(refused) == len(names):
                    raise Refused(refused[0])
                outcomes = [each is True for each in found_there]
            case Order(kind="forget"):
                transport.remove(names, self._left(batch))
                return
            case Order():
                transport.clear(self._prefix, self._left(batch))
                return
        if len(outcomes) != len(batch.places):
            raise Unanswered(f"it answers about {len(outcomes)} of {len(batch.places)} blocks")
        batch.outcomes = outcomes
