"""Partitions, kills and stops at random, between two network stacks.

Afterwards the histories of all processes are checked (`tests.support.histories`).

``MEMLANE_SOAK_PARTITIONS`` is the number of rounds (default 1).
"""

import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from memlane import Handle, MessageQueue, ReaderDied, TimedOut
from memlane.broadcast.network import shared_reader
from tests.support import PATIENCE, Link, Peer, start
from tests.support.histories import SLACK, WRITER, History, Log, Record
from tests.support.hosts import neighbour
from tests.support.remote_queues import remote_writer

ROUNDS = int(os.environ.get("MEMLANE_SOAK_PARTITIONS", "1"))
LIVENESS = 1.0
LOCAL, ALONE, RELAY, BEHIND = range(4)
READERS = (LOCAL, ALONE, RELAY, BEHIND)
pytestmark = pytest.mark.soak(seconds=60 + 20 * ROUNDS)


def message(number: int) -> tuple[int, bytes]:
    return number, number.to_bytes(8, "little") * (number * 7919 % 3000)


def writing(link: Link, log: Path, where: str) -> None:
    """Role: sends a message every few milliseconds until told to close."""
    written = Log(log)
    options = {"remote_liveness": LIVENESS, "remote_window": 64, "relay": True}
    writer = remote_writer(3, 1, connect_ip=where, **options)
    link.tell([writer.export_handle(rank) for rank in READERS])
    writer.wait_until_ready(PATIENCE)
    link.tell("ready")
    number = 0
    while not link.has_word():
        written.write("sending", number)
        try:
            writer.enqueue(message(number), 0.3)
        except TimedOut:
            written.write("failed", number)
        except ReaderDied as error:
            written.write("died", error.rank)
            written.write("failed", number)
            writer.release_reader(error.rank)
        else:
            written.write("sent", number)
        number += 1
        time.sleep(0.002)
    with suppress(TimedOut):  # a reader that has died may not be known to have
        writer.close()
    written.write("closed")


def reading(link: Link, log: Path, handle: Handle, rank: int) -> None:
    """Role: reads until an error that is no timeout."""
    written = Log(log)
    if rank == ALONE:  # as on a host of its own
        shared_reader.where_memory_is_shared = lambda: "elsewhere"
    reader = MessageQueue.create_from_handle(handle, rank)
    link.tell("attached")
    reader.wait_until_ready(PATIENCE)
    link.tell("ready")
    while True:
        try:
            got = reader.dequeue(0.5)
        except TimedOut:
            continue
        except Exception as error:
            written.write("ended", type(error).__name__)
            break
        assert got == message(got[0]), got[0]
        written.write("got", got[0])
    link.hear(10 * PATIENCE)  # it may relay to another one still
    reader.close()


