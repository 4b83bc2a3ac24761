"""One writer and its readers on a few hosts, in virtual time: only the sessions are real.

A connection is two queues of frames. Everything that a network, a kernel, a signal handler or a
member that lies can do is a method of `World`; after each of them `check` compares the sessions
with what happened. The drivers here call the methods that those of `network` call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from memlane.broadcast.protocol.descriptions import text_of
from memlane.broadcast.protocol.frames import (
    VERSION,
    Header,
    Hello,
    Kind,
    Report,
    ReportRow,
    What,
    control,
    whole_header,
)
from memlane.broadcast.protocol.message import decode
from memlane.broadcast.protocol.outbox import Piece
from memlane.broadcast.protocol.peer import MAX_IDLE_FRAMES, Peer
from memlane.broadcast.protocol.reader_session import ReaderSession
from memlane.broadcast.protocol.states import Life
from memlane.broadcast.protocol.writer_session import WriterSession
from memlane.errors import AccessRefused, CorruptMessage, PeerDied, WriterClosed

if TYPE_CHECKING:
    from memlane.broadcast.protocol.writer_session import Due

BOUND = 1.0
WINDOW, WINDOW_BYTES = 4, 60
STEP = 0.2
OTHER_VERSION = b"mlq" + bytes([VERSION + 1])  # begins its frames
HANDSHAKE = 3 * BOUND
"""Seconds after which a reader ends a handshake that nobody answers."""
EPOCH = 77


@dataclass
class Line:
    """A TCP connection, as both ends see it."""

    route: bytes
    reader: Reader
    is_up: bool = True
    accepted_at: float | None = None  # by the writer's kernel
    is_admitted: bool = False
    writer_knows: bool = False  # of its end
    reader_knows_start: bool = False
    reader_knows_end: bool = False
    to_writer: deque[tuple[float, bytes]] = field(default_factory=deque)
    to_reader: deque[tuple[float, Piece]] = field(default_factory=deque)


@dataclass
class Ring:
    """Memory of one host; the relay of its readers fills it."""

    name: str
    messages: list[int] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)  # who has died or closed
    fate: str = ""  # dead, closed, failed
    lies: bool = False


class Reader:
    def __init__(
        self, world: World, rank: int, host: int, ticket: int | None = None, first: int = 0
    ) -> None:
        self.rank, self.host = rank, host
        self.ticket = rank if ticket is None else ticket  # of its key
        self.first = first  # the message that it is to get first
        identity = b"%d" % self.ticket
        self.session = ReaderSession(
            "q", rank, 100 + rank, identity, "", f"h{host}", "w", BOUND, world.now
        )
        self.line: Line | None = None
        self.log: list[int] = []
        self.ring: Ring | None = None
        self.is_relay = False
        self.is_behind = False
        self.is_slow = False  # as a relay it passes nothing on
        self.is_stopped = self.is_dead = self.has_closed = False
        self.lies = self.is_victim = False
        self.outcome = ""
        self.no_line_since: float | None = world.now
        self.was_unreachable = False  # for the writer
        self.no_writer_since: float | None = world.now
        self.writer_was_out = False  # of its reach
        self.hello_was_dropped = False  # the latest one, by a signal handler of the writer
        self.reported_at = -1.0
        self.ran_at = world.now

    @property
    def runs(self) -> bool:
        return not (self.is_stopped or self.is_dead or self.lies)

    @property
    def taken(self) -> int:
        return self.first + len(self.log)


class World:
    def __init__(
        self, hosts: list[int], *, relay: bool = True, pieces: int = 1, late: bool = False
    ) -> None:
        self.now = 1000.0
        self.pieces = pieces
        options: Any = SimpleNamespace(
            relay=relay,
            window=WINDOW,
            window_bytes=WINDOW_BYTES,
            liveness=BOUND,
            late_readers=late,
        )
        self.writer = WriterSession(len(hosts), [], options, "q", EPOCH, 1, (64, 4))
        for rank in range(len(hosts)):  # as export_handle(rank) does
            self.writer.keep_place(rank, self.now, lambda _ticket: None)
        self.peers = self.writer._peers
        self.outbox = self.writer.outbox
        self.is_writer_stopped = self.is_writer_gone = self.was_writer_killed = False
        self.readers = [Reader(self, rank, host) for rank, host in enumerate(hosts)]
        self.former: list[Reader] = []  # whose places others have taken
        self.lines: dict[bytes, Line] = {}
        self.rings: dict[str, Ring] = {}
        self.cuts: dict[tuple[int, str], float] = {}  # host and direction: since when
        self.sent = 0
        self.delay = 0.0
        self.missed: list[Peer] | None = None  # once the writer has closed
        self.ran_at = self.now  # the writer's driver
        self.gap = 0.0  # for which the writer was stopped, until its clocks are delayed
        self.interrupt = ""  # the next chance of that kind is taken by a signal handler
        self.everybody()

    # What can happen --------------------------------------------------------------------------

    def send_together(self, count: int, size: int = 5) -> None:
        """Enqueues small messages that share a frame, as many as there is room for."""
        session = self.writer
        if self.is_writer_stopped or self.is_writer_gone or session.ending.has_begun:
            return
        messages, nbytes = session.room()
        bodies = [b"%d." % (self.sent + at) + bytes(size) for at in range(min(count, messages))]
        total = sum(map(len, bodies))
        if not bodies or total > nbytes:
            return
        first = session.outbox.next
        frame = b"".join(
            whole_header(EPOCH, first + at, Kind.BYTES, len(body)) + body
            for at, body in enumerate(bodies)
        )
        self.sent += len(bodies)
        session.outbox.append_batch(first, frame, total, len(bodies))
        self.write()

    def send(self, size: int = 5, *, fate: str = "") -> None:
        """Enqueues, if there is room. `fate`: a handler raises before or after the ring has it."""
        session = self.writer
        if self.is_writer_stopped or self.is_writer_gone or session.ending.has_begun:
            return
        if not session.has_room(size):
            return
        body = b"%d." % self.sent + bytes(size)
        if self.pieces == 1:
            pieces = [(whole_header(EPOCH, session.outbox.next, Kind.BYTES, len(body)) + body,)]
        else:
            pieces = _split(body, session.outbox.next, self.pieces)
        if not fate and self.pieces == 1:
            self.sent += 1
            self._send(session.publish_alone(pieces[0], size))
        else:
            session.outbox.stage(size, pieces, self.sent)
            self.sent += fate != "before"
            if fate:
                session.outbox.settle(self.sent)
            else:
                session.outbox.commit()
        self.write()

    def reset(self, reader: Reader, arrived: int = 0) -> None:
        """The connection ends; so many frames of each direction had come before that."""
        if reader.line is not None:
            self.cut_line(reader.line, arrived)

    def cut_line(self, line: Line, arrived: int = 0) -> None:
        if not line.is_up:
            return
        line.is_up = False
        for queue in (line.to_writer, line.to_reader):
            while len(queue) > arrived:
                queue.pop()
        # A reader's socket keeps the order over connections, that of the writer does not.
        line.to_reader = deque((self.now, piece) for _, piece in line.to_reader)

    def cut(self, host: int, direction: str) -> None:
        self.cuts.setdefault((host, direction), self.now)

    def heal(self, host: int) -> None:
        for direction in ("up", "down"):
            self.cuts.pop((host, direction), None)

    def kill(self, reader: Reader) -> None:
        reader.is_dead = True
        self.reset(reader, 1)
        if reader.ring is not None:
            reader.ring.gone.add(reader.rank)
            if reader.is_relay and not reader.ring.fate:
                reader.ring.fate = "dead"

    def replace(self, rank: int) -> Reader | None:
        """Another process takes the place of a reader that has ended."""
        session, old, peer = self.writer, self.readers[rank], self.peers[rank]
        if self.is_writer_stopped or self.is_writer_gone or session.ending.has_begun:
            return None
        if peer.life is Life.DEAD:
            session.release(rank, self.now)
        if peer.life is not Life.CLOSED or old.lies or old.is_victim:
            return None
        tickets: list[int] = []
        session.readmit(rank, self.now, tickets.append)
        ticket = old.ticket + len(self.peers)
        assert tickets == [ticket]
        self.former.append(old)
        new = self.readers[rank] = Reader(self, rank, old.host, ticket, self.sent)
        self.write()
        return new

    def kill_writer(self) -> None:
        self.is_writer_gone = self.was_writer_killed = True
        for reader in self.readers + self.former:
            self.reset(reader, 1)

    def close(self, reader: Reader) -> None:
        if not reader.runs or reader.has_closed:
            return
        if not reader.session.writer_pid:  # its constructor raises, without a word to the writer
            self.kill(reader)
            return
        reader.has_closed = True
        if reader.ring is not None:
            reader.ring.gone.add(reader.rank)
        if not reader.is_relay or (reader.ring is not None and reader.ring.fate == "failed"):
            reader.session.leave(self.now)
        self.read(reader)

    def fail_relay(self, reader: Reader, *, holds_message: bool = True) -> None:
        """Its host has no space or memory, perhaps for a message that it has taken already."""
        ring, session = reader.ring, reader.session
        if not reader.is_relay or not reader.runs or ring is None or ring.fate:
            return
        if holds_message and session.inbox:
            session.take(self.now)
        session.read_alone(ring.positions[reader.rank], self.now)
        if reader.has_closed:
            session.leave(self.now)
        self._flush_reader(reader)
        ring.fate = "failed"

    def close_writer(self) -> None:
        if not self.is_writer_gone:
            self.writer.ending.begin(self.now)

    def advance(self, seconds: float = STEP) -> None:
        """Time passes; who runs does what is due."""
        self.now += seconds
        self.everybody()

    def run(self, steps: int, seconds: float = STEP, *, drains: bool = False) -> None:
        """Advances so many times; `drains`: everybody takes what there is after each."""
        for _ in range(steps):
            self.advance(seconds)
            if drains:
                self.drain()

    def everybody(self) -> None:
        for reader in self.readers + self.former:
            self.read(reader)
        self._note_time()
        for reader in self.readers if not self.is_writer_gone else ():
            cut = min((s for (h, _), s in self.cuts.items() if h == reader.host), default=self.now)
            line = reader.line
            if line is not None and line.is_up and line.reader_knows_start:
                reader.no_line_since = None
            elif reader.no_line_since is None:
                reader.no_line_since = self.now
            alone = self.now if reader.no_line_since is None else reader.no_line_since
            lost = self.peers[reader.rank].lost_since
            is_hello_lost = reader.no_line_since is not None or reader.hello_was_dropped
            if is_hello_lost and lost is not None and (reader.is_stopped or self.delay > 0):
                alone = lost  # it cannot send another one, or that one is still under way
            is_long = self.now - min(cut, alone) >= BOUND / 2 - 1e-9
            reader.was_unreachable |= is_long and not self.is_writer_stopped
            reader.was_unreachable |= self.now - cut >= BOUND - 1e-9  # as the kernel says
            self._look_for_writer(reader, cut)
        self.write()

    def _look_for_writer(self, reader: Reader, cut: float) -> None:
        """A writer that is stopped is not out of reach: its kernel accepts connections."""
        line = reader.line
        is_accepted = line is not None and line.is_up and line.accepted_at is not None
        if line is not None and is_accepted:
            age = self.now - (line.accepted_at or 0.0)
            if line.reader_knows_start or age >= BOUND / 2:
                reader.no_writer_since = None
        elif reader.no_writer_since is None:
            reader.no_writer_since = self.now
        since = self.now if reader.no_writer_since is None else reader.no_writer_since
        is_long = self.now - min(cut, since) >= BOUND / 2 - 1e-9
        reader.writer_was_out |= is_long and not reader.is_stopped
        reader.writer_was_out |= self.now - cut >= BOUND - 1e-9  # as its kernel says

    def _lines_of(self, reader: Reader) -> list[Line]:
        return [line for line in self.lines.values() if line.reader is reader]

    def _is_cut(self, reader: Reader) -> float | None:
        return min((s for (h, _), s in self.cuts.items() if h == reader.host), default=None)

    def _takes(self, kind: str) -> bool:
        if self.interrupt == kind:
            self.interrupt = ""
            return True
        return False

    # The writer's driver ----------------------------------------------------------------------

    def _note_time(self) -> None:
        """Nobody is out of reach while the writer is stopped."""
        if self.is_writer_stopped:
            return
        gap, self.ran_at = self.now - self.ran_at, self.now
        if gap > BOUND / 2:
            self.gap = gap
            for reader in self.readers:
                if reader.no_line_since is not None:
                    reader.no_line_since = min(self.now, reader.no_line_since + gap)

    def write(self) -> None:
        if self.is_writer_stopped or self.is_writer_gone:
            return
        self._note_time()
        session, now = self.writer, self.now
        for line in self.lines.values():
            reader = line.reader
            if line.is_up and not line.is_admitted and self._is_cut(reader) is None:
                line.is_admitted = True
                session.authenticated(reader.ticket, now)
            if not line.is_up and not line.writer_knows:
                line.writer_knows = True
                session.lost(line.route, now)
        for line in list(self.lines.values()):
            self._hear(line.reader, line)
        if session.readiness.is_asked:
            session.readiness.answer([], now)
        if self.gap:  # behind what has come meanwhile, as the thread does it
            session.delay_clocks(self.gap, now)
            self.gap = 0.0
        for route in session.places.connections():
            line = self.lines[route]
            since = self._is_cut(line.reader)
            if not line.is_up:
                session.lost(route, now)
            elif since is not None and now - since >= BOUND:
                session.silent(route, "silent", now)
        for route in session.places.talkative():
            if not self.lines[route].to_reader:
                session.drained(route)
        session.tick(now)
        if not (session.readiness.is_everybody_here or session.count_absent()):
            session.readiness.announce()
        self._flush_writer()
        if session.ending.has_begun and (
            not session.ending.unfinished() or session.ending.is_stuck(now)
        ):
            self.missed = session.ending.missed()
            self.is_writer_gone = True
            for reader in self.readers + self.former:
                self.reset(reader, 1000)

    def _hear(self, reader: Reader, line: Line) -> None:
        session = self.writer
        while line.to_writer and line.to_writer[0][0] <= self.now:
            if (reader.host, "up") in self.cuts:
                return
            frame = line.to_writer.popleft()[1]
            is_hello = frame[4:5] == bytes((What.HELLO,))
            if self._takes("hear"):
                reader.hello_was_dropped |= is_hello
                session.say_again()
                continue
            reader.hello_was_dropped &= not is_hello
            if not session.is_known(line.route) and line.to_reader:
                self.cut_line(line)  # as a transport does if the answers are not read
            try:
                session.heard(line.route, frame, self.now, reader.ticket, "somewhere")
            except CorruptMessage:
                continue
            if not line.is_up and session.is_known(line.route):
                session.lost(line.route, self.now)  # as a transport finds that it is closed

    def _flush_writer(self) -> None:
        session = self.writer
        self._send(session.frames_due())
        while session.replies.unwanted:
            self.cut_line(self.lines[session.replies.unwanted.popleft()])

    def _send(self, due: Iterable[Due]) -> None:
        session = self.writer
        for route, piece, peer, cursor in due:
            line = self.lines.get(route)
            if line is not None and line.is_up:
                line.to_reader.append((self.now + self.delay, piece))
                if self._takes("flush"):
                    continue  # it is not known whether that went out
            elif peer is not None:
                session.unsent(peer, self.now)
                continue
            session.sent(peer, cursor)

    # A reader's driver ------------------------------------------------------------------------

    def read(self, reader: Reader) -> None:
        if not reader.runs:
            return
        session, now = reader.session, self.now
        gap, reader.ran_at = now - reader.ran_at, now
        if gap > BOUND / 2:
            session.connection.delay_clock(gap, now)
            if reader.no_writer_since is not None:
                reader.no_writer_since = min(now, reader.no_writer_since + gap)
        self._connect(reader)
        line = reader.line
        for each in self._lines_of(reader):
            if each is line or not each.is_up:
                self._take_frames(reader, each)
        if reader.ring is not None:
            session.follow(reader.ring.positions[reader.rank], now)
        since = self._is_cut(reader)
        has_line = line is not None and line.is_up and line.accepted_at is not None
        session.connection.note_silence(has_line and since is not None and now - since >= BOUND)
        if session.connection.is_connected:
            session.acknowledge_later(now)
        due = session.tick(now)
        is_over = due is None or due > now or due == session.connection.probe_due()
        assert is_over, f"reader {reader.rank} looks again at once, for ever"
        self._share(reader)
        self._flush_reader(reader)
        if session.connection.failure is not None:
            self.reset(reader, 1000)

    def _connect(self, reader: Reader) -> None:
        session, line, now = reader.session, reader.line, self.now
        is_over = session.connection.failure is not None or (reader.has_closed and session.has_left)
        is_new = line is not None and line.is_up and line.accepted_at is None
        if line is not None and is_new and self._is_cut(reader) is None:
            line.accepted_at = now
            session.connection.accept(now)
        if line is not None and line.is_up and line.accepted_at is not None:
            if line.is_admitted and not line.reader_knows_start:
                session.connect(now)
                line.reader_knows_start = True
            elif not line.is_admitted and now - line.accepted_at >= HANDSHAKE:
                line.is_up = False
        if line is not None and not line.is_up and not line.reader_knows_end:
            self._take_frames(reader, line)
            session.lose(now)
            line.reader_knows_end = True
        if (line is None or not line.is_up) and not is_over:
            if self.is_writer_gone:
                if session.connection.was_cut:
                    session.connection.note_probe(self._is_cut(reader) is None, now)
                return
            self.dial(reader)
            if self._is_cut(reader) is None:
                self._connect(reader)

    def dial(self, reader: Reader) -> Line:
        number = sum(route.split(b"-")[0] == b"%d" % reader.rank for route in self.lines)
        route = b"%d-%d" % (reader.rank, number)
        reader.line = self.lines[route] = Line(route, reader)
        return reader.line

    def _take_frames(self, reader: Reader, line: Line) -> None:
        session = reader.session
        while line.to_reader and line.to_reader[0][0] <= self.now:
            if (reader.host, "down") in self.cuts and line.is_up:
                return
            head, *rest = line.to_reader.popleft()[1]
            payload = rest[0] if rest else None
            if self._takes("receive"):
                session.doubt(self.now)
                continue
            if not session.receive_whole(head):
                try:
                    session.receive(head, payload, self.now)
                except CorruptMessage as error:
                    raise AssertionError(f"a frame of a true writer is wrong: {error}") from None

    def _flush_reader(self, reader: Reader) -> None:
        session, line = reader.session, reader.line
        while session.out:
            if line is None or not line.is_up or not line.reader_knows_start:
                session.out.clear()
                return
            line.to_writer.append((self.now + self.delay, session.out[0]))
            if self._takes("say"):
                continue
            session.out.popleft()

    # Rings ------------------------------------------------------------------------------------

    def _share(self, reader: Reader) -> None:
        session, plan, ring = reader.session, reader.session.ring, reader.ring
        is_in = reader.is_behind or reader.is_relay or session.is_behind
        if ring is not None and not is_in and (plan is None or plan.name != ring.name):
            ring.gone.add(reader.rank)
            reader.ring = None  # its relay ended before it was seen there
            session.read_alone(0, self.now)
            return
        if plan is None or (reader.has_closed and not reader.is_relay):
            return
        if reader.ring is None and not plan.name:
            reader.ring = Ring(f"ring{len(self.rings)}")
            self.rings[reader.ring.name] = reader.ring
            reader.ring.positions[reader.rank] = 0
            reader.is_relay = True
        elif reader.ring is None:
            ring = self.rings.get(plan.name)  # a relay that lies has none
            if ring is None or ring.fate or reader.rank in ring.positions:
                session.read_alone(0, self.now)
                return
            ring.positions[reader.rank] = 0
            reader.ring = ring
            reader.is_victim |= ring.lies
        if reader.is_relay:
            self._relay(reader)
        elif not reader.is_behind and reader.ring is not None:
            if session.is_behind:
                reader.is_behind = True
            elif self.now - reader.reported_at >= 1.0:
                reader.reported_at = self.now
                row = ReportRow(plan.place, 100 + reader.rank, "running", 0)
                session.report(reader.ring.name, "id", [row])

    def _relay(self, reader: Reader) -> None:
        session, ring = reader.session, reader.ring
        if ring is None or ring.fate:
            return
        while session.inbox and not reader.is_slow:
            message = session.take(self.now)
            assert message.sequence == len(ring.messages), "the relay's stream has a gap"
            ring.messages.append(_number(message))
        rows = []
        for place, position in ring.positions.items():
            other = self.readers[place]
            state = "running"
            if place in ring.gone:
                state = "dead" if other.is_dead and not other.has_closed else "closed"
            rows.append(ReportRow(place, 100 + place, state, position))
        session.report(ring.name, "id", rows)
        try:
            if not session.inbox and not reader.is_slow:
                session.check_writer(self.now)
        except WriterClosed:
            ring.fate = "closed"
        except PeerDied:
            ring.fate = "dead"
        absent = {peer.place for peer in self.peers if peer.is_absent}
        if ring.gone >= set(ring.positions) | absent and not ring.fate:
            ring.fate = "closed"
            session.leave(self.now)

    # The application --------------------------------------------------------------------------

    def dequeue(self, reader: Reader) -> bool:
        """Takes one message, if there is one."""
        if not reader.runs or reader.has_closed or reader.outcome:
            return False
        self.read(reader)
        session = reader.session
        ring = reader.ring
        if reader.is_relay or reader.is_behind:
            assert ring is not None
            place = ring.positions[reader.rank]
            if place < len(ring.messages):
                reader.log.append(ring.messages[place])
                ring.positions[reader.rank] = place + 1
                return True
            if ring.fate == "closed":
                reader.outcome = "WriterClosed"
            elif (
                ring.fate == "failed"
                or (ring.fate == "dead" and reader.is_behind)
                or (reader.is_behind and not session.is_behind)  # its relay does not report
            ):
                reader.is_behind = reader.is_relay = False
                reader.ring = None
                session.read_alone(place, self.now)
                self._flush_reader(reader)
            elif ring.fate == "dead":
                self._end(reader)
            return False
        if session.inbox and session.ring is None:
            reader.log.append(_number(session.take(self.now)))
            self._flush_reader(reader)
            ahead = session.takeable()  # as a reader does that decodes a frame at once
            reader.log.extend(map(_number, ahead))
            if ahead:
                session.take_before(ahead[-1].sequence + 1, self.now)
            return True
        self._end(reader)
        return False

    def _end(self, reader: Reader) -> None:
        try:
            reader.session.check_writer(self.now)
        except (WriterClosed, PeerDied, AccessRefused) as error:
            reader.outcome = type(error).__name__
        self._flush_reader(reader)

    # A member that lies -----------------------------------------------------------------------

    def lie(self, reader: Reader, dice: Random) -> None:
        """Sends any well-formed frame, with the key of its place, on any of its connections."""
        lines = [line for line in self._lines_of(reader) if line.is_up]
        line = dice.choice(lines) if lines and dice.random() < 0.8 else self.dial(reader)
        if dice.random() < 0.2:  # it reads what it was sent there
            line.to_reader.clear()
        frame = self._lie(reader, dice)
        self.claim(reader, line, frame, 1 if dice.random() < 0.9 else dice.choice([20, 300]))

    def claim(self, reader: Reader, line: Line, frame: bytes, count: int = 1) -> None:
        """Sends that frame, and from now on does nothing but what it is told."""
        reader.lies = True
        if reader.ring is not None and reader.is_relay:
            reader.ring.lies = True
            for other in self.readers:  # it may lie about those that read its ring, and to them
                other.is_victim |= other.ring is reader.ring
        line.to_writer.extend([(self.now, frame)] * count)
        self.write()

    def _lie(self, reader: Reader, dice: Random) -> bytes:
        numbers = [0, 1, self.sent - 1, self.sent, self.sent + 1, self.peers[reader.rank].taken]
        number = max(0, dice.choice([*numbers, 1 << 40]))
        what = dice.choice([What.HELLO, What.HELLO, *What])
        body: Any = None
        if what == What.HELLO:
            body = Hello(
                "q",
                dice.choice([reader.rank, reader.rank, dice.randrange(7), -1, 1 << 62]),
                dice.choice([1, 100, -1, 1 << 60]),
                dice.choice([b"%d" % reader.rank, b"%d" % dice.randrange(6), b"lie"]),
                "",
                dice.choice(numbers),
                number,
                dice.choice([0, 0, 1, 2, 1 << 31]),
                dice.choice([f"h{reader.host}", f"h{dice.randrange(3)}", ""]),
                dice.random() < 0.3,
                dice.choice([-1, 1, 2, 5, dice.randrange(1000), (1 << 62) - 1, (1 << 64) - 1]),
            )
        elif what == What.REPORT:
            states = ["running", "dead", "closed", "absent", "stopped", ""]
            places = range(-1, len(self.readers) + 1)
            taken = [0, self.sent, number, -1]
            rows = [
                ReportRow(dice.choice(places), 5, dice.choice(states), dice.choice(taken))
                for _ in range(dice.randrange(4))
            ]
            name = dice.choice(["", "ring0", "ring1", "lie"])
            body = Report(name, dice.choice(["id", "", "lie"]), rows)
        epoch = EPOCH if dice.random() < 0.9 else dice.randrange(3)
        header = Header(what, epoch, number, dice.randrange(6), dice.randrange(3))
        frame = control(header, body)
        return frame if dice.random() < 0.95 else OTHER_VERSION + frame[4:]

    # What must hold ---------------------------------------------------------------------------

    def check(self) -> None:
        outbox = self.outbox
        assert outbox.next == self.sent, "a message is there that nobody sent, or the reverse"
        for reader in self.former:
            log = reader.log
            assert log == list(range(reader.first, reader.taken)), f"{reader.rank} got {log} before"
            assert reader.outcome in ("", "WriterDied", "ReaderGivenUp", "AccessRefused")
        for reader in self.readers:
            log, peer = reader.log, self.peers[reader.rank]
            if peer.comes_late and not log:
                reader.first = peer.first
            if peer.is_waited_for:
                assert outbox.next - peer.taken <= WINDOW, "more than a window is on its way"
                in_flight = outbox.bytes - peer.taken_bytes
                assert in_flight <= WINDOW_BYTES or outbox.next - peer.taken == 1
                assert peer.taken >= outbox.first, "a message was dropped that somebody needs"
            assert peer.taken <= self.sent, "a message was taken that was not sent"
            if reader.is_victim and not reader.lies:
                continue
            if reader.lies:
                for line in self._lines_of(reader):
                    most = 2 * MAX_IDLE_FRAMES + 4 * WINDOW * self.pieces
                    assert len(line.to_reader) <= most, "a connection costs without a bound"
                continue
            taken = reader.taken
            assert log == list(range(reader.first, taken)), f"reader {reader.rank} got {log}"
            assert taken <= self.sent or not log
            assert peer.taken <= taken, f"it is said to have taken {peer.taken}, not {taken}"
            if peer.life is Life.DEAD:
                assert reader.is_dead or reader.was_unreachable, f"{reader.rank}: {peer.died}"
            if peer.life in (Life.CLOSED, Life.RELAYING):
                assert reader.has_closed, f"reader {reader.rank} did not close"
            if reader.outcome == "WriterClosed":
                assert self.writer.ending.has_begun
                assert taken == self.sent
            if reader.outcome in ("WriterDied", "AccessRefused"):
                assert self.is_writer_gone or reader.writer_was_out, (
                    f"{reader.rank}: {self.story()}"
                )
            is_unexplained = reader.outcome == "WriterDied" and not reader.writer_was_out
            # A reader that was out of reach for its limit counts as dead, and is owed nothing.
            is_unexplained &= peer.life is not Life.DEAD
            if self.missed is not None and is_unexplained:
                is_attaching = reader.ring is not None and not reader.is_behind
                is_named = peer in self.missed or is_attaching or peer.first == self.sent
                assert is_named, f"reader {reader.rank} was told nothing of the end: {self.story()}"
            if reader.outcome == "ReaderGivenUp":
                assert peer.life is Life.DEAD

    def settle(self) -> None:
        """Once the network has healed and all processes run, everybody gets everything."""
        self.delay, self.interrupt = 0.0, ""
        self.is_writer_stopped = False
        for reader in self.readers:
            reader.is_stopped = reader.is_slow = False
            self.heal(reader.host)
        for _ in range(40):
            self.run(1, drains=True)
            if self._is_settled():
                break
        self.check()
        assert self._is_settled(), self.story()
        self.close_writer()
        for _ in range(40):
            self.run(1, drains=True)
            if self.is_writer_gone and all(r.outcome or not self._counts(r) for r in self.readers):
                break
        self.check()
        for reader in self.readers:
            if self._counts(reader):
                assert reader.outcome, f"reader {reader.rank} waits for ever: {self.story()}"
            if reader.outcome == "WriterDied" and not self.was_writer_killed:
                assert self.missed is not None or reader.writer_was_out

    def drain(self) -> None:
        for reader in self.readers:
            while self.dequeue(reader):
                self.check()

    def _counts(self, reader: Reader) -> bool:
        return reader.runs and not (reader.has_closed or reader.is_victim)

    def _is_settled(self) -> bool:
        if self.is_writer_gone:
            return all(r.outcome or not self._counts(r) for r in self.readers)
        for reader in self.readers:
            peer = self.peers[reader.rank]
            has_ended = reader.has_closed or reader.outcome in ("WriterDied", "ReaderGivenUp")
            if reader.lies or reader.is_victim:
                continue
            if (reader.is_dead or has_ended) and peer.life is Life.RUNNING:
                return False
            waits = self._counts(reader) and not reader.outcome
            if waits and (peer.life is not Life.RUNNING or reader.taken < self.sent):
                return False
        return True

    def story(self) -> str:
        return "; ".join(
            f"{text_of(p, self.sent, self.now)} log {len(r.log)} {r.outcome}"
            f" relay {r.is_relay} behind {r.is_behind} dead {r.is_dead} closed {r.has_closed}"
            f" lies {r.lies} victim {r.is_victim}"
            for p, r in zip(self.peers, self.readers, strict=True)
        )


def _number(message: Any) -> int:
    return int(decode(message, None).split(b".")[0])  # type: ignore[arg-type]


def _split(body: bytes, sequence: int, count: int) -> list[Piece]:
    length = -(-len(body) // count)
    parts = [body[at : at + length] for at in range(0, len(body), length)]
    return [
        (
            Header(
                What.MESSAGE, EPOCH, sequence, Kind.BYTES, n, len(parts), n * length, len(body)
            ).pack(),
            memoryview(part),
        )
        for n, part in enumerate(parts)
    ]
