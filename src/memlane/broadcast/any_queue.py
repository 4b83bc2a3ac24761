"""The base of `MessageQueue` and `Gather`: roles, many messages by one call, iterating, awaiting,
the end of a block; and a wait for many of them at once."""

from __future__ import annotations

import select
import sys
from collections.abc import AsyncIterator, Iterator
from itertools import count
from math import ceil
from typing import TYPE_CHECKING, Any, Generic, Protocol

from memlane._base.arguments import integer_from, items_of
from memlane._base.deadline import Deadline
from memlane._base.lifetime import Owned
from memlane._importing import fork_waits
from memlane._native import Burst, after_return
from memlane.broadcast.handle import Requests, id_of_requests
from memlane.broadcast.watching import NOW, AwaitableEnd
from memlane.errors import InvalidArgument, TimedOut, WriterClosed

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    from typing_extensions import (
        TypeVar,
    )  # a checker has its own; typing's knows defaults from 3.13

    from memlane.broadcast.awaiting import Awaiting
    from memlane.broadcast.watching import ReceivingEnd, Watching


if TYPE_CHECKING:
    M = TypeVar("M", default=Any)
    Queue = TypeVar("Queue", bound="AnyQueue[Any]")
else:
    from typing import TypeVar

    M = TypeVar("M")

_LONGEST = 86400.0  # seconds; poll() takes milliseconds as a 32-bit int


class SendingEnd(AwaitableEnd, Protocol):
    """An end that sends; `send_many` counts in the burst what it has sent."""

    @property
    def send_many(self) -> Callable[[tuple[Any, ...], float | None, Burst], None]: ...


class AnyEnd(Protocol):
    """The methods of an end that every queue and gather uses."""

    def check(self) -> None: ...
    def note_work(self, requests: bytes) -> None:
        """Shows observers that the messages here answer those of the queue with that id."""


