"""A signal handler raises anywhere inside a session: between any two calls that it makes.

The interpreter checks for signals when a function begins and when a call has returned; a profile
function is called at the same moments, and raises in place of the handler.
"""

import os
import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from memlane.broadcast.protocol import (
    admission,
    connection_state,
    outbox,
    peer,
    places,
    reader_session,
    readiness,
    replies,
    states,
    writer_session,
)
from memlane.broadcast.protocol.frames import Header, Hello, Kind, What, control, whole_header
from memlane.broadcast.protocol.outbox import Message
from memlane.broadcast.protocol.states import Life
from tests.sessions.steps import LONG, step
from tests.sessions.world import EPOCH, Reader, World

COUNT = int(os.environ.get("MEMLANE_EXAMPLES", "5000")) // 10
MODULES = (
    admission,
    connection_state,
    outbox,
    peer,
    places,
    reader_session,
    readiness,
    replies,
    states,
    writer_session,
)
SESSIONS = {module.__file__ for module in MODULES}
# What an interrupted dequeue had taken is lost, and an interrupted close() is a death.
APART = (5, 6, 7, 17)


class Alarm(Exception):
    """An error that a handler raises."""


class After:
    """Raises at the n-th moment in a session."""

    def __init__(self, moments: int) -> None:
        self.left = moments

    def __call__(self, frame: Any, event: str, _arg: object) -> None:
        if event == "c_call" or frame.f_code.co_filename not in SESSIONS:
            return
        if frame.f_code.co_name == "<genexpr>":  # what it raises there nobody sees
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            raise Alarm


@contextmanager
def _apart() -> Iterator[None]:
    """For what a thread of its own does, which no signal interrupts: relays, connection events."""
    handler = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(handler)


@contextmanager
def _raising(moment: int) -> Iterator[None]:
    sys.setprofile(After(moment))
    try:
        yield
    finally:
        sys.setprofile(None)


class Interrupted(World):
    """Its drivers recover from interruptions, as `NetworkWriter` and `NetworkReader` do."""

    interrupts = 0

    def write(self) -> None:
        try:
            super().write()
        except Alarm:
            self.interrupts += 1
            self.writer.say_again()
            self.write()

    def _relay(self, reader: Reader) -> None:
        with _apart():
            super()._relay(reader)

    def _connect(self, reader: Reader) -> None:
        with _apart():
            super()._connect(reader)

    def fail_relay(self, reader: Reader, *, holds_message: bool = True) -> None:
        with _apart():
            super().fail_relay(reader, holds_message=holds_message)

    def recover(self) -> None:
        """The staged messages are in no ring, because there is none."""
        if self.outbox.staged is not None:
            self.outbox.settle(self.outbox.staged[1])
        self.sent = self.outbox.next

    def read(self, reader: Reader) -> None:
        try:
            super().read(reader)
        except Alarm:
            self.interrupts += 1
            reader.session.doubt(self.now)
            self.read(reader)


@LONG
def test_an_interrupt_at_any_moment_leaves_nothing_half_done() -> None:
    """Nobody is left with half of anything."""
    interrupts = 0
    for seed in range(COUNT):
        dice = random.Random(seed)
        hosts = [dice.randrange(3) for _ in range(dice.randint(1, 4))]
        world = Interrupted(hosts, relay=dice.random() < 0.6, pieces=dice.choice([1, 1, 3]))
        steps: list[tuple[int, Reader, int]] = []
        for _ in range(dice.randint(1, 30)):
            steps.append((dice.randrange(23), dice.choice(world.readers), dice.randrange(32)))
        moment = dice.randrange(len(steps))
        for number, (what, reader, how) in enumerate(steps):
            try:
                if number == moment and what not in APART:
                    sys.setprofile(After(dice.randint(1, 150)))
                step(world, what, reader, how, dice)
            except Alarm:
                world.interrupts += 1
                world.recover()
            finally:
                sys.setprofile(None)
            world.check()
        world.settle()
        interrupts += world.interrupts
    assert interrupts > COUNT // 20


