"""Other hosts for tests: with a /dev/shm of their own, in which readers run, or behind a cable."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import lab
from memlane import Handle, MessageQueue
from memlane.broadcast.network import shared_reader
from tests.support import PATIENCE, Link, PeerGone, Remote, dismiss, private_shm, start
from tests.support.queues import segments, start_reader


def _serve_host(link: Link, claim: str | None) -> None:
    """Forks readers on request, and forwards calls to them and their answers."""
    if claim is not None:
        shared_reader.where_memory_is_shared = lambda: claim
    readers: dict[int, Remote] = {}
    link.tell()
    while (request := link.hear(timeout=10 * PATIENCE)) is not None:
        call, rank, *arguments = request
        try:
            if call == "segments":
                answer: Any = segments()
            elif call == "attach":
                readers[rank] = start_reader(arguments[0], rank)
                answer = readers[rank].pid
            else:
                answer = readers[rank].call(call, *arguments)
        except BaseException as error:
            answer = error.with_traceback(None)
        link.tell(answer)
    for reader in readers.values():
        with suppress(PeerGone, BrokenPipeError):  # a test has killed it
            reader.call("close")
    dismiss()


class Host:
    """One other host; `pids` are those of its readers."""

    def __init__(self, size: str, claim: str | None) -> None:
        self.peer = start(_serve_host, claim, method="spawn", command=private_shm(size))
        self.peer.hear()
        self.pids: dict[int, int] = {}

    def ask(self, call: str, rank: int = -1, *arguments: Any) -> Any:
        """Makes the call in reader `rank`, or in the host itself."""
        self.peer.tell((call, rank, *arguments))
        answer = self.peer.hear(2 * PATIENCE)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def attach(self, handle: Handle, rank: int) -> None:
        """Starts a reader in its own process."""
        self.pids[rank] = self.ask("attach", rank, handle)

    def read(self, rank: int, timeout: float = PATIENCE) -> Any:
        """The next message of that reader."""
        return self.ask("dequeue", rank, timeout)

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the process of that reader."""
        os.kill(self.pids[rank], number)

    @property
    def segments(self) -> set[str]:
        """The names in its /dev/shm."""
        names: set[str] = self.ask("segments")
        return names


@contextmanager
def hosts(count: int = 1, size: str = "64m", claim: str | None = None) -> Iterator[list[Host]]:
    """Hosts without readers; with `claim`, all of them claim to be that host."""
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(Host(size, claim))
            stack.callback(made[-1].peer.tell, None)
        yield made


def attach_all(writer: MessageQueue, there: dict[Host, list[int]]) -> None:
    """Attaches those ranks on those hosts, one after the other."""
    for host, ranks in there.items():
        for rank in ranks:
            host.attach(writer.export_handle(rank), rank)


@dataclass(frozen=True)
class Neighbour:
    """Another host, connected to this one by a cable.

    Attributes:
        here: the address of this side.
        there: the address of the other side.
        command: an interpreter that runs there.
        cable: the cable, which counts its frames.
    """

    here: str
    there: str
    command: tuple[str, ...]
    cable: lab.Cable

    def pull(self) -> None:
        """Nothing goes through the cable any more; neither side is notified."""
        self.cable.pull()

    def plug(self) -> None:
        """Everything goes through again."""
        self.cable.plug()

    def lose(self, percent: float, delay_ms: float = 0.0, jitter_ms: float = 0.0) -> None:
        """Loses that share of the frames of both sides, and delays the others, with jitter."""
        self.cable.set(loss_percent=percent, delay_ms=delay_ms, jitter_ms=jitter_ms)


@contextmanager
def neighbour(seed: int = 0) -> Iterator[Neighbour]:
    """A neighbour and its cable, which exist until the end of the block."""
    with lab.Host() as host, lab.Cable(None, host, seed=seed) as cable:
        yield Neighbour(*cable.addresses, (*host.command, sys.executable), cable)
