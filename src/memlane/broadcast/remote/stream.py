"""The order of frames at a reader: nothing missing, nothing twice, nothing foreign."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memlane.broadcast.remote.message import Assembly, Message
from memlane.broadcast.remote.wire import HEADER_BYTES, MESSAGE, QUICK, Header
from memlane.errors import CorruptMessage

if TYPE_CHECKING:
    from collections import deque

    Place = tuple[int, int]
    """Sequence and piece."""


class Stream:
    """Puts the frames of one writer together.

    A stream begins where the writer's WELCOME says, and from there on each frame must be the next.
    After a connection was lost it may begin before what is wanted: what is known is left out.
    """

    def __init__(self) -> None:
        self.epoch = 0  # of the writer, once it is known
        self.wanted: Place = (0, 0)  # the frame that was not seen yet
        self.is_welcome = False
        self._expected: Place = (0, 0)  # the frame that comes next on this connection
        self._assembly: Assembly | None = None

    def begin(self, welcome: Header) -> None:
        place = (welcome.sequence, welcome.piece)
        if place > self.wanted:
            raise CorruptMessage(
                f"the writer goes on with message {place}, but {self.wanted} is wanted"
            )
        self.epoch = welcome.epoch
        self._expected = place
        self.is_welcome = True

    def take(self, header: Header, payload: memoryview, inbox: deque[Message]) -> None:
        """Puts the message that this frame makes whole into `inbox`; CorruptMessage, and no change,
        for a frame that is wrong."""
        place = (header.sequence, header.piece)
        if place != self._expected and not self.is_welcome:
            return  # of a stream that was given up; all that is wanted comes again
        if place != self._expected or header.piece >= header.pieces:
            raise CorruptMessage(
                f"frame {place} came where {self._expected} was due: "
                f"{'repeated' if place < self._expected else 'a gap'}; it was dropped"
            )
        is_known = place < self.wanted
        message = None if is_known else self._put(header, payload)
        is_last = header.piece + 1 == header.pieces
        self._expected = (
            (header.sequence + 1, 0) if is_last else (header.sequence, header.piece + 1)
        )
        if is_known:
            return
        # A signal handler may raise behind a call only: so all of the following happens, or none.
        self.wanted = self._expected
        if message is not None:
            self._assembly = None
            inbox.append(message)

    def take_whole(self, part: bytes, inbox: deque[Message]) -> bool:
        """What `take` would do with the next message if it is all in that part, as most are, but
        sooner; False for everything else, and no change."""
        if len(part) <= HEADER_BYTES:
            return False
        begin, kind, _, epoch, sequence, _, _, _, total = QUICK.unpack_from(part)
        if (
            begin != MESSAGE
            or epoch != self.epoch
            or len(part) != HEADER_BYTES + total
            or not self._expected == self.wanted == (sequence, 0)
        ):
            return False
        message = Message(sequence, kind, part[HEADER_BYTES:])
        self._expected = self.wanted = (sequence + 1, 0)  # as above
        inbox.append(message)
        return True

    def _put(self, header: Header, payload: memoryview) -> Message | None:
        if header.pieces == 1:
            if len(payload) != header.total:
                raise CorruptMessage(
                    f"message {header.sequence} has {len(payload)} bytes, not {header.total}"
                )
            return Message(header.sequence, header.kind, payload)
        if header.piece == 0:
            self._assembly = Assembly(header)
        if self._assembly is None:
            raise CorruptMessage(f"frame {header.piece} of a message that has not begun")
        return self._assembly.add(header, payload)

    def end(self, header: Header) -> bool:
        """Was that all? False while what was lost comes again, with another end behind it."""
        if (header.sequence, 0) != self._expected:
            if not self.is_welcome:
                return False
            raise CorruptMessage(
                f"the writer ends with message {header.sequence}, but {self._expected} was due"
            )
        return True

    def foreign(self, header: Header) -> CorruptMessage:
        return CorruptMessage(f"a frame of another writer came (epoch {header.epoch:x}); dropped")
