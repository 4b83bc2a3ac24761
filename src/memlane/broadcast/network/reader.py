"""A reader on another host than its writer."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memlane._base.deadline import deadline_of
from memlane._base.serialization import codec_of
from memlane.broadcast.remote.message import decode
from memlane.broadcast.remote.reader import RemoteReader
from memlane.broadcast.statistics import QueueStatistics, ReaderStatistics
from memlane.errors import WrongRole

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import zmq

    from memlane.broadcast.handle import Handle


class NetworkReader(RemoteReader):
    """A `RemoteReader` that decodes, as `MessageQueue` uses it."""

    segment = geometry = None
    position = 0

    def __init__(self, handle: Handle, *args: Any) -> None:
        self._codec = codec_of(handle.serializer)
        super().__init__(handle, *args)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self.transport.socket

    def receive(
        self,
        timeout: float | None,
        cancel: threading.Event | None,
        _lends: bool = False,
        deadline: float | None = None,
    ) -> Any:
        """`deadline`: when a call of `timeout` seconds that began on another end times out."""
        if deadline is None and timeout is not None:
            deadline = deadline_of(timeout)
        with self.turn:
            return decode(self.take(timeout, cancel, deadline), self._codec)

    @contextmanager
    def view(
        self, _owner: object, timeout: float | None, cancel: threading.Event | None
    ) -> Iterator[Any]:
        """Messages from the network are private memory, so there is no lease to end."""
        yield self.receive(timeout, cancel)

    def block(
        self, _owner: object, _timeout: float | None, _cancel: threading.Event | None
    ) -> AbstractContextManager[memoryview]:
        raise WrongRole(
            "Only local readers can acquire_read: a remote reader has no chunks; use dequeue"
        )

    def statistics(self) -> QueueStatistics:
        """Lists this reader only: it knows nothing of the others."""
        self.check()
        taken = self.session
        own = ReaderStatistics(
            self.rank, os.getpid(), "running", 0, taken.last_progress, False, 0, None
        )
        return QueueStatistics(
            "reader",
            self.rank,
            os.getpid(),
            taken.taken,
            taken.bytes,
            self.waits,
            0,
            (own,),
        )
