"""The handle of a queue as it travels between vLLM's processes; never taken for one of vLLM's."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memlane.broadcast import Handle as QueueHandle
from memlane.engines.vllm import VARIABLE
from memlane.errors import InvalidArgument


@dataclass
class Handle(QueueHandle):
    """`reads`: ids of the queues that the writer's process reads."""

    reads: list[str] = field(default_factory=list)

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], Handle], tuple[dict[str, Any]]]:
        return _arrived, (vars(self),)


def _arrived(fields: dict[str, Any]) -> Handle:
    """Also before the plugin was called: spawned processes get their arguments first."""
    words = os.environ.get(VARIABLE, "").split(",")
    why = None
    if not {"queue", "all"} & {word.strip() for word in words}:
        why = f"{VARIABLE} is {os.environ.get(VARIABLE)!r} here"
    else:
        from memlane.engines.vllm._switch import is_declined

        if is_declined():
            why = "memlane is not tested with the version of vLLM here"
    if why is not None:
        raise InvalidArgument(
            f"this queue's writer uses memlane, but this process vLLM's own queue ({why}): set "
            f"{VARIABLE}=queue in every process and on every node, with one version of vLLM"
        )
    return Handle(**fields)
