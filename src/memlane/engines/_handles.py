"""The handle of a queue between an engine's processes; never taken for one of the engine's own."""

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
    why = why_not(fields["variable"], "queue")
    if why is not None:
        raise InvalidArgument(
            f"this queue's writer uses memlane, but this process the engine's own queue ({why}): "
            f"set {fields['variable']}=queue in every process and on every node, with one version "
            f"of the engine"
        )
    return EngineHandle(**fields)
