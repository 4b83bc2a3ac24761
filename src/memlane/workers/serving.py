"""The worker's side: takes calls in the order in which they were sent, runs them, sends answers."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from types import GeneratorType
from typing import Any

from memlane import (
    Cancelled,
    CorruptMessage,
    Gather,
    MemlaneError,
    MessageQueue,
    OutOfMemory,
    PeerDied,
    SegmentMissing,
    TimedOut,
    WorkerError,
    WriterClosed,
    first_ready,
)
from memlane.workers.store import attach, detach, fetched
from memlane.workers.ticket import END, LANES, NEXT, SCATTER, START, Ticket

_log = logging.getLogger("memlane.workers")

_LOOK_SECONDS = 0.001  # between looks for calls that were cancelled: each costs as much as a call
_MOST_CAUSES = 16  # that are sent of an exception; they may go in a circle


def serve(ticket: Ticket, factory: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Is worker `ticket.rank`, in this process: makes `factory(rank, world, *args, **kwargs)`, runs
    calls until the group closes, and then the worker's `close()`, if it has one.

    Raises:
        SystemExit: the group has died, or the factory raised, which the group has been told.
    """
    try:
        answers: Gather[Any] = Gather.create_from_handle(ticket.answers, ticket.rank)
        server = _Server(ticket.rank, answers)
        # In this order: a worker that gets calls can be seen to die.
        calls: MessageQueue[Any] = MessageQueue.create_from_handle(ticket.calls, ticket.rank)
        cancels: MessageQueue[Any] = MessageQueue.create_from_handle(ticket.cancels, ticket.rank)
        inbox = _Inbox(ticket.rank, calls, cancels, server.end_stream)
        if ticket.lane is not None:
            inbox.open(ticket.lane)
        attach(ticket.store)
    except SegmentMissing as error:
        raise SystemExit(f"worker {ticket.rank} leaves: {error}") from None
    try:
        if not server.answer(0, server.make, factory, ticket, args, kwargs):
            raise SystemExit(1)  # without close(), so that it counts as a death
        while True:
            server.run(*inbox.take())
    except _GroupClosed:
        close = getattr(server.worker, "close", None)
        if callable(close):
            close()
        detach(ticket.store)
        inbox.close()
        answers.close()
    except _GroupDied as error:
        raise SystemExit(f"worker {ticket.rank} leaves: {error}") from None


class _GroupClosed(BaseException):
    """No Exception, which a worker's method could catch."""


class _GroupDied(BaseException):
    """As `_GroupClosed`."""


