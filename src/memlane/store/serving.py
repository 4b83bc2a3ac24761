"""Connects a storage that is served by its name with its door."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memlane._base.diagnosis import participant
from memlane._base.processes import is_ending
from memlane._doors.admission import Place

if TYPE_CHECKING:
    from collections.abc import Set

    from memlane._base.slots import Seen
    from memlane._native import StoreWriter
    from memlane.store.handle import ShmObjectStorageHandle


def _state(who: Seen) -> str:
    """Returns the state of a participant; closed, too, if it has died: readers of a storage take
    such a place without its writer."""
    has_died = who.state == "dead" or (who.is_of_here and is_ending(who.slot.pid))
    return "closed" if has_died and who.state != "absent" else who.state


class StoreHost:
    """The writer's end, as the thread of its door uses it. All readers get the same handle."""

    kind = "SingleWriterShmObjectStorage"
    role = "reader"

    def __init__(self, end: StoreWriter, handle: ShmObjectStorageHandle) -> None:
        self._end = end
        self._text = handle.to_json()
        self.ranks = [*range(handle.n_readers)]

    def places(self, ranks: Set[int | None]) -> list[Place]:
        """Returns who has each of the places. Raises Closed."""
        places = []
        for rank in self.ranks:
            if rank in ranks or None in ranks:
                who = participant(self._end, 1 + rank)
                places.append(Place(rank, _state(who), who.slot.pid))
        return places

    def open_place(self, _rank: int) -> bool:
        """Does nothing: it is open."""
        return True

    def handle_text(self, _rank: int) -> str:
        """Returns the handle. Never raises."""
        return self._text
