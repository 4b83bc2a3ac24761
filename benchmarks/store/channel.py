"""The interface that every peer is measured through: one writer, some readers, objects by address.

    in the writer's process, before the readers are forked    prepare()
    writer                                                    open_writer() -> token
    each reader                                               open_reader(rank, token)
    writer                                                    place = put(obj)
                                                              settle(); `obj` may be changed again
    reader, by copy                                           obj = get(place); del obj; release()
    reader, by view                                           with view(place) as obj; release()
    writer, when all have read them                           forget(places)
    both                                                      close()

`put`, `get`, `view`, the end of its block, and `release` are timed; the others are not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.store.payloads import Payload


@dataclass(frozen=True)
class Setting:
    """The payload, size and place of a channel. `name` is unique and begins with `prefix`; files go
    to `folder`."""

    payload: Payload
    readers: int
    folder: Path
    prefix: str
    name: str


Ask = Callable[..., list[Any]]


class Channel(ABC):
    """One peer's store."""

    has_get = True
    has_view = True
    can_read_again = True

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def prepare(self) -> None:
        """Creates what the processes inherit."""
        return

    @abstractmethod
    def open_writer(self) -> object:
        """Opens the writer's end; returns what readers need to attach, picklable."""

    def open_reader(self, rank: int, token: Any) -> None:
        """Opens a reader's end."""
        raise NotImplementedError

    def start_readers(self) -> Ask | None:
        """Starts the peer's own readers; returns a call to all of them. None: fork readers."""
        return None

    @abstractmethod
    def put(self, obj: Any) -> Any:
        """Stores the object; returns its place, by which readers find it."""

    def settle(self) -> None:
        """Waits until the peer no longer reads the memory of the last object."""
        return

    def get(self, place: Any) -> Any:
        """The object, in its own memory."""
        raise NotImplementedError

    def view(self, place: Any) -> AbstractContextManager[Any]:
        """The object, in the memory of the store."""
        raise NotImplementedError

    def release(self) -> None:
        """Ends the use of the last object."""
        return

    def forget(self, places: Sequence[Any]) -> None:
        """Frees the objects; all readers have read them."""
        return

    def close(self) -> None:
        """Closes this end."""
        return


@dataclass(frozen=True)
class Peer:
    """A kind of channel. `missing` returns why it cannot run here, or None."""

    name: str
    channel: type[Channel]
    missing: Callable[[], str | None] = lambda: None
    is_memlane: bool = False
    is_floor: bool = False
    open_seconds: float = 30.0
