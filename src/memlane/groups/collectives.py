"""One collective call: the ranks of a group exchange plain data, all of it within one deadline.

What travels in a step is made by a callable. If that raises, its rank raises the error itself and
all others raise `GroupFailed`, which names the rank: an error takes the way of the value, so nobody
waits for a rank that has failed.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from memlane._stalls import Stall
from memlane.errors import GroupFailed, InvalidArgument, InvalidType, RankMissing

if TYPE_CHECKING:
    from typing import Self

# A wait looks around so often: for signals, for the others' failures, for the log.
SLICE = 1.0

Outcome = dict[str, Any]
"""Of a step on one rank: {"value": ...} or {"error": text}."""


def checked_timeout(timeout: object) -> float | None:
    """Seconds, or None for ever; as much as a year is as good as that."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise InvalidType(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if not timeout >= 0:
        raise InvalidArgument(f"timeout must be a number of seconds from 0 on, not {timeout}")
    return float(min(timeout, 3.2e7))


class Deadline:
    """The end of a call on the monotonic clock; None never comes."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    def left(self, most: float = float("inf")) -> float:
        """Seconds until it comes, 0 behind it, never more than `most`."""
        return most if self._end is None else min(most, max(0.0, self._end - time.monotonic()))

    def timeout_left(self) -> float | None:
        """The same as a timeout for another call."""
        return None if self._end is None else self.left()


def stall_of(rank: int, missing: Callable[[], Sequence[int]]) -> Stall:
    """Of a wait of that rank for those that `missing` names."""
    return Stall(
        lambda waited: (
            f"{text_of_ranks(missing())} kept rank {rank} of the group (pid {os.getpid()}) waiting "
            f"for {waited:.1f} s: not everybody has come to the collective call"
        )
    )


def text_of_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 3, 5 and 7`; of many the first eight."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]]
    last = f"{len(ranks) - 8} more" if len(ranks) > 8 else shown.pop()
    return f"ranks {', '.join(shown)} and {last}"


def missing_error(size: int, missing: Sequence[int], timeout: float | None) -> RankMissing:
    """This rank has waited long enough for those."""
    return RankMissing(
        f"gave up after {timeout} s waiting for {text_of_ranks(missing)} of a group of {size}: "
        f"not started, dead, busy, or not in this collective call",
        timeout,
        tuple(missing),
    )


class Collectives(ABC):
    """A group in the middle of one collective call; all ranks make the same steps in one order.

    Attributes:
        rank: of this process, its position in the group.
        size: of the group.
        deadline: of the whole call.
    """

    def __init__(self, rank: int, size: int, deadline: Deadline) -> None:
        self.rank = rank
        self.size = size
        self.deadline = deadline

    def broadcast(self, src: int, make: Callable[[], Any]) -> Any:
        """What `make` has returned on rank `src`."""
        if self.rank != src:
            return _value_of(src, self._broadcast(src, None))
        outcome, error = _attempt(make)
        self._broadcast(src, outcome)
        return _own_value(outcome, error)

    def gather(self, make: Callable[[], Any]) -> list[Any]:
        """What `make` has returned on each rank, for everybody. Nobody returns before all came."""
        outcome, error = _attempt(make)
        outcomes = self._gather(outcome)
        _own_value(outcome, error)
        return [_value_of(rank, other) for rank, other in enumerate(outcomes)]

    def scatter(self, src: int, make: Callable[[], Sequence[Any]]) -> Any:
        """This rank's item of what `make` has returned on rank `src`."""
        if self.rank != src:
            return _value_of(src, self._scatter(src, None))
        outcome, error = _attempt(make)
        values = [outcome] * self.size if error else [{"value": v} for v in outcome["value"]]
        self._scatter(src, values)
        return _own_value(values[src], error)

    @abstractmethod
    def _broadcast(self, src: int, outcome: Outcome | None) -> Outcome: ...
    @abstractmethod
    def _gather(self, outcome: Outcome) -> list[Outcome]: ...
    @abstractmethod
    def _scatter(self, src: int, outcomes: Sequence[Outcome] | None) -> Outcome: ...

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """The end of the call, also for ranks that still wait in it."""

    def __enter__(self) -> Self:
        return self


def _attempt(make: Callable[[], Any]) -> tuple[Outcome, Exception | None]:
    try:
        return {"value": make()}, None
    except Exception as error:  # it travels to the others, and is raised here behind that
        return {"error": f"{type(error).__name__}: {error}"}, error


def _own_value(outcome: Outcome, error: Exception | None) -> Any:
    if error is not None:
        raise error
    return outcome["value"]


def _value_of(rank: int, outcome: object) -> Any:
    if not isinstance(outcome, dict) or not ("value" in outcome or "error" in outcome):
        raise GroupFailed(
            f"rank {rank} sent what is no step of this call; do all ranks run one version of "
            f"memlane, and make the same calls in one order?",
            rank,
        )
    if "error" in outcome:
        raise GroupFailed(f"rank {rank} of the group failed: {outcome['error']}", rank)
    return outcome["value"]
