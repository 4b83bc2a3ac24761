"""Images sent to the workers through memlane's object store: both ends of it.

    scheduler                                     workers
      a request with an image is to join:
        stored already: add a reference
        otherwise: put it, one copy for all workers
      broadcast (sequence, address, id)  ────────▶  view it in place: no copy, no pickle
                                                    leave the view: that counts as a read
      the step is answered: all have read  ◀──────  compute the step

You free nothing by hand, and no call waits. When full, the store evicts the oldest images that all
workers have read as often as they were referenced. If they have not, the request is postponed by a
step: once a step is answered, all of its images have been read.
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
"""Besides the pixels, the store keeps their shape and type, in less than a hundred bytes."""


class ImageWriter:
    """The scheduler's end: puts images, and collects the references for the next step."""

    def __init__(self, ring_bytes: int, workers: int) -> None:
        """Create a store of that size for that many workers."""
        ring = SingleWriterShmRingBuffer(ring_bytes, create=True)
        self._storage = SingleWriterShmObjectStorage(MAX_OBJECT_BYTES, workers, ring)
        self._references: list[ImageReference] = []
        self.put_bytes = 0
        """Bytes of pixels copied into the store."""
        self.referred_bytes = 0
        """Bytes of pixels of all references: what each worker would be sent without a store."""
        self.postponed = 0
        """The number of times that a request had to wait for a step because the store was full."""

    def handle(self) -> ShmObjectStorageHandle:
        """Return what a worker needs for an `ImageReader`."""
        return self._storage.handle()

    def refer(self, sequence: int, image: Image) -> bool:
        """Reference an image in the next step; False if it has to be in a later one.

        Raises `StoreFull` if waiting would not help, because the next step has no images to read.
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
        """Return the references since the last call. Send them: unread images are never evicted."""
        references, self._references = self._references, []
        return references

    def put_back(self, references: list[ImageReference]) -> None:
        """Send them with the next step: they were taken for one that nobody got."""
        self._references[:0] = references

    def statistics(self) -> StoreStatistics:
        """Return the store's statistics: puts, hits, evictions, and what it holds."""
        return self._storage.statistics()

    def close(self) -> None:
        """Close the store; views that workers still hold stay readable."""
        self._storage.close()


class ImageReader:
    """A worker's end: views images in place, and measures how long that takes."""

    def __init__(self, handle: ShmObjectStorageHandle) -> None:
        """Attach to the scheduler's store, in the next free place."""
        self._storage = SingleWriterShmObjectStorage.create_from_handle(handle)
        self.view_ns: list[int] = []
        """Per read, the time until the pixels were accessible."""

    def show(self, references: list[ImageReference], see: Callable[[int, Pixels], None]) -> None:
        """Call `see` with each image in place; it must not keep the array, or any part of it."""
        for sequence, address, number in references:
            started_ns = time.monotonic_ns()
            with self._storage.view(address, number) as pixels:
                self.view_ns.append(time.monotonic_ns() - started_ns)
                see(sequence, pixels)

    def close(self) -> None:
        """Detach: images that this worker has not read can be evicted from now on."""
        self._storage.close()
