"""Asks the kernel about TCP connections, and which descriptors belong to it.

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
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import zmq

from memlane._native import close_in_children, fork_generation, keep_in_children

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
_UNACKED = struct.Struct("24xI")  # segments that it has not
_ACKED = struct.Struct("120xQ")  # bytes that the peer's kernel has acknowledged
_ARRIVED = struct.Struct("128xQ")  # bytes received here
_UNSENT = struct.Struct("144xI")  # bytes that this kernel has yet to send
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


class Spare:
    """A descriptor kept in reserve, to look at libzmq's connections and to shut them down.

    A number of libzmq's may be another file's by the time of a call. So the call is made on the
    spare, once it refers to the same file and that is the expected one. It needs no free
    descriptor: a process without any must still know which of its peers live.
    """

    def __init__(self) -> None:
        try:
            self._socket = socket.socket(socket.AF_INET6)  # has room for every address
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT:
                raise
            self._socket = socket.socket()
        self._idle = socket.socket(socket.AF_UNIX)
        number = self._socket.fileno()
        os.dup2(self._idle.fileno(), number, inheritable=False)
        # Also in the middle of a look, where a fork would keep the connection open in the child.
        inode = close_in_children(number, always=True)
        made_in = fork_generation()

        def release(spare: socket.socket, idle: socket.socket) -> None:
            keep_in_children(number, inode)
            if fork_generation() == made_in:
                spare.close()
            else:  # in a child, where that number may be another file's by now
                spare.detach()
            idle.close()

        self.close = weakref.finalize(self, release, self._socket, self._idle)

    @contextmanager
    def of(self, descriptor: int, inode: int) -> Iterator[socket.socket]:
        """Opens the socket for the block. OSError if libzmq has closed it."""
        number = self._socket.fileno()
        try:
            os.dup2(descriptor, number, inheritable=False)
            if os.fstat(number).st_ino != inode:
                raise OSError(errno.EBADF, "it was closed")
            yield self._socket
        finally:  # or the connection would stay open as long as this refers to it
            os.dup2(self._idle.fileno(), number, inheritable=False)


class Connection:
    """One TCP connection of libzmq, by its descriptor, which libzmq owns.

    Args:
        spare: to look at it.
        port: its port here, if that is known.

    Raises OSError if libzmq has closed it, as far as that shows: the number may have been reused.
    """

    def __init__(self, descriptor: int, spare: Spare, port: int | None = None) -> None:
        self.descriptor, self._spare = descriptor, spare
        self._inode = _inode_of(descriptor)
        with spare.of(descriptor, self._inode) as it:
            family = it.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
            is_tcp = family in (socket.AF_INET, socket.AF_INET6)
            if not is_tcp or port not in (None, it.getsockname()[1]):
                raise OSError(errno.EBADF, "it was closed")
            self.peer = "an unknown address"
            with suppress(OSError):  # it has ended, but libzmq has not closed it yet
                host, peer_port = it.getpeername()[:2]
                self.peer = f"[{host}]:{peer_port}" if ":" in host else f"{host}:{peer_port}"
        self._doubted_since: float | None = None
        self._asked_at = 0.0
        self._acked = 0

    def _info(self) -> bytes | None:
        """`struct tcp_info`; None if libzmq has closed it."""
        try:
            with self._spare.of(self.descriptor, self._inode) as it:
                return it.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError as error:
            if error.errno is None:  # a signal handler's, such as a plain TimeoutError
                raise
            return None

    @property
    def is_open(self) -> bool:
        """True if libzmq has not closed it; if it has, the number may have been reused."""
        try:
            return os.fstat(self.descriptor).st_ino == self._inode
        except OSError:
            return False

    def moved(self, least: int) -> int:
        """Returns how many bytes the peer has acknowledged since this was last not 0; 0 if they are
        fewer than `least`."""
        info = self._info()
        if info is None:
            return 0
        (acked,) = _ACKED.unpack_from(info)
        more = int(acked) - self._acked
        if more < least:
            return 0
        self._acked = int(acked)
        return more

    def shut(self) -> None:
        """Shuts it down, so that libzmq sees its end."""
        with suppress(OSError), self._spare.of(self.descriptor, self._inode) as it:
            it.shutdown(socket.SHUT_RDWR)

    def is_drained(self) -> bool:
        """Returns whether the other host has received all that libzmq has sent."""
        info = self._info()
        return info is not None and not (
            _UNACKED.unpack_from(info)[0] or _UNSENT.unpack_from(info)[0]
        )

    def is_silent(self, bound: float) -> bool:
        """Returns whether the other host owes an answer, and has sent none for `bound` seconds.

        Makes system calls at most once in `bound` / 8 seconds.
        """
        now = time.monotonic()
        if now - self._asked_at < bound / _LOOKS:
            return False
        self._asked_at = now
        info = self._info()
        if info is None:  # closed meanwhile; is_open reports that
            return False
        silence = min(_RECEIVED.unpack_from(info)) / 1000
        if silence < bound / 2 or not _is_unanswered(info, silence):
            self._doubted_since = None
            return False
        if self._doubted_since is None:
            self._doubted_since = now
        return silence >= bound and now - self._doubted_since >= min(DOUBT_SECONDS, bound / 2)


def _is_unanswered(info: bytes, silence: float) -> bool:
    """Returns whether something was sent that the other kernel should have answered by now.

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

    def __init__(self, spare: Spare) -> None:
        self._spare = spare
        self._inodes: dict[int, int] = {}
        self._arrived: dict[int, int] = {}  # bytes, when a frame of it had last been read

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
        self._arrived.pop(number, None)
        if number in self._inodes:
            keep_in_children(number, self._inodes.pop(number))

    def forget_all(self) -> None:
        """Call it once libzmq has closed them."""
        for number in self:
            self.forget(number)

    def has_flooded(self, number: int, most: int, *, is_heard: bool) -> bool:
        """Returns whether more than `most` bytes have arrived on that connection since a frame of
        it was last read; `is_heard`: one was, since the last look."""
        with suppress(OSError, KeyError), self._spare.of(number, self._inodes[number]) as it:
            info = it.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            (arrived,) = _ARRIVED.unpack_from(info)
            if is_heard:
                self._arrived[number] = arrived
            return bool(arrived - self._arrived.get(number, 0) > most)
        return False

    def _is_same(self, number: int) -> bool:
        try:
            return os.fstat(number).st_ino == self._inodes.get(number)
        except OSError:
            return False

    def shut(self, number: int) -> None:
        """Shuts the connection down, so that libzmq sees its end."""
        with suppress(OSError, KeyError), self._spare.of(number, self._inodes[number]) as it:
            it.shutdown(socket.SHUT_RDWR)
        self.forget(number)