class _Inbox:
    """Merges the queue to all workers and the one to this worker, by the calls' numbers.

    What was sent before a message that was taken from one queue can be taken from the other at
    once. So a message that cannot be decoded, whose number is unknown, has the number that is due
    unless the other queue has that.
    """

    def __init__(
        self,
        rank: int,
        calls: MessageQueue[Any],
        cancels: MessageQueue[Any],
        end_stream: Callable[[int], None],
    ) -> None:
        self._rank, self._end_stream = rank, end_stream
        self._cancels, self._cancelled, self._looked = cancels, set[int](), 0.0
        self._taken = 0
        self._has_lane = False
        self._open = [calls]
        self._held: dict[MessageQueue[Any], Any] = {}
        self._came: defaultdict[MessageQueue[Any], int] = defaultdict(int)  # messages

    def open(self, lane: Any) -> None:
        """Attaches the queue to this worker alone, once."""
        if not self._has_lane:
            self._has_lane = True
            with suppress(SegmentMissing):  # the group has closed it, unused
                self._open.append(MessageQueue.create_from_handle(lane, self._rank))

    def close(self) -> None:
        """Closes the queues."""
        for queue in (*self._open, self._cancels):
            queue.close()

    def take(self) -> tuple[int, Any]:
        """Returns the next call with its number, or the exception that decoding it has raised.

        Keeps nothing of it. Raises _GroupClosed or _GroupDied, once everything was taken;
        CorruptMessage if the call that is due has been lost, after which no answer would be right.
        """
        due = self._taken + 1
        while True:
            if not self._held and len(self._open) == 1:  # no lane, or it was closed
                queue = self._open[0]
                if (message := self._receive(queue, None)) is None:
                    continue
                if self._number_of(message) == due:
                    return self._counted(message)
                self._held[queue] = message
            for queue, message in self._held.items():
                if self._number_of(message) == due:
                    return self._counted(self._held.pop(queue))
            free = [queue for queue in self._open if queue not in self._held]
            undecoded = [q for q, message in self._held.items() if isinstance(message, Exception)]
            if undecoded and not self._receive_any(free, 0):
                return self._counted(self._held.pop(undecoded[0]))
            if not undecoded:
                held = [self._number_of(message) or 0 for message in self._held.values()]
                if held and (not free or min(held) < due):
                    raise CorruptMessage(
                        f"worker {self._rank}: call {due} is missing before {held}"
                    )
                self._receive_any(free, None)

    def _number_of(self, message: Any) -> int | None:
        if isinstance(message, Exception):
            return None
        numbers: list[int] | int = message[0]
        return numbers[self._rank] if isinstance(numbers, list) else numbers

    def _counted(self, message: Any) -> tuple[int, Any]:
        self._taken += 1
        if self._is_cancelled(self._taken):
            message = Cancelled()
        return self._taken, message

    def _is_cancelled(self, number: int) -> bool:
        now = time.monotonic()
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            with suppress(TimedOut, PeerDied, WriterClosed):
                self._cancelled = self._cancels.dequeue(0)[self._rank]
        return number in self._cancelled

    def _receive_any(self, queues: list[MessageQueue[Any]], timeout: float | None) -> bool:
        """Holds a message of one of the queues; returns whether there was one, or an end."""
        if not queues:
            if not self._open:
                raise _GroupClosed
            return False
        try:
            queue = queues[0] if len(queues) == 1 else first_ready(queues, timeout)
        except TimedOut:
            return False
        except Exception as error:
            self._goes_on(error)
            return True
        try:
            message = self._receive(queue, timeout if len(queues) == 1 else 0)
        except TimedOut:
            return False
        if message is not None:
            self._held[queue] = message
        return True

    def _receive(self, queue: MessageQueue[Any], timeout: float | None) -> Any:
        """Returns a call, or the exception that decoding it has raised; None if it was anything
        else."""
        try:
            try:
                message = queue.dequeue(timeout)
            except OutOfMemory:  # it was not taken
                gc.collect()
                message = queue.dequeue(timeout)
        except WriterClosed:
            queue.close()
            self._open.remove(queue)
            return None
        except PeerDied as error:
            raise _GroupDied(str(error)) from None
        except OutOfMemory:
            raise
        except Exception as error:
            before, self._came[queue] = self._came[queue], queue.statistics().messages
            if before == self._came[queue]:
                self._goes_on(error)
                return None
            return error  # it was taken, and cannot be decoded here
        self._came[queue] += 1
        if message[1] == LANES:
            self.open(message[2][self._rank])
        elif message[1] == END:  # each step was sent by the same queue, before
            self._end_stream(message[2])
        else:
            return message
        return None

    def _goes_on(self, error: Exception) -> None:
        """Logs what a signal handler has raised, not the queue, while nothing was taken."""
        if isinstance(error, MemlaneError):
            raise error
        _log.error("a signal handler has raised in idle worker %d", self._rank, exc_info=error)


