"""Where the processes of one channel leave their time stamps: memory that they all inherit."""

from __future__ import annotations

import mmap
import time

import numpy as np
import numpy.typing as npt

# Messages of one slice whose stamps have room.
STAMPS = 1024
LOOK_AGAIN = 0.0002


class Board:
    """`sent[i]`, `received[r][i]` in monotonic ns; `progress[r]`: messages of this slice."""

    def __init__(self, readers: int) -> None:
        self._memory = mmap.mmap(-1, 8 * (1 + readers) * (STAMPS + 1))
        words = memoryview(self._memory).cast("q")
        rows = [words[i * STAMPS : (i + 1) * STAMPS] for i in range(1 + readers)]
        self.sent = rows[0]
        self.received = rows[1:]
        self.progress = words[(1 + readers) * STAMPS :]

    def reset(self) -> None:
        """Before the readers begin a slice."""
        for reader in range(len(self.received)):
            self.progress[reader] = 0

    def wait_for(self, messages: int) -> None:
        """Returns when every reader has had so many messages of the slice. Never spins."""
        while min(self.progress[: len(self.received)]) < messages:
            time.sleep(LOOK_AGAIN)

    def ways_ns(self, messages: int) -> npt.NDArray[np.int64]:
        """From before `send` to the object in the reader's hands, by reader and message."""
        sent = np.array(self.sent[:messages], dtype=np.int64)
        received = np.array([row[:messages] for row in self.received], dtype=np.int64)
        return np.subtract(received, sent)
