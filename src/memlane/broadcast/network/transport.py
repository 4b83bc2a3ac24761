"""The ZeroMQ code that only queues need: sending and receiving frames, and recovering from frames
that a signal handler left half sent. All it knows of the protocol is how to recognise a HELLO.

The code shared with groups, and the rules of libzmq's sockets, are in `memlane/_net/sockets.py`.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import zmq
from zmq.backend import Socket as _Plain
from zmq.utils.garbage import gc as collector

from memlane._base.diagnosis import warn
from memlane._locks import Lock
from memlane._net import sockets
from memlane._net.addresses import own_address
from memlane._net.sockets import WATCHED_BY_DEALER
from memlane.broadcast.options import Endpoint, bracketed
from memlane.broadcast.protocol.connection_state import FIRST_CONTACT
from memlane.broadcast.protocol.frames import MOST_CONTROL, PIECE, What
from memlane.errors import InvalidArgument, SystemFault

if TYPE_CHECKING:
    from memlane._net.tcp import Connection
    from memlane.broadcast.network.keys import Keys
    from memlane.broadcast.options import RemoteOptions

    AnySocket = zmq.Socket[bytes]

_MORE = int(zmq.SNDMORE | zmq.DONTWAIT)
_NOW = int(zmq.DONTWAIT)
# What `zmq.Socket` adds to these (tracking, serializing) costs as much as they do.
_send: Callable[..., Any] = _Plain.send
receive: Callable[..., Any] = _Plain.recv

_RECONNECT_MS = 50
_CONNECT_MS = 1000
_LOOK = 0.04  # seconds, in which a connection can send some 30 MB that libzmq keeps
_MOST_AT_ONCE = 256  # frames read before another thread gets the lock
MAX_PARTS = 8
"""Parts of a frame that a reader sends; honest ones have one."""
MAX_UNREAD_FRAMES = 64
"""Frames of one connection that wait to be read; libzmq reads no more of it until then."""
MAX_UNFRAMED = 1 << 20
"""Bytes that a connection may send before a frame is complete: libzmq bounds the bytes of a part
and the number of frames, but not the number of a frame's parts."""
_HELLO = bytes((What.HELLO,))
_PROBE_SECONDS = 0.2


