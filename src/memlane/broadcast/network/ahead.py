"""The messages that a reader takes and decodes before they are asked for.

A message is here from the moment at which the session counts it as taken until it is returned, so
that what a signal handler interrupts is continued by the next call.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from memlane._base.deadline import NEVER, Deadline
from memlane._base.diagnosis import no_memory
from memlane._base.handlers import raised_by_handler
from memlane._native import fork_generation
from memlane.broadcast.protocol.message import decode
from memlane.broadcast.protocol.reader_session import SMALL_KINDS, ReaderSession
from memlane.errors import InvalidType

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from memlane._base.serialization import Codec
    from memlane.broadcast.network.driver import NetworkEnd
    from memlane.broadcast.protocol.message import Message


class Ahead:
    """Returns one reader's messages; those that are decoded already without a lock.

    Args:
        end: the reader's.
        codec: decodes the messages.
        refill: decodes the next messages, within a call; waits for one if there is none.
    """

    def __init__(
        self,
        end: NetworkEnd,
        session: ReaderSession,
        codec: Codec,
        refill: Callable[[Deadline, threading.Event | None], None],
    ) -> None:
        self._end, self._session, self._codec, self._refill = end, session, codec, refill
        self._kept: list[Message] = []  # taken, and not decoded yet
        self._decoded: list[Any] = []  # for this call and the next ones
        self._at = self._count = 0  # those that were not returned
        self._sizes: list[int] = []
        self._is_shown = False  # the descriptor knows that the next one is returned

    def receive(
        self, timeout: float | None, cancel: threading.Event | None, _lends: bool = False
    ) -> Any:
        return self.receive_by(NEVER if timeout is None else Deadline(timeout), cancel)

    def receive_by(self, deadline: Deadline, cancel: threading.Event | None) -> Any:
        """Is `receive` for a call that may have begun on another end."""
        if cancel is not None and not hasattr(cancel, "is_set"):
            raise InvalidType("cancel must be a threading.Event or None")
        end = self._end
        try:
            while True:
                if end.generation == fork_generation() and not end.is_closing:
                    # No call from here on: neither another thread nor a handler comes between.
                    at, decoded = self._at, self._decoded
                    if at < self._count and (end.shown is None or self._is_shown):
                        value, decoded[at] = decoded[at], None
                        self._at, self._is_shown = at + 1, False
                        return value
                self._refill(deadline, cancel)
        except BaseException:
            self._is_shown = False  # nobody returns it
            if end.shown is not None and self._at < self._count:
                end.wake_thread()  # to show that
            raise

    def note_shown(self) -> None:
        """The descriptor shows what comes after the next message, which is returned now."""
        self._is_shown = True

    @property
    def is_empty(self) -> bool:
        """True if nothing is decoded; messages may be kept."""
        return self._at == self._count

    @property
    def keeps_any(self) -> bool:
        return bool(self._kept)

    def has_more(self, returns: int) -> bool:
        """Returns whether there is a message beside the `returns` that a call is about to return.
        Within a call, one that is kept is being decoded, unless that was interrupted."""
        is_kept = bool(self._kept) and (returns > 0 or self._end.guard.thread == 0)
        return is_kept or self._count - self._at > max(returns, self._is_shown)

    def unread(self, *, settles: bool) -> list[int]:
        """Sizes of the messages that count as taken and were not returned; with the lock held.
        `settles`: those that are kept count as taken from now on."""
        if settles:
            self._take_kept()
        taken = self._session.taken
        kept = [len(message.memory) for message in self._kept if message.sequence < taken]
        return kept + self._sizes[self._at :]

    def keep(self, message: Message) -> None:
        """Keeps a message that is about to be taken: a signal handler may raise at any call."""
        self._kept = [message]

    def _take_kept(self) -> None:
        """With the lock held. What a signal handler interrupts can be called again."""
        if self._kept:
            self._session.take_before(self._kept[-1].sequence + 1, time.monotonic())

    def decode_kept(self) -> None:
        """Decodes the message that is kept and, unless somebody watches the descriptor, the small
        ones that have come behind it; so many that no acknowledgement is due before the last of
        them is returned."""
        with self._end.lock:
            self._take_kept()  # a handler may have raised while they were taken
            if self._end.shown is None and len(self._kept) == 1:
                self._kept = [*self._kept, *self._session.takeable()]
                self._take_kept()
        kept = self._kept
        try:
            values = [decode(kept[0], self._codec)]
        except MemoryError as error:
            raise no_memory() from error
        except Exception as error:
            if self._is_broken(kept[0], error):  # so it counts as read
                self._kept = kept[1:]
            raise
        raised = None
        for message in kept[1:]:
            try:
                values.append(decode(message, self._codec))
            except MemoryError:
                break
            except Exception as error:  # a broken one's is raised by the call that takes it
                raised = None if self._is_broken(message, error) else error
                break
        count = len(values)
        rest, sizes = kept[count:], [len(message.memory) for message in kept[:count]]
        # Together, with no call in between: a signal handler may raise after a call.
        self._decoded, self._at, self._count = values, 0, count
        self._sizes, self._kept = sizes, rest
        if raised is not None:
            raise raised

    def _is_broken(self, message: Message, error: Exception) -> bool:
        """Returns whether the message is at fault, and not a signal handler that raised while it
        was decoded. Others than small ones may run the application's code, so they count as broken.
        """
        if raised_by_handler(error.__traceback__):
            return False
        if message.kind not in SMALL_KINDS:
            return True
        try:
            decode(message, self._codec)
        except MemoryError:
            return False
        except Exception:
            return True
        return False
