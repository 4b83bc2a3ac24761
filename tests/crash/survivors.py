"""The survivors of a crash: their calls, and what they must observe, whichever role has died."""

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from memlane import Closed, Handle, MemlaneError, MessageQueue, ReaderDied, WriterDied
from tests.support import PATIENCE, Doomed, Remote, assert_in_time, holdings, surplus
from tests.support.queues import BOUND, SHM, name_in, start_reader

CHUNK = 8192
CHUNKS = 3
_ITEMS = {"small": 8, "array": 600, "large": 4096, "lent": 1 << 17}
"""Elements of 8 bytes: in the pickle; beside it in a chunk; in an extent; kept there."""
End = tuple[int, MemlaneError, float]


def message(number: int, kind: str = "small") -> tuple[int, str, np.ndarray[Any, Any]]:
    """The message with that number; its content follows from number and kind."""
    return number, kind, np.arange(_ITEMS[kind]) * 3 + number


def check(received: Any, number: int) -> None:
    """Fails unless it is that message, and whole."""
    assert received[0] == number, f"message {received[0]} instead of {number}"
    np.testing.assert_array_equal(received[2], message(number, received[1])[2])


def take(queue: MessageQueue, number: int) -> None:
    """Reads one message, which must have that number."""
    check(queue.dequeue(PATIENCE), number)


def read_to_the_end(queue: MessageQueue, first: int) -> End:
    """Returns the number of messages read, the error after them, and its time."""
    for number in itertools.count(first):
        try:
            take(queue, number)
        except MemlaneError as error:
            return number, error.with_traceback(None), time.monotonic()
    raise AssertionError


def identity_of(handle: Handle) -> str:
    """Identity of a segment's file, as in /proc/locks; only while it has its name."""
    facts = (SHM / name_in(handle)).stat()
    return f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"


def locks_on(identity: str) -> list[str]:
    """The locks that any process holds on that file."""
    lines = Path("/proc/locks").read_text().splitlines()
    return [line for line in lines if identity in line.split()]


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """After the block, and one more start that works, everything is as before."""
    before = holdings("memlane-")
    yield
    with MessageQueue(1, 1, None, CHUNK, CHUNKS) as writer:
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            writer.wait_until_ready(PATIENCE)
            writer.enqueue(message(0))
            take(reader, 0)
        del reader
    del writer
    left = surplus(before, holdings("memlane-"))
    assert not left, left


class Survivor:
    """A reader in its own process that survives the writer's death."""

    def __init__(self, handle: Handle, rank: int) -> None:
        self._remote: Remote = start_reader(handle, rank)
        self._taken = 0
        self._is_taking = False
        self._is_reading = False
        self._noticed: float | None = None

    def begin_ready(self) -> None:
        """Wait for everybody, and return when that wait is blocked."""
        self._remote.begin("wait_until_ready", PATIENCE).until_blocked()

    def begin_take(self) -> None:
        """Wait for the next message, and return when that wait is blocked."""
        self._remote.begin(take, self._taken).until_blocked()
        self._is_taking = True

    def settle(self) -> None:
        """Take the outcome of what has begun; it may be that the writer died or closed."""
        try:
            self._remote.outcome()
            self._taken += self._is_taking
        except (WriterDied, Closed):
            self._noticed = self._remote.ended
        self._is_taking = False

    def call_take(self) -> None:
        """Read the next message, which is there."""
        self._remote.call(take, self._taken)
        self._taken += 1

    def begin_reading(self) -> None:
        """Read on to the end, whenever that comes."""
        if not self._is_reading:
            self._remote.begin(read_to_the_end, self._taken)
            self._is_reading = True

    def until_all_is_read(self) -> None:
        """Return when it reads, and sleeps because there is nothing more."""
        self._remote.until_blocked()

    def end_of_reading(self) -> End:
        """Its end, and close."""
        end: End = self._remote.outcome()
        self._remote.call("close")
        self._remote.leave()
        return end

    def end(self, pid: int) -> End:
        """Read on to the end, and close; the error and when it was first seen."""
        self.begin_reading()
        count, error, moment = self.end_of_reading()
        if isinstance(error, WriterDied):
            assert error.pid == pid, error
        return count, error, self._noticed or moment


class Sender:
    """A writer in its own process that survives a reader's death."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self.handle: Handle = remote.greeting
        self.sent = 0
        self.death: ReaderDied | None = None
        self.noticed = float("nan")
        self._is_sending = False

    def begin_ready(self) -> None:
        """Wait for everybody, and return when that wait is blocked."""
        self._remote.begin("wait_until_ready", PATIENCE).until_blocked()

    def begin_send(self) -> None:
        """Send a message for which there is no room, and return when that is blocked."""
        self._remote.begin("enqueue", message(self.sent), PATIENCE).until_blocked()
        self._is_sending = True

    def settle(self) -> None:
        """Take the outcome of what has begun; it may be that a reader died."""
        try:
            self._remote.outcome()
            self.sent += self._is_sending
        except ReaderDied as error:
            if self.death is None:
                self.death, self.noticed = error, self._remote.ended
        self._is_sending = False

    def send(self, kind: str = "small") -> None:
        """Send one message; it may be that a reader died."""
        self._remote.begin("enqueue", message(self.sent, kind), PATIENCE)
        self._is_sending = True
        self.settle()

    def fill(self) -> None:
        """Send as many messages as the ring holds."""
        for _ in range(CHUNKS):
            self.send()

    def until_death(self, doomed: Doomed) -> float:
        """Send on until it is told of the death, and again; then go on without that reader.

        How many seconds after the death it was told.
        """
        while self.death is None:
            self.send()
        assert (self.death.rank, self.death.pid) == (0, doomed.pid), self.death
        assert_in_time(BOUND, doomed.died, self.noticed)
        sent = self.sent
        self.send()
        assert self.sent == sent, "a message went out beside a dead reader"
        self._remote.call("release_reader", 0)
        return self.noticed - doomed.died

    def waits(self) -> int:
        """Returns how many of its calls had to wait."""
        count: int = self._remote.call("statistics").waits
        return count

    def get_ready(self) -> None:
        """Wait for everybody."""
        self._remote.call("wait_until_ready", PATIENCE)

    def readmit(self) -> Handle:
        """Open the place of reader 0 to another."""
        self.death = None
        handle: Handle = self._remote.call("readmit", 0)
        return handle

    def close(self) -> None:
        """Say that this was all."""
        self._remote.call("close")
        self._remote.leave()
