"""One end of a two-way pipe between a test and a role."""

from multiprocessing.connection import Connection, Pipe
from typing import Any

from tests.support.waiting import PATIENCE


class Silence(AssertionError):
    """The other end sent nothing in time."""


class Link:
    """Carries picklable words in both directions; it ends when the other process ends."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection

    @classmethod
    def pair(cls) -> "tuple[Link, Link]":
        """Two ends that are connected to each other."""
        mine, theirs = Pipe(duplex=True)
        return cls(mine), cls(theirs)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> "Link":
        """The end with an inherited descriptor."""
        return cls(Connection(descriptor))

    def descriptor(self) -> int:
        """The descriptor of this end."""
        return self._connection.fileno()

    def tell(self, word: object = None) -> None:
        """Send one word; does not wait for the other side to receive it (words are small)."""
        self.report("word", word)

    def hear(self, timeout: float = PATIENCE) -> Any:
        """The next word; ``Silence`` after ``timeout``, ``EOFError`` if the other end is closed."""
        return self.receive(timeout)[1]

    def has_word(self) -> bool:
        """Returns whether `hear` would return at once."""
        return self._connection.poll(0)

    def report(self, kind: str, *parts: object) -> None:
        """Send a word, or how a role ended: its value or its error."""
        self._connection.send((kind, *parts))

    def receive(self, timeout: float = PATIENCE) -> Any:
        """The next word or end, with its kind."""
        if not self._connection.poll(timeout):
            raise Silence(f"nothing was said for {timeout} s")
        return self._connection.recv()

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
