"""Groups for tests: each rank is a thread of this process, or a process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import pytest

from memlane import MessageQueue
from memlane.groups import TcpGroup
from tests.support import PATIENCE, Aside, Link
from tests.support.missing import package

T = TypeVar("T")
SECRET = "of the tests: 0123456789abcdef"
SMALL = (4096, 4)
"""Chunk bytes and chunks of a queue that costs little."""


class ThreadGroup:
    """A user's own group: rank, world size and a broadcast, here between threads."""

    def __init__(self, rank: int, world_size: int, said: dict[int, Any]) -> None:
        self.rank = rank
        self.world_size = world_size
        self.calls = 0
        self._said = said
        self._news = said.setdefault(-1, threading.Condition())

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        self.calls += 1
        call = self.calls
        with self._news:
            if src == self.rank:
                self._said[call] = obj
                self._news.notify_all()
            self._news.wait_for(lambda: call in self._said, PATIENCE)
            return self._said[call]


def thread_groups(size: int, stack: ExitStack) -> list[Any]:
    """A user's own groups."""
    said: dict[int, Any] = {}
    return [ThreadGroup(rank, size, said) for rank in range(size)]


def tcp_groups(size: int, stack: ExitStack) -> list[Any]:
    """memlane's own groups, over TCP. Rank 0 closes last."""
    first = stack.enter_context(TcpGroup("127.0.0.1", 0, 0, size, secret=SECRET))
    others = [
        stack.enter_context(TcpGroup("127.0.0.1", first.port, rank, size, secret=SECRET))
        for rank in range(1, size)
    ]
    return [first, *others]


def torch_groups(size: int, stack: ExitStack) -> list[Any]:
    """torch's groups, without a communication backend: only their store is needed."""
    dist = package("torch.distributed")
    store = dist.HashStore()
    return [dist.ProcessGroup(store, rank, size) for rank in range(size)]


KINDS: dict[str, Callable[[int, ExitStack], list[Any]]] = {
    "tcp": tcp_groups,
    "torch": torch_groups,
    "foreign": thread_groups,
}


@contextmanager
def groups_of(kind: str, size: int) -> Iterator[list[Any]]:
    """The groups of all ranks, one per thread."""
    with ExitStack() as stack:
        yield KINDS[kind](size, stack)


def on_ranks(call: Callable[..., T], groups: list[Any], *args: Any, **kwargs: Any) -> list[T]:
    """``call(group, ...)`` in a thread per rank; all their values, or the first error."""
    calls = [Aside(call, group, *args, **kwargs) for group in groups]
    return [each.result() for each in calls]


def errors_of(
    call: Callable[..., Any], groups: list[Any], *args: Any, **kwargs: Any
) -> list[BaseException]:
    """The errors of ``call(group, ...)`` in a thread per rank; it must raise on each."""
    errors: list[BaseException] = []
    for each in [Aside(call, group, *args, **kwargs) for group in groups]:
        try:
            value = each.result()
        except BaseException as error:
            errors.append(error.with_traceback(None))
        else:
            pytest.fail(f"it returned {value!r}")
    return errors


@contextmanager
def queues_over(
    groups: list[Any], writer_rank: int = 0, *, timeout: float | None = PATIENCE, **options: Any
) -> Iterator[list[Any]]:
    """A queue over the groups: the ends of all ranks, closed afterwards."""
    queues: list[Any] = on_ranks(
        MessageQueue.create_from_process_group,
        groups,
        *SMALL,
        writer_rank,
        timeout=timeout,
        **options,
    )
    try:
        yield queues
    finally:
        for queue in queues:
            queue.close()


def member(link: Link, port: int, rank: int, size: int, call: Callable[..., Any]) -> Any:
    """Role: a rank in its own process, which runs `call(link, group)`."""
    with TcpGroup("127.0.0.1", port, rank, size, secret=SECRET) as group:
        return call(link, group)