class Listening(sockets.Listening):
    """The writer's socket. Readers must prove their keys within the liveness bound."""

    def __init__(
        self,
        context: zmq.Context[AnySocket],
        keys: Keys,
        places: int,
        host: str,
        options: RemoteOptions,
    ) -> None:
        self._is_insecure = keys.insecure
        self._heard: set[int] = set()  # descriptors that a frame has come from since the last look
        self._unknown: dict[bytes, Connection] = {}  # of the latest frames
        self.has_more = False  # frames to read
        self._arrivals = select.epoll()  # tells once that bytes have come, whole frame or not
        self.arrivals = self._arrivals.fileno()
        self._look_at: float | None = None
        self._looked_at = 0.0
        super().__init__(
            context,
            keys.server_secret,
            keys.ticket_of_key,
            places,
            options.liveness,
            (zmq.RCVHWM, MAX_UNREAD_FRAMES),
        )
        is_ipv6 = ":" in host
        where = bracketed(host)
        if options.listen_on_all:
            where = "[::]" if is_ipv6 else "0.0.0.0"
        ports = options.ports
        try:
            port = self._bind_first(where, ports, is_ipv6=is_ipv6)
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE and ports != "*":
                which = f"port {ports[0]}" + (f" to {ports[-1]}" if len(ports) > 1 else "")
                raise SystemFault(
                    error.errno, f"cannot listen on {host}: {which} is in use"
                ) from None
            if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL):
                raise InvalidArgument(
                    f"this host has no address {host}; connect_ip must be one of its own"
                ) from None
            number = error.errno or errno.EIO
            raise SystemFault(number, f"cannot listen on {host}: {os.strerror(number)}") from None
        self.endpoint = Endpoint(f"tcp://{bracketed(host)}:{port}", host, port, is_ipv6)

    def _bind_first(self, where: str, ports: Sequence[int | str], *, is_ipv6: bool) -> int:
        """Binds to the first of the ports that is free. Raises ZMQError."""
        for port in ports[:-1]:
            try:
                return self.bind(f"tcp://{where}:{port}", is_ipv6=is_ipv6)
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        return self.bind(f"tcp://{where}:{ports[-1]}", is_ipv6=is_ipv6)

    def hear(self) -> Iterator[tuple[bytes, bytes, int | None, Connection | None]]:
        """Yields the route, content and proven place of received frames; for a HELLO, and for
        a peer that is not known, also the connection. `has_more` if there were too many."""
        self._unknown.clear()
        self.has_more = True
        for _ in range(_MOST_AT_ONCE):
            try:
                route = receive(self.socket, _NOW)
            except zmq.Again:
                self.has_more = False
                return
            parts = self.socket.recv_multipart(copy=False)
            frame = parts[0].bytes
            place, connection = None, None
            known = self.connections.get(route)
            if known is None or frame[4:5] == _HELLO:
                connection = self.connection_of(parts[0])
                if connection is not None:
                    if known is None and not connection.is_drained():
                        connection.shut()  # it does not read what it is answered
                    known = self._unknown[route] = connection
            if not self._is_insecure:
                place = int(parts[0].get("User-Id"))  # set by `accept_authenticated`
            if known is not None:
                self._heard.add(known.descriptor)
            if len(parts) > MAX_PARTS:
                self.shut(route)
            yield route, frame if len(parts) == 1 else b"", place, connection

    def shut(self, route: bytes) -> None:
        """Ends that connection, and frees what libzmq has kept for it."""
        found = self.connections.get(route) or self._unknown.get(route)
        if found is not None:
            found.shut()

    def events(self) -> Iterator[tuple[str, int]]:
        for name, value in super().events():
            if name == "accepted":
                with suppress(OSError):  # libzmq has closed it
                    self._arrivals.register(value, select.EPOLLIN | select.EPOLLET)
            yield name, value

    def close(self, linger: int | None = None) -> None:
        super().close(linger)
        self._arrivals.close()

    def shut_flooding(self, now: float) -> float | None:
        """Ends connections that send more than any reader does without completing a frame. Looks
        when something has come, but not again for `_LOOK` seconds; returns when, and until then
        nobody need wait for `arrivals`."""
        if self._arrivals.poll(0) and self._look_at is None:
            self._look_at = max(now, self._looked_at + _LOOK)
        if self._look_at is None or now < self._look_at:
            return self._look_at
        self._look_at, self._looked_at = None, now
        heard, self._heard = self._heard, set()
        for number in list(self.descriptors)[1:]:  # the first one listens
            if self.descriptors.has_flooded(number, MAX_UNFRAMED, is_heard=number in heard):
                self.descriptors.shut(number)
        return None

    def send(self, route: bytes, head: bytes, payload: memoryview | None = None) -> bool:
        """One frame of one or two parts; False if its connection is gone."""
        try:
            _send(self.socket, route, _MORE)
            if payload is None:
                _send(self.socket, head, _NOW)
            else:
                _send(self.socket, head, _MORE)
                _send(self.socket, payload, _NOW, False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def repair(self) -> None:
        """Ends a half-sent frame with an empty part, which voids it; drops a half-received one."""
        while self.socket.get(zmq.RCVMORE):
            receive(self.socket, _NOW)
        _send(self.socket, b"", _NOW)  # nothing, if nothing was half sent


class Connecting(sockets.Connecting):
    """A reader's socket."""

    def __init__(
        self,
        context: zmq.Context[AnySocket],
        endpoint: Endpoint,
        server_key: str,
        secret: str,
        bound: float,
    ) -> None:
        self._endpoint = endpoint
        self.has_hung_up = False
        key = secret.encode()
        super().__init__(
            context,
            WATCHED_BY_DEALER,
            server_key.encode(),
            zmq.curve_public(key) if server_key else b"",
            key,
            (zmq.MAXMSGSIZE, PIECE + MOST_CONTROL),
            (zmq.HANDSHAKE_IVL, int(1000 * max(bound, FIRST_CONTACT))),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.CONNECT_TIMEOUT, _CONNECT_MS),
            (zmq.IPV6, int(endpoint.is_ipv6)),
        )

    def connect(self) -> None:
        self.socket.connect(self._endpoint.text)

    def hang_up(self) -> None:
        """Ends the connection for good."""
        if not self.has_hung_up:
            self.has_hung_up = True
            self.socket.disconnect(self._endpoint.text)

    def next_part(self) -> bytes | None:
        """The first part of the next frame; None: there is none. Not as a `zmq.Frame`: what a
        signal handler raises while that is freed is lost."""
        try:
            part: bytes = receive(self.socket, _NOW)
        except zmq.Again:
            return None
        return part

    def rest(self) -> memoryview | None:
        """The last of the remaining parts of the same frame; None: there are none."""
        payload = None
        while self.socket.get(zmq.RCVMORE):
            payload = receive(self.socket, _NOW, False).buffer
        return payload

    def send(self, frame: bytes) -> bool:
        """Sends one frame; returns False without a connection."""
        try:
            _send(self.socket, frame, _NOW)
        except zmq.Again:
            return False
        return True