class Round:
    """One queue, and what is done to it."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.dice = random.Random(number)
        self.log = Log(folder / "trouble")
        self.peers: dict[int, Peer] = {}
        self.stopped: set[int] = set()
        self.may_be_deaths = False

    def play(self) -> History:
        with neighbour() as there:
            writer = start(writing, self.folder / "-1", there.here)
            self.peers[WRITER] = writer
            handles = writer.hear()
            for rank in READERS:
                command = there.command if rank != LOCAL else None
                where = {"method": "spawn", "command": command} if command else {}
                role = (reading, self.folder / str(rank), handles[rank], rank)
                self.peers[rank] = start(*role, **where)
                assert self.peers[rank].hear() == "attached"  # of a host the first relays
            for peer in self.peers.values():
                assert peer.hear() == "ready"
            for _ in range(self.dice.randint(1, 4)):
                time.sleep(self.dice.uniform(0, 0.3))
                self.dice.choice([self.stop, self.stop, self.kill, *[self.pull] * 3])(there)
            for who in list(self.stopped):
                self.resume(who)
            # Who closes while its readers cannot be reached waits for the bound, and no longer.
            time.sleep(LIVENESS + (SLACK if self.may_be_deaths else 0))
            self.end()
            self.log.close()
        return self.history()

    def stop(self, _there: object) -> None:
        who = self.dice.choice(list(self.peers))
        if who not in self.stopped:
            self.log.write("stopped", who)
            self.peers[who].stop()
            self.stopped.add(who)
            if self.dice.random() < 0.7:
                time.sleep(self.dice.choice([0.01, 0.3, 1.5 * LIVENESS]))
                self.resume(who)

    def resume(self, who: int) -> None:
        self.stopped.discard(who)
        self.peers[who].resume()
        self.log.write("resumed", who)

    def kill(self, _there: object) -> None:
        who = self.dice.choice(list(self.peers))
        self.stopped.discard(who)
        self.may_be_deaths = True
        self.log.write("killed", who)
        self.peers.pop(who).kill()

    def pull(self, there: "object") -> None:
        self.log.write("pulled")
        there.pull()  # type: ignore[attr-defined]
        share = self.dice.choice([0.05, 0.2, 0.4, 0.4, 2.0, 4.0])
        self.may_be_deaths |= share > 0.5
        time.sleep(share * LIVENESS)
        there.plug()  # type: ignore[attr-defined]
        self.log.write("plugged")

    def end(self) -> None:
        """The writer closes, if it lives; everybody ends."""
        for who in (WRITER, LOCAL, ALONE, BEHIND, RELAY):
            if who in self.peers:
                self.peers[who].tell("close")
                self.peers[who].result()

    def history(self) -> History:
        return History(
            LIVENESS,
            Log.read(self.folder / "-1"),
            {rank: Log.read(self.folder / str(rank)) for rank in READERS},
            Log.read(self.folder / "trouble"),
            {LOCAL},
        )


@pytest.mark.hosts
@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_round(number: int, tmp_path: Path) -> None:
    """Nothing lost, doubled or reordered; every death is told in time, and no other."""
    history = Round(tmp_path, number).play()
    told = [(round(r.moment, 2), r.word, r.what) for r in history.trouble]
    assert not history.violations(), told


# The checker itself ------------------------------------------------------------------------------


def history_of(*trouble: Record) -> History:
    """Ten messages, one of them not sent; two readers elsewhere that got them all."""
    writer = []
    for number in range(10):
        writer.append(Record(number, "sending", number))
        writer.append(Record(number, "failed" if number == 4 else "sent", number))
    sent = [number for number in range(10) if number != 4]
    got = [Record(number + 0.1, "got", number) for number in sent]
    readers = {rank: [*got, Record(10, "ended", "WriterClosed")] for rank in range(2)}
    return History(1.0, [*writer, Record(10, "closed")], readers, list(trouble))


def ended_by(history: History, moment: float, count: int = 5) -> None:
    """Reader 1 ends after so many messages, with WriterDied."""
    history.readers[1] = [*history.readers[1][:count], Record(moment, "ended", "WriterDied")]


def swapped(records: list[Record]) -> list[Record]:
    return [*records[:2], records[3], records[2], *records[4:]]


SPOILS: dict[str, tuple[str, Callable[[History], object]]] = {
    "gap": ("got 3 where", lambda h: h.readers[1].pop(2)),
    "double": ("got 2 where", lambda h: h.readers[1].insert(2, h.readers[1][2])),
    "reorder": ("got 3 where", lambda h: h.readers.update({1: swapped(h.readers[1])})),
    "not sent": ("was not sent", lambda h: h.readers[1].insert(4, Record(4.1, "got", 4))),
    "never sent": ("got 77 where", lambda h: h.readers[1].insert(9, Record(9.5, "got", 77))),
    "no end": ("never ended", lambda h: h.readers[1].pop()),
    "end too early": ("not got everything", lambda h: h.readers[1].pop(8)),
    "strange end": (
        "ended with KeyError",
        lambda h: h.readers[1].append(replace(h.readers[1].pop(), what="KeyError")),
    ),
    "writer accused": ("which lived", lambda h: ended_by(h, 6.0)),
    "reader accused": ("which lived", lambda h: h.writer.insert(10, Record(5, "died", 1))),
    "late reader": (
        "late",
        lambda h: (h.trouble.append(Record(2.0, "killed", WRITER)), ended_by(h, 9.0)),
    ),
    "late writer": (
        "not told in time",
        lambda h: (h.trouble.append(Record(2.0, "killed", 1)), h.readers.update({1: []})),
    ),
    "short pull": (
        "which lived",
        lambda h: (
            h.trouble.extend([Record(5.0, "pulled"), Record(5.3, "plugged")]),
            ended_by(h, 6.0),
        ),
    ),
}


@pytest.mark.parametrize("name", SPOILS)
def test_wrong_histories_are_recognised(name: str) -> None:
    """The checker says what is wrong, and of the right history nothing."""
    words, spoil = SPOILS[name]
    history = history_of()
    assert not history.violations()
    spoil(history)
    assert any(words in violation for violation in history.violations()), history.violations()


def test_right_histories_are_accepted() -> None:
    """These histories look strange, and are allowed."""
    gone = history_of(Record(5.0, "pulled"), Record(7.0, "plugged"))
    ended_by(gone, 6.5)
    dead = history_of(Record(5.0, "killed", WRITER))
    for rank in (0, 1):
        dead.readers[rank] = [*dead.readers[rank][:3], Record(6.5, "ended", "WriterDied")]
    killed = history_of(Record(5.0, "killed", 1))
    killed.readers[1] = killed.readers[1][:3]
    killed.writer.insert(15, Record(6.9, "died", 1))
    for history in (gone, dead, killed):
        assert not history.violations()
