"""The interface that every peer is measured through: one writer, some readers, objects by address.

    in the writer's process, before the readers are forked    prepare()
    writer                                                    open_writer() -> token
    each reader                                               open_reader(rank, token)
    writer                                                    place = put(obj)
                                                              settle(): `obj` may be changed again
    reader, by copy                                           obj = get(place); del obj; release()
    reader, by view                                           with view(place) as obj; release()
    writer, when all have read them                           forget(places)
    both                                                      close()

`put`, `get`, `view`, the end of its block and `release` are timed, the others are not.
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
    """What a channel is for. `name` is unique and begins with `prefix`; files go to `folder`."""

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
        """Makes what the processes inherit."""
        return

    @abstractmethod
    def open_writer(self) -> object:
        """Opens the writer's end; returns what readers need, picklable."""

    def open_reader(self, rank: int, token: Any) -> None:
        """Opens a reader's end."""
        raise NotImplementedError

    def start_readers(self) -> Ask | None:
        """Readers of the peer's own making: calls a method in all of them. None: forked ones do."""
        return None

    @abstractmethod
    def put(self, obj: Any) -> Any:
        """Stores it; what readers find it by."""

    def settle(self) -> None:
        """Returns when the memory of the last object is not looked at any more."""
        return

    def get(self, place: Any) -> Any:
        """The object, in memory of its own."""
        raise NotImplementedError

    def view(self, place: Any) -> AbstractContextManager[Any]:
        """The object, where it lies."""
        raise NotImplementedError

    def release(self) -> None:
        """Ends the use of the last object."""
        return

    def forget(self, places: Sequence[Any]) -> None:
        """All readers have read them."""
        return

    def close(self) -> None:
        """Ends this end."""
        return


@dataclass(frozen=True)
class Peer:
    """A channel's kind. `missing` says why it cannot run here, or returns None."""

    name: str
    channel: type[Channel]
    missing: Callable[[], str | None] = lambda: None
    is_memlane: bool = False
    is_floor: bool = False
    open_seconds: float = 30.0
