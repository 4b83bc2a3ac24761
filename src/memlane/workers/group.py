"""The faces of a group and of some of its workers: calls, and how a group starts and ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from itertools import count
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, overload
from weakref import ref

from memlane import (
    Closed,
    ConcurrentUse,
    Gather,
    InvalidArgument,
    QueueStatistics,
    WrongProcess,
)
from memlane._base.arguments import MAX_SEGMENT_BYTES, integer_from
from memlane._base.deadline import NEVER, Deadline
from memlane._base.labels import checked_label
from memlane._base.lifetime import Owned
from memlane.workers.answers import Answers
from memlane.workers.call import Call
from memlane.workers.callbacks import Callbacks
from memlane.workers.healing import Healing
from memlane.workers.processes import Processes, Starter
from memlane.workers.sending import Sender
from memlane.workers.store import WorkersStore
from memlane.workers.stream import Stream
from memlane.workers.table import Pending, Table
from memlane.workers.ticket import PLAIN, SCATTER, Ticket

W = TypeVar("W")
R = TypeVar("R")
T = TypeVar("T")
P = ParamSpec("P")

_MOST_WORKERS = 1 << 12
_LEAST_STORE = 1024  # bytes
_ON_DEATH = ("raise", "replace", "restart")
_LONGEST_NAME = 26  # with ".answers" that of a gather
_LEAVING_SECONDS = 1.0  # for a worker without a call
_BROKEN_OFF_SECONDS = 1.0  # for calls under way, when the block of a group was left by an exception


def _label(factory: object) -> str:
    """The default name of a group."""
    text = re.sub(r"[^A-Za-z0-9._-]", "", getattr(factory, "__name__", ""))
    return text[:_LONGEST_NAME] or "workers"


class Workers(Generic[W]):
    """Some workers of a group, and how long their calls may take: `group[1]`, `group[2:]`,
    `group.within(5)`."""

    def __init__(
        self, group: WorkerGroup[W], ranks: Sequence[int], seconds: float | None = None
    ) -> None:
        self._of, self._ranks, self._seconds = group, tuple(ranks), seconds

    @property
    def _group(self) -> WorkerGroup[W]:
        return self._of

    @property
    def ranks(self) -> list[int]:
        """Their ranks."""
        return [*self._ranks]

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, which: int | slice | Iterable[int]) -> Workers[W]:
        """One of them, or several.

        Raises:
            IndexError: there is no such worker.
            InvalidArgument: one is named twice.
        """
        if isinstance(which, slice):
            found: Sequence[int] = self._ranks[which]
        elif isinstance(which, Iterable):
            found = [self._ranks[at] for at in which]
        else:
            found = [self._ranks[which]]
        if len(set(found)) < len(found):
            raise InvalidArgument(f"each worker can be named once, not {found}")
        return Workers(self._group, found, self._seconds)

    def within(self, seconds: float | None) -> Workers[W]:
        """The same workers; their calls raise `CallTimedOut` after that many seconds."""
        Deadline(seconds)  # which refuses what is no number
        return Workers(self._group, self._ranks, seconds)

    @overload
    def submit(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Call[R]: ...
    @overload
    def submit(self, method: str, /, *args: Any, **kwargs: Any) -> Call[Any]: ...
    def submit(self, method: Any, /, *args: Any, **kwargs: Any) -> Call[Any]:
        """Begins a call of a method of the workers, or of a function whose first argument is the
        worker. Waits while one of them has `max_in_flight` calls to answer.

        Raises:
            WorkerDied: a worker has died, and is not replaced; no worker gets the call.
            CallTimedOut: there was no room for it in time; no worker gets it.
            InvalidType: an argument cannot be pickled.
            ConcurrentUse: it is made while the arguments of another call are pickled, or by a
                signal handler in the middle of another call.
            Closed: the group was closed.
        """
        return self._submit(PLAIN, method, args, kwargs)

    def _submit(self, kind: int, method: Any, args: Any, kwargs: Any) -> Call[Any]:
        name, method = self._group._named(method)
        return self._group._send(
            self._ranks, self._seconds, name, [None, kind, method, args, kwargs]
        )

    @overload
    def call(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...
    @overload
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]: ...
    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Returns the answers of the workers by rank. Raises as `submit` and `Call.result`."""
        return self.submit(method, *args, **kwargs).result()

    @overload
    async def acall(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...
    @overload
    async def acall(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]: ...
    async def acall(self, method: Any, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Is `call` for asyncio: other tasks run while it waits, also for room, and while workers
        are replaced. If it is cancelled, the workers go on, and their answers are dropped. Raises
        as `call`.
        """
        name, method = self._group._named(method)
        message = [None, PLAIN, method, args, kwargs]
        return await (await self._group._asend(self._ranks, self._seconds, name, message))

    @overload
    def scatter(self, method: Callable[[W, T], R], items: Sequence[T]) -> Call[R]: ...
    @overload
    def scatter(self, method: str, items: Sequence[Any]) -> Call[Any]: ...
    def scatter(self, method: Any, items: Sequence[Any]) -> Call[Any]:
        """Begins a call with another argument for each worker: an item each, in the order of
        `ranks`. All items are written once; with some of a group's workers, once for each of these.
        So no worker gets its item if another's cannot be pickled.

        Raises:
            InvalidArgument: there is not one item for each worker.
            MemlaneError: as `submit`.
        """
        if len(items) != len(self):
            raise InvalidArgument(f"{len(self)} workers need as many items, not {len(items)}")
        by_rank = dict(zip(self._ranks, items, strict=True))
        return self._submit(SCATTER, method, by_rank, {})

    @overload
    def stream(
        self,
        method: Callable[Concatenate[W, P], Iterable[R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Stream[R]: ...
    @overload
    def stream(self, method: str, /, *args: Any, **kwargs: Any) -> Stream[Any]: ...
    def stream(self, method: Any, /, *args: Any, **kwargs: Any) -> Stream[Any]:
        """Begins a call of a generator, and returns an iterator over what it yields: a list by rank
        for each step, until the first worker's ends. Workers are one step ahead, and run other
        calls between two steps; `within` limits each step. Raises as `submit`.
        """
        name, method = self._group._named(method)
        return Stream(self._group, self._ranks, self._seconds, name, [method, args, kwargs])


class WorkerGroup(Workers[W], Owned):
    """Workers on this host, each a process that has `factory(rank, world, *args, **kwargs)`.

    Args:
        factory: a class, or a function that returns a worker; picklable, unless `start_method` is
            "fork". None with `start`.
        world: number of workers.
        args, kwargs: further arguments of the factory.
        start_method: of multiprocessing: "spawn", "fork" or "forkserver".
        start: starts a worker in another way: gets the ticket with which its process, of this host
            and user, calls `serve`. Returns that process (with pid, exitcode, join and kill), or
            None if it is nobody's to kill.
        env: returns changes to the environment of a rank, {"CUDA_VISIBLE_DEVICES": "0"}.
        prefix: of each line that a worker prints, by Python or not: "[worker {rank}] ", also with
            {pid}. A thread of your process prints them; None leaves the output as it is.
        on_death: "raise": calls raise `WorkerDied` until `replace` is called. "replace": a worker
            that has died is replaced before the next call. "restart": so are all others, which may
            wait for it. In each case the calls that it has not answered raise.
        recover: called as `recover(group, ranks)` when replaced workers are ready, before any other
            call: it gives them the state that they need.
        timeout: seconds for the start of the workers, with their factories.
        name: what people call the group in `memlane ls`, logs and errors, as of a `Gather`; by
            default that of the factory.
        max_in_flight: number of calls that a worker may have to answer.
        max_chunk_bytes: of the queues, in bytes, as for `MessageQueue`.
        store: bytes of shared memory for objects that are put once and read by the workers of many
            calls, `group.store`; None: the group has no store.

    Attributes:
        world: as above.
        generation: how many workers were replaced.

    Raises:
        CallTimedOut, WorkerDied: workers were not ready in time, or died.
        Exception: what a factory raised.

    Threads may share a group. Leaving its `with` block closes it. Each worker's process leads a
    process group: what a worker has started ends with it, and Ctrl-C reaches your process alone.

    Example::

        if __name__ == "__main__":  # workers import this program
            with WorkerGroup(complex, 2) as group:  # each has complex(rank, 2)
                print(group.call("conjugate"))  # [-2j, (1-2j)]
                print(group[1].call("__abs__"))  # of one of them: [2.23606797749979]
    """

    _instead_of_pickling = "its calls are made in the process that has created it"

    def __init__(
        self,
        factory: Callable[..., W] | None,
        world: int,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        start_method: str = "spawn",
        start: Callable[[Ticket], Any] | None = None,
        env: Callable[[int], Mapping[str, str]] = lambda rank: {},
        prefix: str | None = None,
        on_death: Literal["raise", "replace", "restart"] = "raise",
        recover: Callable[[WorkerGroup[W], list[int]], object] | None = None,
        name: str | None = None,
        timeout: float | None = 120.0,
        max_in_flight: int = 8,
        max_chunk_bytes: int = 10 * 1024 * 1024,
        store: int | None = None,
    ) -> None:
        self.world = integer_from("world", world, 1, _MOST_WORKERS)
        most = integer_from("max_in_flight", max_in_flight, 1, 1 << 16)
        if store is not None:
            store = integer_from("store", store, _LEAST_STORE, MAX_SEGMENT_BYTES)
        if start is None:
            start = Starter(start_method, env, factory, tuple(args), dict(kwargs or {}), prefix)
            start.prepare()
        elif prefix is not None:
            raise InvalidArgument(
                "with start=, workers print where their own program does: no prefix"
            )
        if on_death not in _ON_DEATH:
            raise InvalidArgument(f"on_death must be one of {_ON_DEATH}, not {on_death!r}")
        deadline = Deadline(timeout)
        self._ranks, self._seconds = tuple(range(self.world)), None
        classes = getattr(factory, "__mro__", ())  # which keep their functions, and so the ids
        self._methods = {
            id(f): name for base in classes for name, f in vars(base).items() if callable(f)
        }
        ring = {"max_chunks": most + 2, "max_chunk_bytes": max_chunk_bytes}
        self._keys = count()  # of streams
        self._is_closed = False
        self._processes = Processes()
        self._table = Table(self.world, most)
        label = _label(factory) if name is None else checked_label(name, _LONGEST_NAME)
        answers = f"{label}.answers"
        self._gather: Gather[Any] = Gather(self.world, name=answers, **ring)  # type: ignore[arg-type]
        self._answers = Answers(self._table, self._processes, self._gather)
        self._callbacks = Callbacks(self._answers)
        self._sender = Sender(self._table, self._answers, self._ranks, label, ring)
        self._gather.answers(self._sender.calls)
        self._store: WorkersStore | None = None
        own = ref(self)  # else a circle would keep a dropped group

        def recovered(ranks: list[int]) -> None:
            if recover is not None and (group := own()) is not None:
                recover(group, ranks)

        self._healing = Healing(
            *(self._table, self._processes, self._gather, self._answers, self._sender),
            *(self.world, start, on_death, recovered, timeout),
        )

        def heal(ranks: Iterable[int]) -> None:
            if (group := own()) is not None:  # which is not dropped meanwhile
                group._healing.heal(ranks)

        table, unrecovered = self._table, self._healing.unrecovered
        self._sender.heal = heal
        self._sender.needs_heal = lambda: bool(table.deaths or unrecovered)
        self._own(self._processes.kill)
        try:
            if store is not None:
                given = store, self.world, f"{label}.store", self._table, self._answers
                self._store = self._sender.store = WorkersStore(*given)
            self._healing.start(deadline)
        except BaseException:
            self.kill()
            raise

    @property
    def generation(self) -> int:
        """The number of workers that were replaced."""
        return self._healing.generation

    @property
    def _group(self) -> WorkerGroup[W]:
        return self  # not kept as an attribute, which would be a circle

    @property
    def store(self) -> WorkersStore:
        """Its store. Raises `InvalidArgument` if it was made without one."""
        if self._store is None:
            raise InvalidArgument("this group has no store: make it with store=, in bytes")
        return self._store

    def _check(self) -> None:
        if not self._processes.are_here:
            raise WrongProcess("this group of workers belongs to the process that has created it")
        if self._is_closed:
            raise Closed("this group of workers is closed")

    # Starting and ending -------------------------------------------------------------------------

    def replace(self, *ranks: int) -> None:
        """Starts other processes in the place of these workers; kills those that live. Returns when
        they are ready and recovered. Calls that they have not answered raise `WorkerDied`.

        Raises:
            IndexError: there is no such worker.
            Exception: what their start, or `recover`, raises, as for the group.
        """
        chosen = self[dict.fromkeys(ranks)].ranks
        with self._sender.lock:
            self._check()
            self._healing.replace(chosen)

    def check(self, timeout: float = 0.0) -> None:
        """Waits that many seconds for a death: a rest between calls that notices one at once.

        Raises:
            WorkerDied: a worker has died, which the next call may replace.
            Closed: the group was closed.
        """
        deaths = self._table.deaths
        self._answers.wait(lambda: bool(deaths) or self._is_closed, Deadline(timeout))
        self._check()
        for death in [*deaths.values()]:
            raise copy(death)

    def close(self, timeout: float = 5.0) -> None:
        """Lets workers finish the calls that they have, and end. Kills those that have not ended
        after `timeout` seconds, and logs it. Calls without an answer raise `Closed`.

        Idempotent, from any thread. In a forked child it does nothing.
        """
        if self._is_closed or not self._processes.are_here:
            return
        deadline = Deadline(timeout)
        self._is_closed = True
        self._sender.begin_to_close()
        self._answers.begin_to_close()
        try:
            with suppress(ConcurrentUse):  # in a signal handler
                self._answers.wait(lambda: self._table.is_idle, deadline)
            self._sender.close()
            for rank in self._ranks:
                if (name := self._table.running(rank)) is not None:
                    self._processes.kill_late(rank, name, timeout)
            self._processes.end(max(deadline.left(), _LEAVING_SECONDS))
        finally:
            self._processes.kill()
            for rank in self._ranks:
                self._table.fail(rank, Closed("this group of workers is closed"))
            self._answers.close()
            if self._store is not None:
                self._store._close()
            self._disown()

    def kill(self) -> None:
        """Ends all workers at once, whatever they do. Idempotent; in a forked child it does
        nothing."""
        self._processes.kill()
        for rank in self._ranks:
            self._table.fail(rank, Closed("this group of workers was killed"))
        self.close(0.0)

    def _end_block(self, has_failed: bool) -> None:
        self.close(_BROKEN_OFF_SECONDS if has_failed else 5.0)

    def __enter__(self) -> Self:
        self._check()
        return self

    def _named(self, method: Any) -> tuple[str, Any]:
        """Returns the name of a method, and how to send it."""
        name = method if isinstance(method, str) else self._methods.get(id(method))
        if name is not None:
            return name, name  # which the worker's own class may override
        return str(getattr(method, "__name__", method)), method

    def _send(
        self, ranks: tuple[int, ...], seconds: float | None, name: str, message: list[Any]
    ) -> Call[Any]:
        self._check()
        pending, deadline = Pending(name, ranks), NEVER if seconds is None else Deadline(seconds)
        self._sender.submit(pending, message, deadline)
        return Call(self, pending, deadline)

    async def _asend(
        self, ranks: tuple[int, ...], seconds: float | None, name: str, message: list[Any]
    ) -> Call[Any]:
        self._check()
        pending, deadline = Pending(name, ranks), Deadline(seconds)
        await self._answers.loops.submit(self._sender, pending, message, deadline)
        return Call(self, pending, deadline)

    def _cancel(self, pending: Pending, kill: bool) -> None:
        self._check()
        self._sender.cancel(pending)
        running = [rank for rank in [*pending.missing] if self._table.is_running(rank, pending)]
        if kill and running:
            self.replace(*running)

    def _end_stream(self, key: int, ranks: tuple[int, ...]) -> None:
        if self._processes.are_here:
            self._sender.end_stream(key, ranks)

    # Looking -------------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """The workers' process ids by rank."""
        return [self._processes.of(rank).pid for rank in self._ranks]

    @property
    def exitcodes(self) -> list[int | None]:
        """The workers' exit codes by rank; None while one runs."""
        return [self._processes.of(rank).exitcode for rank in self._ranks]

    def statistics(self) -> QueueStatistics:
        """Returns those of the queue to all workers, with the state of each by rank.

        Raises:
            Closed: the group was closed.
        """
        return self._sender.statistics()
