"""Connects a queue that is served by its name with its door."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from memlane._base.diagnosis import participant
from memlane._base.processes import is_ending
from memlane._doors.admission import Place
from memlane.broadcast.handle import Handle
from memlane.broadcast.local import LocalWriter

if TYPE_CHECKING:
    from collections.abc import Set

    from memlane._base.slots import Seen


def _state(who: Seen) -> str:
    """Returns the state of a participant; dead, too, if it has begun to die and holds its lock."""
    lives = who.state not in ("absent", "closed", "dead")
    return "dead" if lives and who.is_of_here and is_ending(who.slot.pid) else who.state


class QueueHost:
    """The writer's end, as the thread of its door uses it: beside the calls of the writer."""

    kind = "MessageQueue"
    role = "reader"

    def __init__(self, handle: Handle, writer: LocalWriter) -> None:
        self._writer = writer
        # The ring may have no name by the time at which somebody comes.
        self._handle = replace(handle, writer_file=(os.getpid(), writer.segment.descriptor))

    @property
    def ranks(self) -> list[int]:
        return self._writer.native.ranks

    def places(self, ranks: Set[int | None]) -> list[Place]:
        """Returns who has each of the places. Raises Closed."""
        native = self._writer.native
        places = []
        for slot, rank in enumerate(native.ranks, start=1):
            if rank in ranks or None in ranks:
                who = participant(native, slot)
                places.append(Place(rank, _state(who), who.slot.pid))
        return places

    def open_place(self, rank: int) -> bool:
        """Opens it, or asks for it. No message waits for a reader that then never comes."""
        return self._writer.readmit_late(rank)

    def handle_text(self, rank: int) -> str:
        """Returns the handle for the place as it is now. Raises Closed."""
        openings = tuple(self._writer.segment.openings())
        return replace(self._handle, rank=rank, local_openings=openings).to_json()
