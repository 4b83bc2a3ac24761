"""The reader's side of the protocol: the order of frames, acknowledgements, the writer's end.

Takes frames and the time, and puts frames to send into `out`. No sockets, no threads, no clock.
Any frame may be lost with a connection, and is repeated until it is answered: HELLO, ASK, BYE and
REPORT after a time, an acknowledgement with the next HELLO.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from memlane._base.blame import Facts, sentence
from memlane._native import messages_in
from memlane.broadcast.protocol.connection_state import ConnectionState
from memlane.broadcast.protocol.frames import (
    PIECE,
    Absent,
    Header,
    Hello,
    Kind,
    OtherVersion,
    Refused,
    Report,
    ReportRow,
    Ring,
    Welcome,
    What,
    control,
    messages_of,
    parsed,
    whole_header,
)
from memlane.broadcast.protocol.message import Assembly, Message
from memlane.broadcast.protocol.states import STREAM, Stream, StreamEvent
from memlane.errors import (
    CorruptMessage,
    InvalidArgument,
    LayoutMismatch,
    MemlaneError,
    RankTaken,
    ReaderGivenUp,
    WriterClosed,
    WriterDied,
)

if TYPE_CHECKING:
    from memlane.broadcast.protocol.peer import Cursor

ACK_DELAY = 0.02
"""Seconds by which a waiting reader delays an acknowledgement, so that it covers more."""
REPEAT = 1.0
"""Longest time, in seconds, before an unanswered frame is sent again."""
DOUBT = 0.01
"""Seconds in which the next frame shows whether one was lost. Before it is welcome, a reader gives
its writer ten times as long: another HELLO would void the answer to the last one."""
_MOST_UNACKED = 2 << 20  # bytes: the writer's memory is used again while it is in the cache
_ROWS = 64  # of a REPORT that fits a reader's frame
_STREAMS = (Stream.OWN, Stream.RELAY)
_WELCOME = (*_STREAMS, Stream.ASKING)


SMALL_KINDS = (Kind.BYTES, Kind.PLAIN)
"""The kinds of messages that are decoded without running code of the application."""


class PlaceTaken(RankTaken):
    """The place of that key is another reader's; with more keys, another place may be free."""


