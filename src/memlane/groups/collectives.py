"""One collective call: the ranks of a group exchange plain data within one deadline.

A callable makes the value of each step. If it raises, its rank raises that error, and all others
raise `GroupFailed`, which names the rank. The error is sent in place of the value, so nobody waits
for a rank that has failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from memlane._base.diagnosis import Stall, blocked
from memlane.errors import GroupFailed, RankMissing

if TYPE_CHECKING:
    from typing import Self

    from memlane._base.deadline import Deadline

# Seconds between a wait's checks for signals, failures of other ranks, and a due log line.
SLICE = 1.0

Outcome = dict[str, Any]
"""The outcome of a step on one rank: {"value": ...} or {"error": text}."""


def stall_of(rank: int, missing: Callable[[], Sequence[int]]) -> Stall:
    """Reports a wait of `rank` for the ranks that `missing` returns."""
    reason = "not all ranks have joined the collective call"
    who = f"rank {rank} of the group"
    return Stall(lambda waited: blocked(who, waited, reason, text_of_ranks(missing())))


def text_of_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 3, 5 and 7`; names the first eight at most."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]]
    last = f"{len(ranks) - 8} more" if len(ranks) > 8 else shown.pop()
    return f"ranks {', '.join(shown)} and {last}"


def missing_error(
    size: int, missing: Sequence[int], timeout: float | None, hint: str = ""
) -> RankMissing:
    """The error for a wait for the `missing` ranks that timed out; `hint` is appended."""
    return RankMissing(
        f"timed out after {timeout} s waiting for {text_of_ranks(missing)} of a group of {size}: "
        f"not started, dead, busy, or not in this collective call{hint}",
        timeout,
        tuple(missing),
    )


def dead_error(size: int, pids: dict[int, int], timeout: float | None) -> RankMissing:
    """The error for a wait for ranks that have died; `pids` has their processes, by rank."""
    dead = sorted(pids)
    shown = ", ".join(f"pid {pids[rank]}" for rank in dead[:8])
    has, its = ("has", "its connection") if len(dead) == 1 else ("have", "their connections")
    return RankMissing(
        f"{text_of_ranks(dead)} of a group of {size} {has} died ({shown}): {its} to the group's "
        f"board ended",
        timeout,
        tuple(dead),
    )


class Collectives(ABC):
    """One collective call of a group; all ranks take the same steps in the same order.

    Attributes:
        rank: of this process, its position in the group.
        size: of the group.
        deadline: of the whole call.
        host: where the ranks meet, as this one reaches it; None if that is not known.
    """

    def __init__(self, rank: int, size: int, deadline: Deadline, host: str | None = None) -> None:
        self.rank = rank
        self.size = size
        self.deadline = deadline
        self.host = host

    def broadcast(self, src: int, make: Callable[[], Any]) -> Any:
        """Returns the value of `make` on rank `src`."""
        if self.rank != src:
            return _value_of(src, self._broadcast(src, None))
        outcome, error = _attempt(make)
        self._broadcast(src, outcome)
        return _own_value(outcome, error)

    def gather(self, make: Callable[[], Any]) -> list[Any]:
        """Returns the values of `make` on all ranks; nobody returns before all have called."""
        outcome, error = _attempt(make)
        outcomes = self._gather(outcome)
        _own_value(outcome, error)
        return [_value_of(rank, other) for rank, other in enumerate(outcomes)]

    def scatter(self, src: int, make: Callable[[], Sequence[Any]]) -> Any:
        """Returns this rank's item of the sequence that `make` returned on rank `src`."""
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
        """Ends the call, also for ranks that still wait in it."""

    def __enter__(self) -> Self:
        return self


def _attempt(make: Callable[[], Any]) -> tuple[Outcome, Exception | None]:
    try:
        return {"value": make()}, None
    except Exception as error:  # sent to the others, then raised here
        return {"error": f"{type(error).__name__}: {error}"}, error


def _own_value(outcome: Outcome, error: Exception | None) -> Any:
    if error is not None:
        raise error
    return outcome["value"]


def _value_of(rank: int, outcome: object) -> Any:
    if not isinstance(outcome, dict) or not ("value" in outcome or "error" in outcome):
        raise GroupFailed(
            f"rank {rank} sent something that is not a step of this call; run the same version of "
            f"memlane on all ranks, and make the same calls in the same order",
            rank,
        )
    if "error" in outcome:
        raise GroupFailed(f"rank {rank} of the group failed: {outcome['error']}", rank)
    return outcome["value"]
