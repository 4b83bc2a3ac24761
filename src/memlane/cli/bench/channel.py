"""The interface that every peer is measured through: one writer, some readers, whole objects.

    in the writer's process, before the readers are forked    prepare()
    writer                                                    open_writer() -> token
    each reader                                               open_reader(rank, token)
    writer, when all readers are open                         ready()
    writer, any number of times                               send(obj)
    reader, any number of times                               obj = recv(); del obj; release()
    both                                                      close()

`send` and `recv` may block without a timeout: the session kills processes that do not return.
A reader does not touch the object after `release`; from then on the peer may reuse its memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memlane.cli.bench.payloads import MIB, Payload

# How many messages a ring's writer may be ahead of the slowest reader, the same for all rings:
# memlane's default, and as many large messages as a user would provide memory for.
CHUNKS = 10
LARGE_CHUNKS = 4
LARGE = 10 * MIB
# Room in a chunk for what a peer adds to the payload.
SLACK = 64 * 1024


@dataclass(frozen=True)
class Setting:
    """What a channel carries. `name` is unique and begins with `prefix`; files go to `folder`."""

    payload: Payload
    readers: int
    folder: Path
    prefix: str
    name: str

    @property
    def chunks(self) -> int:
        """How many messages a ring holds."""
        return CHUNKS if self.payload.bytes <= LARGE else LARGE_CHUNKS


class Channel(ABC):
    """One peer's channel from a writer to its readers."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @property
    def warm_up(self) -> int:
        """How many messages it takes to use all of the memory once."""
        return self.setting.chunks + 2

    def prepare(self) -> None:
        """Creates what the processes inherit."""
        return

    @abstractmethod
    def open_writer(self) -> object:
        """Opens the writer's end; returns what readers need to attach, picklable."""

    @abstractmethod
    def open_reader(self, rank: int, token: object) -> None:
        """Opens a reader's end."""

    def ready(self) -> None:
        """Waits until every later message will reach every reader."""
        return

    @abstractmethod
    def send(self, obj: object) -> None:
        """Sends to all readers."""

    @abstractmethod
    def recv(self) -> object:
        """Returns the next object."""

    def release(self) -> None:
        """Ends the use of the object that `recv` returned."""
        return

    def close(self) -> None:
        """Closes this end."""
        return


@dataclass(frozen=True)
class Peer:
    """A kind of channel. `missing` returns why it cannot carry a payload here, or None."""

    name: str
    channel: type[Channel]
    missing: Callable[[Payload], str | None]
    sleeps: bool = True
    is_view: bool = False
    is_memlane: bool = False
