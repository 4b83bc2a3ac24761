"""Where the chunks of a ring lie: its arithmetic, without the memory.

A chunk lies at `address % size` and is contiguous. Positions grow until the start has gone once
around; then start and end move back by one ring, and addresses that were handed out keep their
meaning. Ids are handed out in order, so the chunks that live are a run of ids, oldest first.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

ID_MAX = 2**31


class Place(NamedTuple):
    """A new chunk, and what `Positions.undo` needs to take it back."""

    address: int
    id: int
    before: tuple[int, int, int]


class Positions:
    """The chunks of a ring of `size` bytes, known to its writer alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.start = 0
        self.end = 0
        self.id_start = 0
        self.id_end = 0
        self.metadata: dict[int, int] = {}  # id -> address
        self._sizes: deque[int] = deque()  # of the chunks, oldest first

    def allocate(self, nbytes: int) -> Place | None:
        """A chunk of `nbytes` bytes, or None while there is no room for it."""
        before = (self.start, self.end, self.id_start)
        address = self.end
        if address % self.size + nbytes > self.size:
            address = (address // self.size + 1) * self.size
        if address + nbytes - self.start > self.size:
            if self.metadata or nbytes > self.size:
                return None
            # Nothing is in the way, wherever the positions are.
            self.start = address = 0
        if not self.metadata:
            self.id_start = self.id_end
        number = self.id_end
        self.metadata[number] = address
        self._sizes.append(nbytes)
        self.end = address + nbytes
        self.id_end = (number + 1) % ID_MAX
        return Place(address, number, before)

    def undo(self, place: Place) -> None:
        """Takes back the newest chunk; its id will be handed out again."""
        del self.metadata[place.id]
        self._sizes.pop()
        self.start, self.end, self.id_start = place.before
        self.id_end = place.id

    def oldest_size(self) -> int:
        """The bytes of the oldest chunk."""
        return self._sizes[0]

    def free_oldest(self) -> int:
        """Forgets the oldest chunk; its bytes."""
        del self.metadata[self.id_start]
        freed = self._sizes.popleft()
        self.id_start = (self.id_start + 1) % ID_MAX
        if self.metadata:
            self.start += (self.metadata[self.id_start] - self.start) % self.size
        else:
            self.start = self.end
        if self.start >= self.size:
            self.start -= self.size
            self.end -= self.size
        return freed

    def clear(self) -> None:
        """Forgets all chunks; only the ids go on."""
        self.metadata.clear()
        self._sizes.clear()
        self.start = self.end = 0
        self.id_start = self.id_end
