"""What the kernel knows about a TCP connection, and which descriptors belong to it.

A connection is alive as long as the kernel of the other host answers, so no process needs to send
heartbeats. Both ends enable keep-alives (a probe a second while nothing else flows). The peer's
kernel answers them whether its process runs, computes or is stopped, and closes the connection if
the process is killed. Keep-alives and TCP_USER_TIMEOUT must not end a connection here: the latter
also ends one whose reader is stopped with its window full.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import zmq

from memlane._base.lifetime import undone_by
from memlane._native import close_in_children, keep_in_children

if TYPE_CHECKING:
    from collections.abc import Iterator

# A probe per second of silence; only 127 unanswered ones, the kernel's maximum, end a connection.
KEEP_ALIVE = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 1),
    (zmq.TCP_KEEPALIVE_INTVL, 1),
    (zmq.TCP_KEEPALIVE_CNT, 127),
)

# Fields of `struct tcp_info` (linux/tcp.h), by offset.
_INFO_BYTES = 232
_COUNTS = struct.Struct("2x2B")  # retransmits, probes: unanswered ones since the last answer
_RETRY = struct.Struct("8xI")  # retransmission timeout in us
_RECEIVED = struct.Struct("52x2I")  # ms since data, and since an acknowledgement, was received
_ACKED = struct.Struct("120xQ")  # bytes that the peer's kernel has acknowledged
_WINDOW = struct.Struct("228xI")  # the peer's receive window in bytes; kernels since 5.4

# Data and probes must be seen unanswered for this long before that counts. A single unanswered
# probe is normal: the kernel answers probes of a full window at most twice a second.
DOUBT_SECONDS = 0.5
_ENOUGH_PROBES = 2
_LOOKS = 8  # looks at tcp_info within the bound


def _inode_of(number: int) -> int:
    """The inode of a socket. OSError for any other file, because those may all have the same."""
    file = os.fstat(number)
    if not stat.S_ISSOCK(file.st_mode):
        raise OSError(errno.EBADF, "it was closed")
    return file.st_ino


class Connection:
    """One TCP connection of libzmq, by its descriptor, which libzmq owns.

    Args:
        port: its port here, if that is known.

    Raises OSError if libzmq has closed it, as far as that shows: the number may have been reused.
    """

    def __init__(self, descriptor: int, port: int | None = None) -> None:
        self.descriptor = descriptor
        self._inode = _inode_of(descriptor)
        with self.copy() as copy:
            is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
            if not is_tcp or port not in (None, copy.getsockname()[1]):
                raise OSError(errno.EBADF, "it was closed")
        self._doubted_since: float | None = None
        self._asked_at = 0.0
        self._acked = 0
        self.peer = self._peer()

    def copy(self) -> socket.socket:
        """Duplicates the descriptor; raises OSError if libzmq has closed it."""
        descriptor = os.dup(self.descriptor)
        with undone_by(lambda: os.close(descriptor)):
            if os.fstat(descriptor).st_ino != self._inode:  # the number has been reused
                raise OSError(errno.EBADF, "it was closed")
            return socket.socket(fileno=descriptor)

    def _peer(self) -> str:
        """`host:port` of the other end."""
        with suppress(OSError), self.copy() as copy:
            host, port = copy.getpeername()[:2]
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return "an unknown address"

    @property
    def is_open(self) -> bool:
        """Whether libzmq has not closed it; if it has, the number may have been reused."""
        try:
            return os.fstat(self.descriptor).st_ino == self._inode
        except OSError:
            return False

    def has_moved(self, least: int) -> bool:
        """Whether the peer has acknowledged `least` more bytes since this last returned True."""
        with suppress(OSError), self.copy() as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            (acked,) = _ACKED.unpack_from(info)
            if acked >= self._acked + least:
                self._acked = acked
                return True
        return False

    def is_silent(self, bound: float) -> bool:
        """Whether the other host owes an answer, and has sent none for `bound` seconds.

        Makes system calls at most once in `bound` / 8 seconds.
        """
        now = time.monotonic()
        if now - self._asked_at < bound / _LOOKS:
            return False
        self._asked_at = now
        try:
            with self.copy() as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:  # closed meanwhile; is_open reports that
            return False
        silence = min(_RECEIVED.unpack_from(info)) / 1000
        if silence < bound / 2 or not _is_unanswered(info, silence):
            self._doubted_since = None
            return False
        if self._doubted_since is None:
            self._doubted_since = now
        return silence >= bound and now - self._doubted_since >= min(DOUBT_SECONDS, bound / 2)


def _is_unanswered(info: bytes, silence: float) -> bool:
    """Whether something was sent that the other kernel should have answered by now.

    Probes of a full window are sent at growing intervals, so there only a silence that outlasts
    the current interval counts.
    """
    retransmits, probes = _COUNTS.unpack_from(info)
    is_full = len(info) >= _INFO_BYTES and _WINDOW.unpack_from(info)[0] == 0
    if is_full and retransmits > 0:
        return bool(silence > 1.25 * _RETRY.unpack_from(info)[0] / 1e6)
    return bool(retransmits > 0 or probes >= _ENOUGH_PROBES)


class Descriptors:
    """Descriptors of libzmq's TCP sockets, oldest first, with inodes that show if one was reused.
    A forked child closes its copies, which would keep a dead parent's connections open, and sends
    nothing on them."""

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._inodes)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._inodes))

    def note(self, number: int) -> None:
        """Does nothing if it is known: a peer cannot make its connection younger."""
        if self._is_same(number):
            return
        self.forget(number)
        with suppress(OSError):  # closed already
            _inode_of(number)
            self._inodes[number] = close_in_children(number)

    def forget(self, number: int) -> None:
        if number in self._inodes:
            keep_in_children(number, self._inodes.pop(number))

    def forget_all(self) -> None:
        """Call it once libzmq has closed them."""
        for number in self:
            self.forget(number)

    def _is_same(self, number: int) -> bool:
        try:
            return os.fstat(number).st_ino == self._inodes.get(number)
        except OSError:
            return False

    def shut(self, number: int) -> None:
        """Shuts the connection down, so that libzmq sees its end."""
        if self._is_same(number):
            with suppress(OSError):
                found = socket.socket(fileno=number)
                try:
                    found.shutdown(socket.SHUT_RDWR)
                finally:
                    found.detach()
        self.forget(number)
