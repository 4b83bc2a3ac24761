"""One round of a torture: processes that send and read, and are stopped, killed and cancelled at
random, and what they may have seen then.

A round is its kind and its seed. Nobody is disturbed before all have attached: who is killed before
that is waited for, as promised. A participant that stands is reported with its state and stacks.
"""

import asyncio
import faulthandler
import os
import random
import signal
import time
import traceback
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from memlane import (
    Cancelled,
    Closed,
    Gather,
    Handle,
    MessageQueue,
    ReaderDied,
    TimedOut,
    WriterDied,
)
from memlane import inspect as looking
from tests.support import Alarm, Link, Peer, alarm_after, start, until
from tests.support.remote_queues import remote_writer
from tests.support.traffic import leaving_nothing

KINDS = ("plain", "async", "gather", "latest", "remote", "readmit")
READERS = 2
STANDS = 60.0
"""Seconds without a word of a participant after which it stands: every promise is far shorter."""
_SIZES = (0, 10, 300, 3000, 30_000)
_READMITS = ("gather", "latest", "readmit")
_open: list[TextIO] = []  # where the stacks go


def frame(number: int, sender: int = 0) -> tuple[int, int, bytes]:
    return sender, number, bytes([number % 251]) * _SIZES[number % len(_SIZES)]


def show_stacks_when_asked(folder: Path) -> None:
    """In a role: SIGUSR1 writes the stacks of all threads to a file that bears the pid."""
    file = (folder / str(os.getpid())).open("w")
    faulthandler.register(signal.SIGUSR1, file)
    _open.append(file)


# Calls that end early -----------------------------------------------------------------------------


async def cancelled_after(call: Coroutine[Any, Any, Any], seconds: float) -> Any:
    """Returns the call's result, also if it was cancelled too late. Raises TimedOut otherwise."""
    task = asyncio.ensure_future(call)
    await asyncio.wait([task], timeout=seconds)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        raise TimedOut("cancelled", seconds) from None


def send(kind: str, end: Any, message: object, dice: random.Random) -> bool:
    """Returns whether the message was sent: it may time out, be cancelled or interrupted."""
    is_sent = False
    try:
        if kind == "async":
            asyncio.run(cancelled_after(end.aenqueue(message), dice.choice([0, 1e-4, 0.01])))
            return True
        with alarm_after(dice.choice([5e-5, 1e-3, 1.0])):
            end.enqueue(message, dice.choice([0, 1e-3, 0.1]))
            is_sent = True
            os.getpid()  # what the handler raised since is raised here at the latest
    except (Alarm, TimedOut):
        pass
    return is_sent


def receive(kind: str, end: Any, dice: random.Random) -> Any:
    if kind == "async":
        seconds = dice.choice([0, 1e-4, 0.01])
        return asyncio.run(cancelled_after(end.adequeue(), seconds))
    timeout = dice.choice([0, 1e-3, 0.1])
    if kind not in ("remote", "gather") and dice.random() < 0.3:
        with end.dequeue_view(timeout) as view:
            return tuple(view)
    return end.dequeue(timeout)


# Roles --------------------------------------------------------------------------------------------


def writing(link: Link, kind: str, seed: int, folder: Path) -> int:
    """Role: sends until it is told to end, or dies; returns how many messages it has sent."""
    show_stacks_when_asked(folder)
    dice, number = random.Random(seed), 0
    if kind == "remote":
        writer = remote_writer(READERS, remote_liveness=2.0)
    else:
        mode = {"mode": "latest"} if kind == "latest" else {}
        writer = MessageQueue(READERS, READERS, None, 4096, 3, **mode)  # type: ignore[arg-type]
    link.tell([writer.export_handle(rank) for rank in range(READERS)])
    writer.wait_until_ready(STANDS)
    link.tell("ready")
    while not link.has_word():
        try:
            number += send(kind, writer, frame(number), dice)
        except ReaderDied as death:
            writer.release_reader(death.rank)
            if kind in _READMITS:
                link.tell((death.rank, writer.readmit(death.rank), number))
    writer.close()
    return number


def reading(
    link: Link, kind: str, handle: Handle, rank: int, first: int, seed: int, folder: Path
) -> tuple[str, int]:
    """Role: reads from message `first` on; returns the error at the end, and the next number."""
    show_stacks_when_asked(folder)
    dice, expected = random.Random(seed), first
    reader = MessageQueue.create_from_handle(handle, rank, timeout=STANDS)
    link.tell("attached")
    kept = []
    while True:
        try:
            message = receive(kind, reader, dice)
        except (TimedOut, Cancelled):
            continue
        except (Closed, WriterDied) as end:
            reader.close()
            return type(end).__name__, expected
        number = message[1]
        assert number >= expected if kind == "latest" else number == expected, (number, expected)
        kept = [*kept[-3:], message]
        for each in kept:
            assert each == frame(each[1]), each[1]
        expected = number + 1


def gathering(link: Link, seed: int, folder: Path) -> tuple[list[int], list[tuple[int, int]]]:
    """Role: gathers until all writers have ended; returns how many came, and who had died."""
    show_stacks_when_asked(folder)
    dice, counts, died = random.Random(seed), [0] * READERS, list[tuple[int, int]]()
    with Gather(READERS, 4096, 3) as reader:
        link.tell([reader.export_handle(rank) for rank in range(READERS)])
        reader.wait_until_ready(STANDS)
        link.tell("ready")
        while True:
            try:
                sender, number, body = receive("gather", reader, dice)
            except TimedOut:
                continue
            except WriterDied as death:
                rank = death.rank
                died.append((rank, death.pid))
                reader.release_writer(rank)
                link.tell((rank, reader.readmit(rank), counts[rank]))
                continue
            except Closed:
                return counts, died
            assert (sender, number, body) == frame(counts[sender], sender)
            counts[sender] += 1