class AnyQueue(Owned, Generic[M]):
    """One end, which sends or receives messages."""

    _is_closed = False  # through this object
    _awaiting: Awaiting | None = None
    _watch: Watching | None = None
    _returned = 0  # when `first_ready` last returned it
    _reader: ReceivingEnd | None
    _writer: SendingEnd | None

    @property
    def _end(self) -> AnyEnd:
        raise NotImplementedError

    def _must_be_reader(self, call: str) -> ReceivingEnd:
        """Raises WrongRole unless it can `call`."""
        raise NotImplementedError

    def _must_be_writer(self, call: str) -> SendingEnd:
        """Raises WrongRole unless it can `call`."""
        raise NotImplementedError

    def _enqueue(self, obj: M, timeout: float | None) -> None:
        """Does what a user's subclass makes of `enqueue`, and raises what that raises."""
        raise NotImplementedError

    def dequeue(self) -> M:
        """Returns the next object. Raises as in the subclass."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes it in this process, and tells the peers. Raises as in the subclass."""
        raise NotImplementedError

    def _end_block(self, has_failed: bool) -> None:
        if has_failed:
            self._is_closed = True
            self._abandon()
        else:
            self.close()

    def _check(self) -> None:
        self._end.check()

    def answers(self, work: Requests) -> None:
        """Shows observers that the messages of this queue answer those of `work`.

        `memlane stuck` then knows that a reader of this queue, which has sent `work`, waits for the
        process that has to answer, and does not take it for an idle one. Either end may call it,
        once; without a ring on this host it has no effect.

        Raises:
            InvalidType: `work` is not a MessageQueue.
            Closed: this queue was closed.
        """
        requests = id_of_requests(work)
        self._end.note_work(requests)

    # Many messages --------------------------------------------------------------------------

    def enqueue_many(self, objs: Iterable[M], timeout: float | None = None) -> None:
        """Sends objects in order, as `enqueue` sends each, by one call and with one deadline.
        All of them are taken from `objs` before the first is sent. Readers that sleep are woken
        once, at the end, or before what takes long, but for a signal handler.

        If it raises, the error says as `error.sent` how many of them were sent, the first ones: a
        timeout, an object that cannot be pickled, a death or a signal handler may come between
        any two. What a handler raises after the last one is raised once the call has returned.
        `timeout` is in seconds, for all together.

        Raises:
            InvalidType: `objs` is not iterable.
            MemlaneError: as `enqueue`.
        """
        writer = self._writer or self._must_be_writer("enqueue_many")
        burst, total = Burst(), -1
        try:
            objects = tuple(items_of("objs", objs))
            total = len(objects)
            writer.send_many(objects, timeout, burst)
        except BaseException as error:  # no call in it, after which another handler could run
            if burst.sent < total or total <= 0:
                burst.error = error
                raise
            after_return.error = error

    def dequeue_many(
        self,
        max: int,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        *,
        lend: bool = True,
    ) -> list[M]:
        """Returns the next objects, in order (of a gather, those of each writer): waits for one as
        `dequeue` does, and returns it with those that are there behind it, at most `max`.

        It may return fewer than are there: one that is larger than 64 KiB, or has an array of 4 KiB
        or more, comes alone; a batch takes no more (of each writer) after a mebibyte; there is one
        of the latest, and one over a connection. The chunks of all are in use until it returns.
        `timeout` is in seconds. If it raises, nothing was consumed, but a first object that cannot
        be decoded; an object behind the first may be decoded again by a later call. A message with
        such arrays counts as read before it is decoded: this process gets it again after an
        interrupt.

        Raises:
            InvalidArgument: `max` is less than 1.
            MemlaneError: as `dequeue`.
        """
        most = most_of(max)
        reader = self._reader or self._must_be_reader("dequeue_many")
        return reader.receive_many(timeout, cancel, bool(lend), most)

    def __iter__(self) -> Iterator[M]:
        self._must_be_reader("iterate")
        return self

    def __next__(self) -> M:
        try:
            return self.dequeue()
        except WriterClosed:
            raise StopIteration from None
        except StopIteration as error:  # raised by decoding; it must not end the loop
            raise RuntimeError("decoding a message raised StopIteration") from error

    # Awaiting -------------------------------------------------------------------------------

    def _awaited(self, end: AwaitableEnd) -> Awaiting:
        if self._awaiting is None:
            with fork_waits:
                from memlane.broadcast.awaiting import Awaiting  # which imports asyncio

            self._awaiting = Awaiting(end)
        return self._awaiting

    async def aenqueue(self, obj: M, timeout: float | None = None) -> None:
        """Is `enqueue` for asyncio: other tasks run while it waits. If it is cancelled, nothing
        was sent. Encoding and copying happen in the event loop. `timeout` is in seconds.

        Raises:
            ConcurrentUse: another coroutine awaits this object.
            MemlaneError: as `enqueue`.
        """
        awaited = self._awaited(self._must_be_writer("aenqueue"))
        await awaited.call(lambda: self._enqueue(obj, NOW), timeout, is_send=True)

    async def adequeue(self, timeout: float | None = None, *, lend: bool = True) -> M:
        """Is `dequeue` for asyncio: other tasks run while it waits. If it is cancelled, nothing
        was consumed, and another coroutine may await it at once. Decoding and copying happen in the
        event loop. `timeout` is in seconds.

        Raises:
            ConcurrentUse: another coroutine awaits this object.
            MemlaneError: as `dequeue`.
        """
        lends = bool(lend)

        def attempt() -> M:
            message: M = self._must_be_reader("adequeue").receive(NOW, None, lends)
            return message

        awaited = self._awaited(self._must_be_reader("adequeue"))
        return await awaited.call(attempt, timeout, is_send=False)

    async def adequeue_many(
        self, max: int, timeout: float | None = None, *, lend: bool = True
    ) -> list[M]:
        """Is `dequeue_many` for asyncio, as `adequeue` is `dequeue`. `timeout` is in
        seconds.

        Raises:
            InvalidArgument: `max` is less than 1.
            ConcurrentUse: another coroutine awaits this object.
            MemlaneError: as `dequeue`.
        """
        lends, most = bool(lend), most_of(max)

        def attempt() -> list[M]:
            return self._must_be_reader("adequeue_many").receive_many(NOW, None, lends, most)

        awaited = self._awaited(self._must_be_reader("adequeue_many"))
        return await awaited.call(attempt, timeout, is_send=False)

    def __aiter__(self) -> AsyncIterator[M]:
        self._must_be_reader("iterate")
        return self

    async def __anext__(self) -> M:
        try:
            return await self.adequeue()
        except WriterClosed:
            raise StopAsyncIteration from None
        except StopAsyncIteration as error:  # raised by decoding; it must not end the loop
            raise RuntimeError("decoding a message raised StopAsyncIteration") from error

    def _watched(self, call: str) -> Watching:
        """Kept as long as this object: code that has registered the descriptor must see the end,
        and can unregister it afterwards."""
        if self._watch is None:
            self._watch = self._must_be_reader(call).watch()
        return self._watch

    def fileno(self) -> int:
        """A descriptor that is readable while a message or an end is there, for select, epoll and
        event loops. It is this object's, and stays open, and readable, when that is closed: never
        read or close it.

        Then call `dequeue(timeout=0)`, which may still raise `TimedOut`: the descriptor is quiet
        again within 0.1 s of the last message. It shows the death of a writer within a second, and
        at once where the system has pidfds.

        Raises:
            WrongRole: this object only sends.
            WriterClosed: all writers of a gather had closed before it was asked for.
            Closed: this object was closed, and had no descriptor before.
            WrongProcess: it was opened before a fork.
            SystemFault: there is no descriptor or thread left.
        """
        if not self._is_closed:
            self._check()
        return self._watched("fileno").fileno()


def most_of(most: object) -> int:
    """The argument `max` of a call that returns many messages."""
    return integer_from("max", most, 1, sys.maxsize)


_returns = count(1)


def first_ready(queues: Iterable[Queue], timeout: float | None = None) -> Queue:
    """Waits until one of these readers has a message, or an end, and returns its queue or gather.

    Nothing is consumed: call `dequeue` on it. If several are ready, it is the one that was returned
    longest ago. A queue whose writer has closed or died is ready, too, until you leave it out.

    Args:
        queues: readers, as many as you like; each has a descriptor (`ulimit -n`).
        timeout: in seconds; 0 polls.

    Raises:
        TimedOut: after `timeout` seconds none is ready.
        InvalidArgument: there is none to wait for.
        WrongRole, Closed, WrongProcess, SystemFault: as `fileno`, of any of them.
    """
    deadline = Deadline(timeout)
    watched = [(queue, queue._watched("first_ready")) for queue in queues]
    if not watched:
        raise InvalidArgument("first_ready needs at least one queue")
    for queue, _ in watched:
        queue._check()
    poller = select.poll()
    for _, watch in watched:
        poller.register(watch, select.POLLIN)
    while True:
        ready = [queue for queue, watch in watched if watch.is_readable]
        if ready:
            first = min(ready, key=lambda queue: queue._returned)
            first._returned = next(_returns)
            return first
        if deadline.has_passed():
            raise TimedOut(
                f"timed out after {timeout} s; none of {len(watched)} queues is ready", timeout
            )
        poller.poll(ceil(1000 * deadline.left(_LONGEST)))
