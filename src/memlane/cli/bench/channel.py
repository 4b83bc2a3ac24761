"""The payloads that are measured, and the interface of every peer, one writer and some readers.

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
from importlib.util import find_spec
from pathlib import Path

import numpy as np

KIB, MIB = 1024, 1024 * 1024
# How many messages a ring's writer may be ahead of the slowest reader, the same for all rings:
# memlane's default, and as many large messages as a user would provide memory for.
CHUNKS, LARGE_CHUNKS, LARGE = 10, 4, 10 * MIB
SLACK = 64 * KIB  # room in a chunk for what a peer adds to the payload


@dataclass(frozen=True)
class Payload:
    """A kind of message with `bytes` of content; `is_array`: pickle passes it out of band."""

    name: str
    title: str
    bytes: int
    make: Callable[[], object]
    is_array: bool = False
    is_tensor: bool = False


def _step() -> object:
    """A scheduler's decision for one step; 225 bytes pickled."""
    return {
        "step": 104_217,
        "kind": "decode",
        "requests": [f"req-{number}" for number in range(4100, 4108)],
        "lengths": [812, 77, 1503, 34, 260, 1999, 8, 640],
        "blocks": [3301, 3302, 871, 15, 2209, 908, 41, 77],
        "done": [],
    }


def array(name: str, title: str, count: int) -> Payload:
    return Payload(name, title, count, lambda: np.arange(count // 8, dtype=np.float64), True)


DICT = Payload("dict", "scheduler step, 225 B", 225, _step)
ARRAY = array("array-1m", "1 MiB array", MIB)


@dataclass(frozen=True)
class Setting:
    """The payload, sizes and place of a channel. `name` is unique and begins with `prefix`; files
    go to `folder`."""

    payload: Payload
    readers: int
    folder: Path
    prefix: str
    name: str

    @property
    def chunks(self) -> int:
        """Returns how many messages a ring holds."""
        return CHUNKS if self.payload.bytes <= LARGE else LARGE_CHUNKS


class Channel(ABC):
    """One peer's channel from a writer to its readers."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @property
    def warm_up(self) -> int:
        """Returns how many messages it takes to use all of the memory once."""
        return self.setting.chunks + 2

    def prepare(self) -> None:
        """Creates what the processes inherit."""
        return

    def open_writer(self) -> object:
        """Opens the writer's end; returns what readers need to attach, picklable."""
        return None

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
    """A kind of channel.

    Attributes:
        package: what it needs.
        refuses: why it cannot carry a payload, or None.
    """

    name: str
    channel: type[Channel]
    package: str = ""
    refuses: Callable[[Payload], str | None] = lambda _: None
    sleeps: bool = True
    is_view: bool = False
    is_memlane: bool = False

    def missing(self, payload: Payload) -> str | None:
        """Returns why it cannot carry the payload here, or None."""
        if self.package and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return self.refuses(payload)


def only_arrays(payload: Payload) -> str | None:
    """The reason of a view."""
    return None if payload.is_array or payload.is_tensor else "a view is for arrays"
