"""Handles between an engine's processes: of a queue, and where any system's may arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memlane.broadcast import Handle
from memlane.engines._switching import why_not
from memlane.errors import InvalidArgument


@dataclass
class EngineHandle(Handle):
    """`variable` switches the queue on; `reads`: ids of the queues that the writer reads itself."""

    variable: str = ""
    reads: list[str] = field(default_factory=list)

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], EngineHandle], tuple[dict[str, Any]]]:
        return _arrived, (vars(self),)


def _arrived(fields: dict[str, Any]) -> EngineHandle:
    arrives_where(fields["variable"], "queue")
    return EngineHandle(**fields)


def not_switched(what: str, variable: str, system: str) -> str:
    """What is said where something of the engine's own arrives at memlane's."""
    return (
        f"the writer of {what} uses the engine's own {system}, but this process memlane's: set "
        f"{variable}={system} in every process and on every node"
    )


def arrives_where(variable: str, system: str) -> None:
    """Raises unless a handle of memlane's arrives where that system is memlane's, too."""
    why = why_not(variable, system)
    if why is not None:
        raise InvalidArgument(
            f"this {system}'s writer uses memlane, but this process the engine's own {system} "
            f"({why}): set {variable}={system} in every process and on every node, with one "
            f"version of the engine"
        )
