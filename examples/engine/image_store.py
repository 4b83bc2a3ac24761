"""Images on their way to the workers, through memlane's object store: both ends of it.

    scheduler                                     workers
      a request with an image is to join:
        stored already: refer to it once more
        else: put it, one copy for all workers
      broadcast (sequence, address, id)  ────────▶  view it where it lies: no copy, no pickle
                                                    leave the view: that counts as read
      the step is answered: all have read  ◀──────  compute the step

Nothing is ever freed by hand, and no call waits. The oldest images make room for a new one once
all workers have read them as often as they were referred to. If they have not, the request stays
where it was for one step: a step that was answered owes no reads.
"""

import time
from collections.abc import Callable

from memlane import (
    ShmObjectStorageHandle,
    SingleWriterShmObjectStorage,
    SingleWriterShmRingBuffer,
    StoreFull,
    StoreStatistics,
)

from .batching import ImageReference
from .images import MAX_BYTES, Image, Pixels

MAX_OBJECT_BYTES = MAX_BYTES + 1024
"""Beside the pixels the store keeps their shape and type, in less than a hundred bytes."""


class ImageWriter:
    """The scheduler's end: puts images, and collects what the next step has to say of them."""

    def __init__(self, ring_bytes: int, workers: int) -> None:
        """Make a store of that size, to be read by so many workers."""
        ring = SingleWriterShmRingBuffer(ring_bytes, create=True)
        self._storage = SingleWriterShmObjectStorage(MAX_OBJECT_BYTES, workers, ring)
        self._references: list[ImageReference] = []
        self.put_bytes = 0
        """Pixels that were copied into the store."""
        self.referred_bytes = 0
        """Pixels of all references: what each worker would have been sent without a store."""
        self.postponed = 0
        """How many requests had to wait for a step, because the store was full."""

    def handle(self) -> ShmObjectStorageHandle:
        """Return what a worker needs for an `ImageReader`."""
        return self._storage.handle()

    def refer(self, sequence: int, image: Image) -> bool:
        """Have the next step show an image to all workers; False if it has to be a later step.

        Raises `StoreFull` if a step would not help, because nobody has anything to read in it.
        """
        try:
            if self._storage.is_cached(image.key):
                address, number = self._storage.get_cached(image.key)
            else:
                address, number = self._storage.put(image.key, image.pixels)
                self.put_bytes += image.pixels.nbytes
        except StoreFull:
            if not self._references:
                raise
            self.postponed += 1
            return False
        self.referred_bytes += image.pixels.nbytes
        self._references.append((sequence, address, number))
        return True

    def take_references(self) -> list[ImageReference]:
        """Return what was referred to since the last call; it must be sent, for reads are owed."""
        references, self._references = self._references, []
        return references

    def statistics(self) -> StoreStatistics:
        """Return what the store says of itself: puts, hits, evictions, and what it holds."""
        return self._storage.statistics()

    def close(self) -> None:
        """Give up the store; views that workers still have stay readable."""
        self._storage.close()


class ImageReader:
    """A worker's end: looks at images where they lie, with a stopwatch."""

    def __init__(self, handle: ShmObjectStorageHandle) -> None:
        """Attach to the scheduler's store, in the next free place."""
        self._storage = SingleWriterShmObjectStorage.create_from_handle(handle)
        self.view_ns: list[int] = []
        """Per read, how long it took until the pixels could be looked at."""

    def show(self, references: list[ImageReference], see: Callable[[int, Pixels], None]) -> None:
        """Let `see` look at each image, in place: it must not keep the array, nor a part of it."""
        for sequence, address, number in references:
            started_ns = time.monotonic_ns()
            with self._storage.view(address, number) as pixels:
                self.view_ns.append(time.monotonic_ns() - started_ns)
                see(sequence, pixels)

    def close(self) -> None:
        """Leave: nobody waits any more for what this worker has not read."""
        self._storage.close()
