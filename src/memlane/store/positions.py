"""Where the chunks of a ring lie: its arithmetic, without the memory.

A chunk lies at `address % size` and is contiguous. Positions grow until the start has gone once
around; then start and end move back by one ring, and addresses that were handed out keep their
meaning. Ids are handed out in order, so the chunks that live are a run of ids, oldest first.

A signal handler may raise behind any call, also of a built-in. So each method first computes, and
then changes everything by assignments alone: it is done, or nothing is.
"""

from __future__ import annotations

from typing import NamedTuple

from memlane.errors import ShmExhausted

ID_MAX = 2**31


class Place(NamedTuple):
    """A new chunk."""

    address: int
    id: int


class NoRoom(NamedTuple):
    """Why there is no place for a chunk.

    Attributes:
        is_obstructed: where it would lie somebody still reads what was cleared.
        shortage: /dev/shm has no space for the ring to grow into.
    """

    is_obstructed: bool = False
    shortage: ShmExhausted | None = None


class Positions:
    """The chunks of a ring of `size` bytes, known to its writer alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.start = 0
        self.end = 0
        self.id_start = 0
        self.id_end = 0
        self.metadata: dict[int, int] = {}  # id -> address
        self._sizes: dict[int, int] = {}  # id -> bytes
        self._before = (0, 0, 0)  # start, end and oldest id before the newest chunk came

    def allocate(self, nbytes: int, at_least: int | None = None) -> Place | None:
        """A chunk of `nbytes` bytes, or None while there is no room for it.

        `at_least`: what lies between the newest chunk and this address is left out; on an empty
        ring, what lies before this offset.
        """
        start, address = self.start, self.end
        if at_least is not None:
            address = at_least
            if not self.metadata:
                start = 0
        if address % self.size + nbytes > self.size:
            address = (address // self.size + 1) * self.size
        if address + nbytes - start > self.size:
            if self.metadata or nbytes > self.size or at_least is not None:
                return None
            # Nothing is in the way, wherever the positions are.
            start = address = 0
        number = self.id_end
        self._before = (self.start, self.end, self.id_start)
        self.start = start
        if not self.metadata:
            self.id_start = number
        self.metadata[number] = address
        self._sizes[number] = nbytes
        self.end = address + nbytes
        self.id_end = (number + 1) % ID_MAX
        return Place(address, number)

    def undo(self) -> None:
        """Takes back the chunk that was allocated last; its id will be handed out again."""
        number = (self.id_end - 1) % ID_MAX
        del self.metadata[number]
        del self._sizes[number]
        self.start, self.end, self.id_start = self._before
        self.id_end = number

    def oldest_size(self) -> int:
        """The bytes of the oldest chunk."""
        return self._sizes[self.id_start]

    def free_oldest(self) -> None:
        """Forgets the oldest chunk."""
        number, end = self.id_start, self.end
        following = (number + 1) % ID_MAX
        if following in self.metadata:
            start = self.start + (self.metadata[following] - self.start) % self.size
        else:
            start = end
        if start >= self.size:
            start -= self.size
            end -= self.size
        del self.metadata[number]
        del self._sizes[number]
        self.id_start = following
        self.start = start
        self.end = end

    def clear(self) -> None:
        """Forgets all chunks; only the ids go on."""
        self.metadata = {}
        self._sizes = {}
        self.start = self.end = 0
        self.id_start = self.id_end
