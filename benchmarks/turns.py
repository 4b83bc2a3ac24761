"""Ways that take turns, and processes beside the one that measures."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple, TypeVar

from memlane.cli.bench.processes import FORK, die_with_parent

SPAWN = multiprocessing.get_context("spawn")
SECONDS = 60.0  # in which a process answers, and ends
Way = TypeVar("Way")
Found = TypeVar("Found")


def in_turns(
    rounds: int, ways: Iterable[Way], measure: Callable[[Way], Found]
) -> dict[Way, list[Found]]:
    """Returns what `measure` returns for each way, round after round: all of them meet the same
    noise."""
    found: dict[Way, list[Found]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, values in found.items():
            values.append(measure(way))
    return found


class Aside(NamedTuple):
    """A process, and the end of its pipe that is here."""

    pipe: Connection
    pid: int

    def hear(self) -> Any:
        """Returns what the process has sent next."""
        if not self.pipe.poll(SECONDS):
            raise TimeoutError(f"process {self.pid} does not answer")
        return self.pipe.recv()


@contextmanager
def aside(
    role: Callable[..., None], *arguments: object, context: BaseContext = FORK
) -> Iterator[Aside]:
    """Runs `role(pipe, *arguments)` in a process, which has ended when the block is left: it is
    waited for, or killed if the block raises."""
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(role, there, *arguments))  # type: ignore[attr-defined]
    process.start()
    there.close()
    try:
        yield Aside(here, process.pid)
        process.join(SECONDS)
    finally:
        process.kill()
        process.join()
        here.close()


def _run(role: Callable[..., None], pipe: Connection, *arguments: object) -> None:
    die_with_parent()
    role(pipe, *arguments)


@contextmanager
def all_aside(calls: Iterable[tuple[Any, ...]]) -> Iterator[list[Aside]]:
    """So many processes, started one after the other: a tuple for each, as `aside` takes it."""
    with ExitStack() as stack:
        yield [stack.enter_context(aside(*call)) for call in calls]
