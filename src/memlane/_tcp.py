"""What the kernel knows of a TCP connection, and which descriptors belong to it.

A connection lives as long as the kernel of the other host answers. That needs no heartbeat of
anybody: both ends have keep-alives on (a probe a second while nothing else flows), which the peer's
kernel answers whether its process runs, computes or is stopped; a process that is killed has its
connection closed by its kernel. Neither keep-alives nor TCP_USER_TIMEOUT may end a connection here:
the latter also ends one whose reader is stopped with its window full.
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

from memlane._native import close_in_children, keep_in_children
from memlane._undo import undone_by

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of libzmq's sockets: a probe after a second of silence, and never an end because of them.
KEEP_ALIVE = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 1),
    (zmq.TCP_KEEPALIVE_INTVL, 1),
    (zmq.TCP_KEEPALIVE_CNT, 127),
)

# Of `struct tcp_info` (linux/tcp.h), by offset.
_INFO_BYTES = 232
_COUNTS = struct.Struct("2x2B")  # retransmits, probes: not answered, of the latest question
_RETRY = struct.Struct("8xI")  # us until the next retransmission
_RECEIVED = struct.Struct("52x2I")  # ms since data came, since anything was acknowledged
_ACKED = struct.Struct("120xQ")  # bytes that the peer's kernel has taken
_WINDOW = struct.Struct("228xI")  # bytes that the peer would take; kernels since 5.4

# A question counts as unanswered once it was seen so for this long; and one probe may well be,
# because the kernel answers probes of a full window twice a second at most.
DOUBT_SECONDS = 0.5
_ENOUGH_PROBES = 2
_LOOKS = 8  # within the bound


def _inode_of(number: int) -> int:
    """Of a socket. Other files, one of which the number may be by now, may have one for all."""
    file = os.fstat(number)
    if not stat.S_ISSOCK(file.st_mode):
        raise OSError(errno.EBADF, "it was closed")
    return file.st_ino


class Connection:
    """One TCP connection of libzmq, by its descriptor, which stays libzmq's.

    Raises OSError if libzmq has closed it, as far as can be told: the number may be another file's.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._inode = _inode_of(descriptor)
        self._doubted_since: float | None = None
        self._asked_at = 0.0
        self._acked = 0
        self.peer = self._peer()

    def copy(self) -> socket.socket:
        """Another descriptor of it; OSError if it was closed."""
        descriptor = os.dup(self.descriptor)
        with undone_by(lambda: os.close(descriptor)):
            if os.fstat(descriptor).st_ino != self._inode:  # the number is another file's by now
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
        """libzmq may have closed it; the number may be another file's by now."""
        try:
            return os.fstat(self.descriptor).st_ino == self._inode
        except OSError:
            return False

    def has_moved(self, least: int) -> bool:
        """Has the other host taken so many bytes since it had when this was true?"""
        with suppress(OSError), self.copy() as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            (acked,) = _ACKED.unpack_from(info)
            if acked >= self._acked + least:
                self._acked = acked
                return True
        return False

    def is_silent(self, bound: float) -> bool:
        """The other host has not answered for `bound` seconds, though it was asked.

        Costs system calls now and then, and nothing if it was called a moment ago.
        """
        now = time.monotonic()
        if now - self._asked_at < bound / _LOOKS:
            return False
        self._asked_at = now
        try:
            with self.copy() as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:  # closed meanwhile, which is_open tells
            return False
        silence = min(_RECEIVED.unpack_from(info)) / 1000
        if silence < bound / 2 or not _is_unanswered(info, silence):
            self._doubted_since = None
            return False
        if self._doubted_since is None:
            self._doubted_since = now
        return silence >= bound and now - self._doubted_since >= min(DOUBT_SECONDS, bound / 2)


def _is_unanswered(info: bytes, silence: float) -> bool:
    """Was something sent that the other kernel should have answered by now?

    Questions to a reader whose window is full come ever more rarely: there silence alone says
    nothing, only silence beyond the time of the next one.
    """
    retransmits, probes = _COUNTS.unpack_from(info)
    is_full = len(info) >= _INFO_BYTES and _WINDOW.unpack_from(info)[0] == 0
    if is_full and retransmits > 0:
        return bool(silence > 1.25 * _RETRY.unpack_from(info)[0] / 1e6)
    return bool(retransmits > 0 or probes >= _ENOUGH_PROBES)


class Descriptors:
    """Numbers of TCP sockets of libzmq's, the oldest first, with what tells them from other files
    that may have the same numbers later. A forked child closes its copies, which would keep the
    connections of a dead parent open; nothing is said on them."""

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._inodes)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._inodes))

    def note(self, number: int) -> None:
        self.forget(number)
        with suppress(OSError):  # closed again already
            _inode_of(number)
            self._inodes[number] = close_in_children(number)

    def forget(self, number: int) -> None:
        if number in self._inodes:
            keep_in_children(number, self._inodes.pop(number))

    def forget_all(self) -> None:
        """libzmq has closed them."""
        for number in self:
            self.forget(number)

    def _is_same(self, number: int) -> bool:
        try:
            return os.fstat(number).st_ino == self._inodes.get(number)
        except OSError:
            return False

    def shut(self, number: int) -> None:
        """libzmq then sees the end of that connection."""
        if self._is_same(number):
            with suppress(OSError):
                found = socket.socket(fileno=number)
                try:
                    found.shutdown(socket.SHUT_RDWR)
                finally:
                    found.detach()
        self.forget(number)