def giving(link: Link, handle: Any, rank: int, first: int, seed: int, folder: Path) -> int:
    """Role: sends to a gather, from message `first` on, until it is told to end; returns the number
    of the next."""
    show_stacks_when_asked(folder)
    dice, number = random.Random(seed), first
    with Gather.create_from_handle(handle, rank) as writer:
        link.tell("attached")
        with suppress(ReaderDied):
            while not link.has_word():
                number += send("gather", writer, frame(number, rank), dice)
    return number


# The round ----------------------------------------------------------------------------------------


class Round:
    """Disturbs the participants of one queue or gather, and judges how each has ended.

    Attributes:
        many: those that there are several of, by rank, as far as they live: readers, or the writers
            of a gather.
    """

    def __init__(self, kind: str, seed: int, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.dice = random.Random(seed)
        self.is_gather = kind == "gather"
        self.stopped: list[Peer] = []
        self.killed: list[tuple[int, int]] = []
        role = (gathering,) if self.is_gather else (writing, kind)
        self.one = start(*role, self._seed(), folder)
        self.many: dict[int, Peer] = {}
        for rank, handle in enumerate(self.one.hear(STANDS)):
            self._attach(rank, handle, 0)
        self.one.hear(STANDS)

    def _seed(self) -> int:
        return self.dice.randrange(1 << 30)

    def _attach(self, rank: int, handle: Any, first: int) -> None:
        if self.is_gather:
            peer = start(giving, handle, rank, first, self._seed(), self.folder)
        else:
            peer = start(reading, self.kind, handle, rank, first, self._seed(), self.folder)
        self.many[rank] = peer
        assert peer.hear(STANDS) == "attached"

    def disturb(self) -> bool:
        """Does something to somebody. Whether there is still somebody to disturb."""
        time.sleep(self.dice.uniform(0, 0.02))  # any moment
        everybody = [self.one, *self.many.values()]
        for peer in everybody:
            if peer.has_spoken():  # nobody has been asked: its error is raised here
                peer.hear(STANDS)
        match self.dice.choice(["stop", "stop", "resume", "resume", "one of many", "the one"]):
            case "stop":
                peer = self.dice.choice(everybody)
                if peer not in self.stopped:
                    os.kill(peer.pid, signal.SIGSTOP)
                    os.waitid(os.P_PID, peer.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                    self.stopped.append(peer)
            case "resume":
                self.resume()
            case "one of many" if self.many:
                rank = self.dice.choice(sorted(self.many))
                self._kill(rank)
            case "the one" if self.dice.random() < 0.3:
                self.resume()
                self.one.kill()
                return False
        return bool(self.many)

    def _kill(self, rank: int) -> None:
        self.resume()
        peer = self.many.pop(rank)
        peer.kill()
        self.killed.append((rank, peer.pid))
        if self.kind in _READMITS:
            opened, handle, first = self.one.hear(STANDS)
            assert opened == rank
            self._attach(rank, handle, first)

    def resume(self) -> None:
        for peer in self.stopped:
            peer.resume()
        self.stopped.clear()

    def judge(self, is_one_alive: bool) -> None:
        """Ends all that live; each must have got all that it was owed, and the right error."""
        self.resume()
        if self.is_gather:
            sent = {}
            for rank, peer in self.many.items():
                if is_one_alive:
                    peer.tell("end")
                sent[rank] = peer.result(STANDS)
            if is_one_alive:
                counts, died = self.one.result(STANDS)
                assert sorted(died) == sorted(self.killed)
                assert {rank: counts[rank] for rank in sent} == sent
            return
        total = None
        if is_one_alive:
            self.one.tell("end")
            total = self.one.result(STANDS)
        for rank, peer in self.many.items():
            error, read = peer.result(STANDS)
            assert error == ("WriterDied" if total is None else "WriterClosed"), (rank, error)
            assert total is None or read == total, (rank, read, total)

    def report(self) -> str:
        """The state, the stacks and the last word of everybody who is left."""
        lines = []
        for peer in [self.one, *self.many.values()]:
            who = "the one" if peer is self.one else "one of many"
            stacks = self.folder / str(peer.pid)
            try:
                state = Path(f"/proc/{peer.pid}/stat").read_text().rpartition(")")[2].split()[0]
                peer.resume()
                os.kill(peer.pid, signal.SIGUSR1)
                with suppress(AssertionError):
                    until(lambda file=stacks: "in _run_child" in file.read_text(), "its stacks", 30)
                text = stacks.read_text()
            except OSError:
                state, text = "ended", ""
            with suppress(OSError):  # it was heard already
                try:
                    text += f"it has said {peer.hear(5)!r}\n" if peer.has_spoken() else ""
                except AssertionError:  # that ended the role
                    text += traceback.format_exc()
            lines.append(f"{who}, pid {peer.pid}: {state}\n{text}")
        seen = [f"{one.name}: {one.participants}" for one in looking.segments()]
        return "\n".join([*lines, *seen])


def play(kind: str, seed: int, folder: Path) -> None:
    """One round. What fails has the seed, and the report of those that stand."""
    for old in folder.iterdir():
        old.unlink()
    with leaving_nothing():
        round_ = Round(kind, seed, folder)
        try:
            is_one_alive = True
            for _ in range(round_.dice.randrange(1, 15)):
                is_one_alive = round_.disturb() or bool(not round_.many)
                if not is_one_alive or not round_.many:
                    break
            round_.judge(is_one_alive)
        except BaseException as error:
            error.add_note(f"{kind}, seed {seed}\n{round_.report()}")
            raise
        finally:
            for peer in [round_.one, *round_.many.values()]:
                with suppress(ProcessLookupError):
                    peer.kill()
