"""The time stamps of one channel's processes, in memory that all of them inherit."""

from __future__ import annotations

import mmap
import time

import numpy as np
import numpy.typing as npt

# How many messages of one slice can be stamped.
STAMPS = 1024
LOOK_AGAIN = 0.0002


class Board:
    """`sent[i]`, `received[r][i]`: monotonic ns; `progress[r]`: messages read in this slice."""

    def __init__(self, readers: int) -> None:
        self._memory = mmap.mmap(-1, 8 * (1 + readers) * (STAMPS + 1))
        words = memoryview(self._memory).cast("q")
        rows = [words[i * STAMPS : (i + 1) * STAMPS] for i in range(1 + readers)]
        self.sent = rows[0]
        self.received = rows[1:]
        self.progress = words[(1 + readers) * STAMPS :]

    def reset(self) -> None:
        """Call it before the readers begin a slice."""
        for reader in range(len(self.received)):
            self.progress[reader] = 0

    def wait_for(self, messages: int) -> None:
        """Waits until every reader has read `messages` messages of the slice. Never spins."""
        while min(self.progress[: len(self.received)]) < messages:
            time.sleep(LOOK_AGAIN)

    def ways_ns(self, messages: int) -> npt.NDArray[np.int64]:
        """From before `send` until the reader has the object, by reader and message."""
        sent = np.array(self.sent[:messages], dtype=np.int64)
        received = np.array([row[:messages] for row in self.received], dtype=np.int64)
        return np.subtract(received, sent)