class _Server:
    """Runs the calls of a worker."""

    worker: Any = None

    def __init__(self, rank: int, answers: Gather[Any]) -> None:
        self._rank, self._answers = rank, answers
        self._streams: dict[int, list[Any]] = {}  # iterator, number of its last step, and that

    def make(self, factory: Callable[..., object], ticket: Ticket, args: Any, kwargs: Any) -> int:
        """Makes the worker; returns the pid, which is the answer to its start."""
        self.worker = factory(ticket.rank, ticket.world, *args, **kwargs)
        return os.getpid()

    def run(self, number: int, message: Any) -> None:
        """Runs a call, and answers it. When it returns, nothing of the call is kept."""
        self.answer(number, self._call, message)

    def _call(self, message: Any) -> Any:
        if isinstance(message, Exception):
            raise message
        _, kind, method, args, kwargs = message
        if kind == NEXT:
            return self._next(*method)
        if kind == SCATTER:
            args = [args[self._rank]]
        elif kind == START:
            key, method = method
            if key not in self._streams:
                args, kwargs = fetched(args, kwargs)
                self._streams[key] = [self._steps(method, args, kwargs), 0, None]
            return self._next(key, 1)
        value = self._run(method, *fetched(args, kwargs))
        if isinstance(value, GeneratorType):
            raise TypeError("the method returned a generator: call it by stream()")
        return value

    def _run(self, method: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(method, str):
            return getattr(self.worker, method)(*args, **kwargs)
        return method(self.worker, *args, **kwargs)

    def _steps(self, method: Any, args: Any, kwargs: Any) -> Iterator[Any]:
        yield from self._run(method, args, kwargs)  # a StopIteration of the method is an error

    def _next(self, key: int, number: int) -> list[Any]:
        """Returns [item], or [] at the end, or raises. Does the same again if a step is asked for
        twice: the first answer may have been lost by a signal handler that raised."""
        stream = self._streams[key]
        if stream[1] != number:
            try:
                step: Any = [*islice(stream[0], 1)]
            except Exception as error:
                step = error
            stream[1:] = number, step
        if isinstance(stream[2], Exception):
            raise stream[2]
        items: list[Any] = stream[2]
        return items

    def end_stream(self, key: int) -> None:
        """Drops a generator, which runs its `finally`."""
        self._streams.pop(key, []).clear()  # its exception refers to it

    def answer(self, number: int, run: Callable[..., Any], *given: Any) -> bool:
        """Sends what `run` returns or raises; returns whether it returned."""
        try:
            self._send([self._rank, number, True, run(*given)])
            return True
        except Exception as error:  # also of a value that cannot be pickled
            packed = portable(error)
        self._send([self._rank, number, False, packed])  # nothing of the call is kept any more
        return False

    def _send(self, message: list[Any]) -> None:
        try:
            self._answers.enqueue(message)
        except PeerDied as error:
            raise _GroupDied(str(error)) from None


def portable(error: BaseException, most: int = _MOST_CAUSES) -> list[Any]:
    """[pickle or None, type, text, frames, link, cause]; the group can read all but the pickle.

    `link` is the attribute that has the cause, which is portable as well.
    """
    packed, text, cause = None, "its text cannot be shown", None
    with suppress(Exception):
        text = str(error)
    with suppress(Exception):
        packed = pickle.dumps(error)
        packed = packed if type(pickle.loads(packed)) is type(error) else None
    link = "__cause__" if error.__cause__ is not None else "__context__"
    linked = getattr(error, link)
    if linked is not None and most and not (link == "__context__" and error.__suppress_context__):
        cause = portable(linked, most - 1)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    trace = "".join(traceback.format_list(frames))
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return [packed, kind, text, trace, link, cause]


def rebuilt(packed: list[Any], who: str) -> BaseException:
    """The exception of which a worker, `who`, has sent the portable form."""
    pickled, kind, text, trace, link, cause = packed
    note = "\n".join([f"raised by {who}:", trace.rstrip()]).rstrip()
    linked = None if cause is None else rebuilt(cause, who)
    if pickled is not None:
        with suppress(Exception):  # its class may be missing here, or refuse to be read
            found = pickle.loads(pickled)
            if isinstance(found, BaseException):
                return _linked(found, note, link, linked)
    return _linked(WorkerError(f"{kind}: {text}"), note, link, linked)


def _linked(
    error: BaseException, note: str, link: str, linked: BaseException | None
) -> BaseException:
    if linked is not None:
        BaseException.__setattr__(error, link, linked)
    add_note(error, note)
    return error


def add_note(error: BaseException, note: str) -> None:
    """Adds a note, once, also to an exception whose class is frozen."""
    notes = getattr(error, "__notes__", [])
    if note not in notes:
        BaseException.__setattr__(error, "__notes__", [*notes, note])