# Lending ------------------------------------------------------------------------------------------

# libzmq sends memory that it was lent without a copy. pyzmq keeps lent memory until libzmq is done
# with it, by one thread and one context per process. The first writer starts both, so that no
# signal handler can raise while a send starts them. The last one stops them, unless they ran before
# the first: then other code uses them.
_lending = Lock()  # a signal handler may close another writer meanwhile
_writers = 0
_is_foreign = False
_MOST_SECONDS = 1.0


def begin_lending() -> None:
    """Registers a writer that sends without copying."""
    global _writers, _is_foreign
    with _lending:
        if _writers == 0:
            _is_foreign = collector.is_alive()
            zmq.Frame(b"first", copy=False)
            if sys.version_info < (3, 13):
                # pyzmq asks before each message, and starts another collector if it has ended. In
                # these versions a thread counts as ended once a signal handler has raised in
                # `is_alive` (bpo-46726), which acquires this lock; only asking has no such gap.
                thread: Any = collector.thread
                thread.is_alive = thread._tstate_lock.locked
        _writers += 1


def end_lending() -> None:
    """Unregisters a writer. Its context must be gone, and nothing of it in flight."""
    global _writers
    with _lending:
        _writers -= 1
        if _writers or _is_foreign or not collector.is_alive():
            return
        # Returned memory is collected in order: once this frame is, all of ours is.
        last = zmq.Frame(b"last", copy=False, track=True)
        tracker = last.tracker
        del last
        with suppress(zmq.NotDone):
            tracker.wait(_MOST_SECONDS)
        if not collector.refs:
            collector.stop()


def _forget_parent() -> None:
    global _lending, _writers
    _lending, _writers = Lock(), 0


os.register_at_fork(after_in_child=_forget_parent)


# What the kernel knows about addresses ------------------------------------------------------------


def checked_host(connect_ip: str | None) -> str:
    """`connect_ip`, checked; for None, the address by which peers see this host."""
    if connect_ip is None:
        if (own := own_address()) is not None:
            return own
        warn(
            "this host has no default route, so its queue listens on 127.0.0.1, which no other "
            "host can reach; pass connect_ip, the address by which the readers reach this host"
        )
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(connect_ip.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise InvalidArgument(f"connect_ip is not an IP address: {connect_ip!r}") from None
    if address.is_unspecified or address.is_multicast:
        raise InvalidArgument(
            f"readers cannot connect to connect_ip {connect_ip}; give an address of this host, and "
            f"add listen_on_all=True to listen on all interfaces"
        )
    return str(address)


def is_deserted(endpoint: Endpoint) -> bool:
    """Returns whether its host refuses a connection, because nobody listens there any more."""
    family = socket.AF_INET6 if endpoint.is_ipv6 else socket.AF_INET
    with suppress(OSError), socket.socket(family) as probe:  # False if out of descriptors
        probe.settimeout(_PROBE_SECONDS)
        return probe.connect_ex((endpoint.host, endpoint.port)) == errno.ECONNREFUSED
    return False
