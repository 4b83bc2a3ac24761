"""The interface of a remote tier's connections: to ask, put, get and remove values by a deadline;
and how that may fail. No thread, no tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from memlane._base.deadline import Deadline
from memlane.tiers.tier import DIGEST_BYTES

FAIR = 1.0
"""Seconds without any answer after which a server counts as silent."""


ENDING = "the interpreter ends"
"""A refusal that is no server's."""


class Unanswered(Exception):
    """The server cannot be reached, or does not answer; it is not tried again for a while. The text
    is the reason.

    Attributes:
        was_cut: the connection has ended, as idle ones do; another one may work.
    """

    was_cut = False


class Cut(Unanswered):
    """The connection has ended."""

    was_cut = True


class Late(Unanswered):
    """Nothing came by the deadline."""

    def __init__(self, why: str = "it did not answer in time") -> None:
        super().__init__(why)


class Refused(Exception):
    """The server answers that it will not do this. The text is its reason."""


class Refusal(str):
    """The reason why a server that answers has not stored or returned one block."""


def digest_of(name: bytes) -> bytes:
    """The digest of the key of a block that is stored under `name`."""
    return name[-DIGEST_BYTES:]


class Transport(ABC):
    """One connection, used by one thread.

    Every call ends by its deadline. Every call raises Unanswered, after which the connection is
    closed; `ask`, `remove` and `clear` also raise Refused. Any other exception counts as
    Unanswered. All calls may be repeated, so a call that was cut is repeated on a new connection.
    """

    @abstractmethod
    def ask(self, names: Sequence[bytes], deadline: Deadline) -> Sequence[bool | Refusal]:
        """Returns for each name whether there is a value, or why the server does not say."""

    @abstractmethod
    def put(
        self,
        names: Sequence[bytes],
        values: Sequence[tuple[bytes, memoryview]],
        deadline: Deadline,
    ) -> list[Refusal | None]:
        """Stores each value, of two parts, unless there is one of that name already."""

    @abstractmethod
    def get(
        self, names: Sequence[bytes], into: Sequence[memoryview], deadline: Deadline
    ) -> list[int | Refusal]:
        """Reads each value into its memory, and returns their sizes: -1 where there is none. A
        value of another size than its memory is not in the memory."""

    @abstractmethod
    def remove(self, names: Sequence[bytes], deadline: Deadline) -> None:
        """Removes these values."""

    @abstractmethod
    def clear(self, prefix: bytes, deadline: Deadline) -> None:
        """Removes all values whose names begin with `prefix`."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connection."""