def test_a_death_that_is_interrupted() -> None:
    """At whatever moment of the writer's call: it is noticed all the same."""
    for hosts, relay in (([0], False), ([0, 0], True)):
        for moment in range(1, 150):
            world = Interrupted(hosts, relay=relay)
            for _ in range(15):
                world.advance(0.1)
            assert not world.writer.count_absent()
            for reader in world.readers:
                world.kill(reader)
            with _raising(moment):
                world.write()
            world.settle()


def test_readers_attach_though_their_handshake_was_interrupted() -> None:
    """At whatever moment of a HELLO: all attach, and none is told that it is dead."""
    for moment in range(1, 300):
        world = Interrupted([0, 0])
        for reader in world.readers:
            world.read(reader)
        with _raising(moment):
            world.write()
        world.settle()


def test_a_released_place_that_another_rank_is_given() -> None:
    """At whatever moment of that call: the place is the other rank's, or nobody waits for it."""
    was_interrupted = False
    for moment in range(1, 60):
        world = Interrupted([0])
        world.writer.release(0, world.now)
        try:
            with _raising(moment):
                world.writer.keep_place(7, world.now, lambda _ticket: None)
        except Alarm:
            was_interrupted = True
            if world.peers[0].rank != 7:
                assert not world.writer.count_absent()
        world.writer.keep_place(7, world.now, lambda _ticket: None)
        assert (world.peers[0].rank, world.writer.count_absent()) == (7, 1)
    assert was_interrupted


def test_a_hello_that_is_interrupted_before_its_sender_dies() -> None:
    """At whatever moment: the reader was let in, or another process may take its place."""
    interrupts = 0
    for moment in range(1, 100):
        session = World([0], relay=False).writer
        try:
            with _raising(moment):
                session.heard(b"first", hello_of(1, host="h0"), 1000.0, 0, "somewhere")
        except Alarm:
            interrupts += 1
        session.lost(b"first", 1000.0)
        session.tick(1010.0)
        session.heard(b"second", hello_of(2, host="h1"), 1010.0, 0, "elsewhere")
        assert session.places.peers[0].life in (Life.RUNNING, Life.DEAD)
    assert interrupts > 20


def test_a_reader_s_hello_that_is_interrupted() -> None:
    """At whatever moment: a reader that waits for an answer asks again."""
    interrupts = 0
    for moment in range(1, 60):
        world = World([0], relay=False)
        world.run(10, 0.1)
        session = world.readers[0].session
        session.doubt(world.now)
        try:
            with _raising(moment):
                session.tick(world.now + 1)
        except Alarm:
            interrupts += 1
            session.out.clear()
            session.tick(world.now + 10)
            assert session.is_welcome or session.out
    assert interrupts > 10


def test_memory_is_short_for_one_more_message() -> None:
    """It is not sent, and none is missing; one that the ring has is sent later."""
    world = World([0], relay=False)
    world.run(10, 0.1)
    world.outbox._messages = _Full()
    with pytest.raises(MemoryError):
        world.send()
    world.sent -= 1
    world.check()
    body = b"0.large"
    world.outbox._messages = _Full()
    world.outbox.stage(len(body), [(whole_header(EPOCH, 0, Kind.BYTES, len(body)) + body,)], 0)
    with pytest.raises(MemoryError):
        world.outbox.commit()
    world.outbox.settle(1)
    world.sent += 1
    world.settle()
    assert world.readers[0].log == [0]


class _Full(deque[Message]):
    """No memory for the first append."""

    is_full = True

    def append(self, message: Message) -> None:
        if self.is_full:
            self.is_full = False
            raise MemoryError
        super().append(message)


def hello_of(pid: int, host: str) -> bytes:
    """The first of a new reader 0."""
    fields = Hello("q", 0, pid, b"%d" % pid, "", 0, 0, 0, host, number=1)
    return control(Header(What.HELLO, 0), fields)