class ReaderSession:
    """One reader of one writer.

    A stream begins with the WELCOME that answers the latest HELLO, at the wanted frame. From there
    on, each frame must be the next one; frames that are known already are ignored.

    Attributes:
        wanted: the first frame not received yet.
        inbox: complete messages that were not taken yet.
        out: frames for the writer, the oldest first.
        connection: the connection as this reader sees it, and the writer's death.
        ring: of this host's readers, to make or read from; None: the stream is this reader's own.
    """

    def __init__(
        self,
        queue_id: str,
        rank: int,
        pid: int,
        session: bytes,
        token: str,
        host: str,
        where: str,
        liveness: float,
        now: float,
    ) -> None:
        self._identity = queue_id, rank, pid, session, token
        self.connection = ConnectionState(where, liveness, now)
        self._where = where
        self._host = host
        self._repeat = min(REPEAT, liveness / 4)
        self.out: deque[bytes] = deque()
        self.inbox: deque[Message] = deque()
        self.epoch = 0  # of the writer, once it is known
        self._header = b""  # of its messages
        self.first = 0  # the message that the stream began with
        self.wanted: Cursor = (0, 0)
        self._assembly: Assembly | None = None
        self.taken = self.bytes = 0
        self.last_progress = now
        self._acked = self._ack_at = self._ack_at_bytes = 0
        self._ack_messages = self._ack_bytes = 1  # acknowledged after this many more
        self.writer_pid = self.window = self.window_bytes = 0
        self.ring: Ring | None = None
        self.absent: Absent | None = None  # the latest answer to ASK
        self.stream = Stream.GREETING
        self._is_streaming = False  # for the fast path: whether messages come in that state
        self.is_ready = self.has_left = self._is_leaving = False
        self._end: int | None = None  # there is no message with this sequence
        self._greet_at: float | None = None
        self._doubt_at: float | None = None  # a frame may have been lost: HELLO then, if none comes
        self._ask_by = now  # the latest such time, whatever comes
        self._greeting = 0  # the number of the latest HELLO
        self._say_at: float | None = None  # when BYE is sent, again

    def connect(self, now: float) -> None:
        """Sends HELLO on a new connection."""
        self.connection.connect(now)
        self.out.clear()
        self.greet(now)
        if self._is_leaving:
            self._say_at = now

    def lose(self, now: float) -> None:
        self.connection.lose(now)
        self._turn(StreamEvent.GREETS)
        self.out.clear()

    # Sending ----------------------------------------------------------------------------------

    def greet(self, now: float) -> None:
        """Sends HELLO, which requests the stream from the wanted frame on."""
        self._doubt_at = None
        if self.has_left:
            return  # it would attach again
        self._greet_at = now  # until it is sent: a signal handler may raise after any call
        self._turn(StreamEvent.GREETS)
        place = (self.taken, *self.wanted)
        self._greeting += 1
        hello = Hello(*self._identity, *place, self._host, self.is_behind, self._greeting)
        self._say(What.HELLO, 0, hello)
        self._greet_at = now + self._repeat

    def doubt(self, now: float) -> bool:
        """A frame may have been lost: the next one shows it, or `tick` asks for it. To ask at once
        would void all that is under way. Returns whether that is new."""
        if self._doubt_at is not None:
            return False
        self._doubt_at = now + (DOUBT if self.is_welcome else 10 * DOUBT)
        self._ask_by = now + self._repeat
        return True

    def _say(self, what: What, sequence: int = 0, body: object = None) -> None:
        """Queues a frame if connected; otherwise it is repeated once there is a connection."""
        if self.connection.is_connected:
            epoch = 0 if what == What.HELLO else self.epoch
            self.out.append(control(Header(what, epoch, sequence), body))  # type: ignore[arg-type]

    def ask(self) -> None:
        """Asks which readers are absent; `absent` and `is_ready` get the answer."""
        self._say(What.ASK)

    def leave(self, now: float) -> None:
        """This reader takes no more messages; repeats BYE from now on."""
        self._is_leaving = True
        self._say_at = now

    def report(self, name: str, ring_id: str, rows: list[ReportRow]) -> None:
        """Reports on the readers of that ring. Lost without a connection, so callers repeat it."""
        for first in range(0, max(len(rows), 1), _ROWS):
            self._say(What.REPORT, 0, Report(name, ring_id, rows[first : first + _ROWS]))

    def read_alone(self, taken: int, now: float, nbytes: int = 0) -> None:
        """Requests a stream of its own from message `taken` on; `nbytes` bytes were taken before
        that message. What a relay took beyond it is requested again."""
        self._host, self.ring = "", None
        self._turn(StreamEvent.GOES_ALONE)
        while taken >= self.taken and self.inbox and self.inbox[0].sequence < taken:
            self.inbox.popleft()
        if taken < self.taken or self.wanted < (taken, 0):
            self.inbox.clear()
            self.wanted, self._assembly, self._end = (taken, 0), None, None
        self.taken, self.bytes = taken, nbytes
        self._acked = taken
        self._ack_at = self._ack_at_bytes = 0
        self.greet(now)

    def follow(self, position: int | None, now: float) -> None:
        """The application has taken `position` messages from its relay's ring; None: no ring.
        Once the relay has ended, this also tells the writer, which may be waiting for room."""
        is_alone = not (self._host or self.is_behind)
        has_parted = self.stream is Stream.PARTED
        if position is not None and (has_parted or (is_alone and position > self.taken)):
            self.read_alone(position, now)

    def tick(self, now: float) -> float | None:
        """Repeats what is due; returns when more is due."""
        if any(at is not None and now >= at for at in (self._greet_at, self._doubt_at)):
            self.greet(now)
        if self._say_at is not None and now >= self._say_at:
            self._say_at = now + self._repeat
            self._say(What.BYE)
        dues = self._greet_at, self._doubt_at, self._say_at, self.connection.probe_due()
        return min((due for due in dues if due is not None), default=None)

    # Acknowledging ----------------------------------------------------------------------------

    def take(self, now: float) -> Message:
        """The next message; it counts as taken from now on."""
        message = self._take_next(now)
        if self.taken >= self._ack_at or self.bytes >= self._ack_at_bytes:
            self.acknowledge()
        return message

    def takeable(self) -> list[Message]:
        """Small messages, in one piece, that can be taken before an acknowledgement is due."""
        found, nbytes = [], self.bytes
        for message in self.inbox:
            sequence, kind, memory = message
            nbytes += len(memory)
            is_due = sequence + 1 >= self._ack_at or nbytes >= self._ack_at_bytes
            if is_due or kind not in SMALL_KINDS or type(memory) is not bytes:
                break
            found.append(message)
        return found

    def take_before(self, end: int, now: float) -> None:
        """Takes all messages before that sequence. What a signal handler interrupts can be called
        again."""
        inbox = self.inbox
        while inbox and inbox[0].sequence < end:
            self._take_next(now)

    def _take_next(self, now: float) -> Message:
        message = self.inbox[0]
        nbytes = self.bytes + len(message.memory)
        # And no call in between, after which a signal handler may raise.
        self.taken, self.bytes, self.last_progress = message.sequence + 1, nbytes, now
        self.inbox.popleft()
        return message

    def acknowledge(self) -> None:
        if self.ring is None:  # with a ring, a REPORT tells what the host's readers have taken
            self._say(What.ACK, self.taken)
            self._confirm_end()
        self._acked = self.taken
        self._ack_at = self.taken + self._ack_messages
        self._ack_at_bytes = self.bytes + self._ack_bytes

    def acknowledge_later(self, now: float) -> float | None:
        """Acknowledges if that is due, while the reader waits; returns when it will be due."""
        if self.taken == self._acked:
            return None
        due = self.last_progress + ACK_DELAY
        if now < due:
            return due
        self.acknowledge()
        return None

    def _confirm_end(self) -> None:
        """Confirms END, so that the writer may leave. A relay does so only in `check_writer`, when
        it looks for another message: by then, its ring has all of them."""
        if self._end is not None:
            self._say(What.END, self._end)

    # Receiving --------------------------------------------------------------------------------

    def receive_whole(self, part: bytes) -> bool:
        """Fast path of `receive` for the next messages if `part` contains all of them, as is the
        case for most. False for any other frame, and nothing is changed."""
        sequence, piece = self.wanted
        if piece or not self._is_streaming:
            return False
        messages = messages_in(part, self._header, sequence, Message)
        if messages is None:
            return False
        # A signal handler can raise only after a call, so either all of this happens or none.
        end = sequence + len(messages)
        self.wanted, self._assembly, self._doubt_at = (end, 0), None, None
        try:
            self.inbox.extend(messages)
        except MemoryError:
            self.wanted = (self.inbox[-1].sequence + 1 if self.inbox else sequence, 0)
            raise
        return True

    def _accept(self, message: Message) -> None:
        """A complete message has arrived; the next one is wanted. A signal handler can raise only
        after a call, so either all of this happens or none."""
        self.wanted, self._assembly = (message.sequence + 1, 0), None
        try:
            self.inbox.append(message)
        except MemoryError:
            self.wanted = (message.sequence, 0)
            raise

    def receive(self, part: bytes, payload: memoryview | None, now: float) -> None:
        """Handles one frame of the writer. A wrong one raises CorruptMessage and changes nothing,
        except that the wanted frame is requested again. After one that may be lost, a gap is no
        error. If the writer's first frame is one of another version, this reader has failed."""
        if self._greet_at is not None:  # the answer is on its way behind this frame
            self._greet_at = now + self._repeat
            if self._doubt_at is not None:
                self._doubt_at = min(now + 10 * DOUBT, self._ask_by)  # it may be what was lost
        try:
            self._receive(part, payload, now)
        except CorruptMessage as error:
            if isinstance(error, OtherVersion) and not self.was_welcome:
                self._fail(LayoutMismatch(error.text(f"the writer at {self._where}")))
                return
            was_lost = self._doubt_at is not None
            if self.is_welcome:
                self.greet(now)
            if not was_lost:
                raise

    def _receive(self, part: bytes, payload: memoryview | None, now: float) -> None:
        header, body = parsed(part)
        if header.what == What.WELCOME:
            self._be_welcome(header, body)
        elif header.what == What.REFUSED:
            self._be_refused(body, now)
        elif header.what == What.SEEN:
            self._greet_at = None
            self._turn(StreamEvent.SEEN)
        elif self.epoch == 0:
            return  # sent to all, and again on request
        elif header.epoch != self.epoch:
            raise CorruptMessage(f"a frame from another writer arrived (epoch {header.epoch:x})")
        elif header.what == What.MESSAGE:
            pieces = messages_of(part) if payload is None else [(header, payload)]
            if any(each.epoch != self.epoch for each, _ in pieces):
                raise CorruptMessage("a frame has messages of another writer")
            for piece in pieces:
                self._take_piece(*piece)
        elif header.what == What.READY:
            self.is_ready = True
        elif header.what == What.ABSENT:
            self.absent = body
        elif header.what == What.AGAIN:
            self.acknowledge()
        elif header.what == What.LEFT:
            if header.sequence == self._greeting:  # else this reader has come back since
                self.has_left, self._greet_at, self._say_at = True, None, None
        elif header.what == What.END:
            self._hear_end(header)

    def _be_welcome(self, header: Header, welcome: Welcome) -> None:
        if self.epoch not in (0, header.epoch):
            raise CorruptMessage(f"another writer welcomed this reader (epoch {header.epoch:x})")
        if welcome.number != self._greeting:
            return  # answers a HELLO that was replaced
        place = (header.sequence, header.piece)
        if self.epoch == 0 and header.piece == 0:  # the writer decides where a new reader begins
            self.first = self.taken = self._acked = header.sequence
            self.wanted = place
        if place != self.wanted:
            raise CorruptMessage(f"the writer resumes at {place}, not at {self.wanted}")
        event = StreamEvent.WELCOME
        if welcome.ring is not None:
            has_ring = bool(welcome.ring.name)
            event = StreamEvent.WELCOME_TO_RING if has_ring else StreamEvent.WELCOME_AS_RELAY
        self.writer_pid, self.ring = welcome.pid, welcome.ring
        self.window, self.window_bytes = welcome.window, welcome.window_bytes
        self._ack_messages = max(1, welcome.window // 4)
        self._ack_bytes = max(1, min(welcome.window_bytes // 4, _MOST_UNACKED))
        self._ack_at = self._ack_at_bytes = 0
        self.epoch, self._greet_at = header.epoch, None
        self._header = whole_header(self.epoch, 0, 0, 0)
        self._turn(event)

    def _be_refused(self, refused: Refused, now: float) -> None:
        rank, pid = self._identity[1:3]
        match refused.code:
            case "no_relay" if self.is_behind:
                self._turn(StreamEvent.NO_RELAY)  # `follow` requests what it has not read there
                return
            case "no_relay":
                self._host, self.ring = "", None
                self.greet(now)
                return
            case "rank_taken":
                failure: MemlaneError = RankTaken(refused.text)
            case "place_taken":
                failure = PlaceTaken(refused.text)
            case "gone":
                failure = ReaderGivenUp(rank, pid, refused.text)
            case _:
                failure = InvalidArgument(refused.text)
        self._fail(failure)

    def _fail(self, failure: MemlaneError) -> None:
        self.connection.fail(failure)
        self._greet_at, self.has_left = None, True  # a refused reader owes no BYE

    def _hear_end(self, header: Header) -> None:
        if self.stream not in _STREAMS:
            return  # what was lost is sent again, followed by another END
        if (header.sequence, 0) != self.wanted:
            raise CorruptMessage(
                f"the writer ended at message {header.sequence}, but {self.wanted} was expected"
            )
        self._end = header.sequence
        if self.ring is None:
            self._confirm_end()

    def _take_piece(self, header: Header, payload: memoryview) -> None:
        place = (header.sequence, header.piece)
        if self.stream not in _STREAMS:
            return  # of an abandoned stream; all that is wanted is sent again
        if place < self.wanted:
            return  # the writer did not know whether it had been sent
        if place > self.wanted or header.piece >= header.pieces:
            raise CorruptMessage(f"frame {place} arrived, but {self.wanted} was expected")
        self._doubt_at = None
        message = self._put(header, payload)
        if message is None:
            self.wanted = (header.sequence, header.piece + 1)
        else:
            self._accept(message)

    def _put(self, header: Header, payload: memoryview) -> Message | None:
        if header.pieces == 1:
            if len(payload) != header.total:
                raise CorruptMessage(
                    f"message {header.sequence} has {len(payload)} bytes, not {header.total}"
                )
            return Message(header.sequence, header.kind, payload)
        if header.piece == 0:
            if header.total > header.pieces * PIECE:
                raise CorruptMessage(
                    f"message {header.sequence} cannot have {header.total} bytes in "
                    f"{header.pieces} pieces"
                )
            self._assembly = Assembly(header)
        if self._assembly is None:
            raise CorruptMessage(f"frame {header.piece} of a message that has not begun")
        return self._assembly.add(header, payload)

    # The writer's end ---------------------------------------------------------------------------

    @property
    def is_welcome(self) -> bool:
        """True if the latest HELLO was answered."""
        return self.stream in _WELCOME

    @property
    def is_behind(self) -> bool:
        """True if it reads from a relay's ring, or did until that relay ended."""
        return self.stream in (Stream.BEHIND, Stream.PARTED)

    def _turn(self, event: StreamEvent) -> None:
        self.stream = STREAM[event].get(self.stream, self.stream)
        self._is_streaming = self.stream in _STREAMS

    @property
    def was_welcome(self) -> bool:
        """True if the writer has let this reader in, whatever became of the connection since."""
        return self.epoch != 0

    @property
    def is_ended(self) -> bool:
        """True if everything has arrived that will ever be sent."""
        return self._end is not None

    def check_writer(self, now: float) -> None:
        """Raises if no more messages will arrive. A failure that was raised once stays, whatever
        arrives afterwards."""
        connection = self.connection
        if self.is_ended and connection.failure is None:
            self._confirm_end()
            rest = "" if self.inbox else ", and everything it sent has been read"
            raise WriterClosed(f"the writer closed the queue{rest}")
        if (why := connection.death(now)) is not None:
            connection.fail(WriterDied(self.writer_pid, f" at {self._where}: {why}"))
        if connection.failure is not None:
            raise connection.failure

    def is_over(self, now: float) -> bool:
        """Returns whether no reader can attach any more."""
        failure = self.connection.failure
        return self.is_ended or failure is not None or self.connection.death(now) is not None

    def facts(self, now: float) -> Facts:
        """Returns the facts by which blame of the writer is decided and worded."""
        return Facts(
            "the writer",
            "running" if self.connection.is_connected else "lost",
            self.writer_pid or None,
            address=self._where,
            doing=self.connection.state(now),
            silent_for=now - self.last_progress if self.writer_pid else None,
        )

    def who(self, now: float) -> str:
        """The writer as a waiting reader names it."""
        return sentence(self.facts(now))

    @property
    def count_absent(self) -> int:
        """The number of others that had not attached, as of the latest answer."""
        return 0 if self.absent is None else self.absent.beside + len(self.absent.places)
