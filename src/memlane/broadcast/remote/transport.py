"""Everything of ZeroMQ: sockets, CURVE and ZAP, the monitor turned into events, the door, and what
is half sent when a signal handler raises. It knows nothing of the protocol but where a hello is.

Sockets of libzmq may change threads, but be used by one at a time, which is the driver's business.
libzmq's descriptors signal *changes*, so after each use of a socket its EVENTS are read until
nothing is left.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import zmq
from zmq.backend import Socket as _Plain
from zmq.utils.monitor import parse_monitor_message

from memlane.broadcast.remote.endpoint import Endpoint, bracketed
from memlane.broadcast.remote.frames import MOST_CONTROL, PIECE, What
from memlane.broadcast.remote.tcp import KEEP_ALIVE, Connection, Descriptors
from memlane.errors import InvalidArgument, SystemFault

if TYPE_CHECKING:
    from memlane.broadcast.remote.keys import Keys
    from memlane.broadcast.remote.options import RemoteOptions
    from memlane.broadcast.remote.outbox import Piece

    AnySocket = zmq.Socket[bytes]

_MORE = int(zmq.SNDMORE | zmq.DONTWAIT)
_NOW = int(zmq.DONTWAIT)
# What `zmq.Socket` adds to these (tracking, serializing) costs as much as they do.
_send: Callable[..., Any] = _Plain.send
receive: Callable[..., Any] = _Plain.recv

FIRST_CONTACT = 3.0
"""Seconds at least, however small the bound: a packet that was lost comes again after one."""
_RECONNECT_MS = 50
_CONNECT_MS = 1000
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"memlane"
MOST_AT_DOOR = 128
"""Connections that may wait before they say hello, and two more for each expected reader."""
_MOST_AT_ONCE = 1000  # frames that are read before somebody else gets the lock

_EVENTS: dict[int, str] = {
    zmq.EVENT_LISTENING: "listening",
    zmq.EVENT_ACCEPTED: "accepted",
    zmq.EVENT_CONNECTED: "accepted",
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "connected",
    zmq.EVENT_DISCONNECTED: "lost",
    zmq.EVENT_CONNECT_RETRIED: "retried",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "failed",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused",
}
_WATCHED_BY_WRITER = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class Transport:
    """One socket, in a context of its own, with a monitor.

    Attributes:
        descriptors: of libzmq's TCP sockets, as far as the monitor has told.
    """

    def __init__(self, context: zmq.Context[AnySocket]) -> None:
        self.context = context
        self.socket: AnySocket
        self._monitor: AnySocket | None = None
        self._is_closed = False
        self.descriptors = Descriptors()

    def _made(self, kind: int, *options: tuple[int, int]) -> AnySocket:
        """A socket without limits of its own, because the windows are the limit."""
        made = self.context.socket(kind)
        unlimited = ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0))
        for option, value in (*unlimited, *options, *KEEP_ALIVE):
            made.set(option, value)
        return made

    def _watch(self, events: int) -> int:
        """Without a limit of the monitor's own: if it were full, libzmq's thread would wait for
        its reader, and all connections with it. Returns its descriptor."""
        self.socket.monitor("inproc://monitor", events)
        self._monitor = self.context.socket(zmq.PAIR)
        self._monitor.set(zmq.RCVHWM, 0)
        self._monitor.connect("inproc://monitor")
        return signal_of(self._monitor)

    def events(self) -> Iterator[tuple[str, int]]:
        """What became of connections: a name in `_EVENTS`, and libzmq's value."""
        while self._monitor is not None and _can_receive(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart())
            name, value = _EVENTS.get(event["event"], ""), event["value"]
            if name in ("listening", "accepted"):
                self.descriptors.note(value)
            elif name == "lost":
                self.descriptors.forget(value)
            yield name, value

    def close(self) -> None:
        """Before any socket is closed: what libzmq says into a monitor that is gone blocks it."""
        if self._monitor is not None and not self._is_closed:
            self._is_closed = True
            self.socket.disable_monitor()


class Listening(Transport):
    """The writer's: ROUTER, whose readers speak within `bound` seconds, and briefly."""

    def __init__(
        self,
        context: zmq.Context[AnySocket],
        keys: Keys,
        places: int,
        host: str,
        options: RemoteOptions,
    ) -> None:
        super().__init__(context)
        self._keys = keys
        self._most = MOST_AT_DOOR + 2 * places
        self.connections: dict[bytes, Connection] = {}  # of attached readers, by route
        # Before the listener is bound, which asks it for every connection.
        self._zap = self.context.socket(zmq.REP)
        self._zap.bind(_ZAP_ADDRESS)
        self.socket = self._made(
            zmq.ROUTER,
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, MOST_CONTROL),
            (zmq.HANDSHAKE_IVL, int(options.liveness * 1000)),
        )
        if not keys.insecure:
            self.socket.set(zmq.CURVE_SERVER, 1)
            self.socket.set(zmq.CURVE_SECRETKEY, keys.server_secret)
            self.socket.set(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
            self.socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.quiet = signal_of(self._zap), self._watch(_WATCHED_BY_WRITER)
        self.endpoint = self._bind(host, on_all=options.listen_on_all)
        self.news = signal_of(self.socket)
        self.look_at_door()  # so that a child that is forked at once closes what listens, too

    def _bind(self, host: str, *, on_all: bool) -> Endpoint:
        """To a port of the kernel's choice; the endpoint names `host` in any case."""
        is_ipv6 = ":" in host
        self.socket.set(zmq.IPV6, int(is_ipv6))
        where = ("[::]" if is_ipv6 else "0.0.0.0") if on_all else bracketed(host)
        try:
            self.socket.bind(f"tcp://{where}:*")
        except zmq.ZMQError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL):
                raise InvalidArgument(
                    f"this host has no address {host}; connect_ip must be one of its own"
                ) from None
            number = error.errno or errno.EIO
            raise SystemFault(number, f"cannot listen on {host}: {os.strerror(number)}") from None
        bound = cast("bytes", self.socket.get(zmq.LAST_ENDPOINT))
        port = int(bound.rpartition(b":")[2].rstrip(b"\0"))
        return Endpoint(f"tcp://{bracketed(host)}:{port}", host, port, is_ipv6)

    # Admission --------------------------------------------------------------------------------

    def let_in(self) -> Iterator[int]:
        """Answers libzmq (ZAP, RFC 27) which keys are accepted; yields their places."""
        while _can_receive(self._zap):
            version, request, _domain, _address, _identity, mechanism, *credentials = (
                self._zap.recv_multipart()
            )
            place = None
            if mechanism == b"CURVE" and len(credentials) == 1:
                place = self._keys.place_of_key(credentials[0])
            if place is None:
                self._zap.send_multipart([version, request, b"400", b"not expected", b"", b""])
            else:
                user = str(place).encode()
                self._zap.send_multipart([version, request, b"200", b"OK", user, b""])
                yield place

    def look_at_door(self) -> list[bytes]:
        """Ends the oldest connections if too many have not said hello. libzmq ends those whose
        handshake takes too long, but does not count them. Returns the routes that were lost."""
        for _ in self.events():
            pass
        if len(self.descriptors) > self._most:
            known = {connection.descriptor for connection in self.connections.values()}
            strange = [number for number in self.descriptors if number not in known][1:]
            for number in strange[: -self._most]:  # the first one listens
                self.descriptors.shut(number)
        lost = [route for route, known in self.connections.items() if not known.is_open]
        for route in lost:
            del self.connections[route]
        return lost

    # Frames -----------------------------------------------------------------------------------

    def hear(self) -> Iterator[tuple[bytes, bytes, int | None, Connection | None]]:
        """Route and frame of what readers have said; of a hello also the place that was proven, and
        the connection."""
        for _ in range(_MOST_AT_ONCE):
            try:
                route = receive(self.socket, _NOW)
            except zmq.Again:
                return
            parts = self.socket.recv_multipart(copy=False)
            frame = parts[0].bytes
            place = connection = None
            if frame[4:5] == _HELLO:
                with suppress(OSError):  # gone again already
                    connection = Connection(parts[0].get(zmq.SRCFD))
                if not self._keys.insecure:
                    place = int(parts[0].get("User-Id"))  # as `let_in` has said
            yield route, frame if len(parts) == 1 else b"", place, connection

    def send(self, route: bytes, piece: Piece) -> bool:
        """False if its connection is gone."""
        head, payload = piece
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

    def send_whole(self, route: bytes, frame: bytes) -> bool:
        """The same for one part, sooner."""
        try:
            _send(self.socket, route, _MORE)
            _send(self.socket, frame, _NOW)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def repair(self) -> None:
        """What is half sent is given up, which an empty part tells; what is half heard is lost."""
        while self.socket.get(zmq.RCVMORE):
            receive(self.socket, _NOW)
        _send(self.socket, b"", _NOW)  # nothing, if nothing was half sent


class Connecting(Transport):
    """A reader's: DEALER."""

    def __init__(
        self,
        context: zmq.Context[AnySocket],
        endpoint: Endpoint,
        server_key: str,
        secret: str,
        bound: float,
    ) -> None:
        super().__init__(context)
        self._endpoint = endpoint
        self.has_hung_up = False
        self.socket = self._made(
            zmq.DEALER,
            (zmq.MAXMSGSIZE, PIECE + MOST_CONTROL),
            (zmq.HANDSHAKE_IVL, int(1000 * max(bound, FIRST_CONTACT))),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.CONNECT_TIMEOUT, _CONNECT_MS),
            (zmq.IPV6, int(endpoint.is_ipv6)),
        )
        if server_key:
            self.socket.set(zmq.CURVE_SERVERKEY, server_key.encode())
            self.socket.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret.encode()))
            self.socket.set(zmq.CURVE_SECRETKEY, secret.encode())
        self.quiet = (self._watch(sum(_EVENTS) & ~zmq.EVENT_ACCEPTED),)
        self.news = signal_of(self.socket)

    def connect(self) -> None:
        self.socket.connect(self._endpoint.text)

    def hang_up(self) -> None:
        """Ends the connection for good."""
        if not self.has_hung_up:
            self.has_hung_up = True
            self.socket.disconnect(self._endpoint.text)

    def next_part(self) -> bytes | None:
        """The first part of the next frame; None: there is none."""
        try:
            part: bytes = receive(self.socket, _NOW)
        except zmq.Again:
            return None
        return part

    def rest(self) -> memoryview | None:
        """What follows in the same frame, the last part of it."""
        payload = None
        while self.socket.get(zmq.RCVMORE):
            payload = receive(self.socket, _NOW, False).buffer
        return payload

    def send(self, frame: bytes) -> bool:
        """False without a connection."""
        try:
            _send(self.socket, frame, _NOW)
        except zmq.Again:
            return False
        return True


_HELLO = bytes((What.HELLO,))


def _can_receive(socket: AnySocket) -> bool:
    """Is there a frame? Asking also takes back the signal of the socket's descriptor."""
    return bool(cast("int", socket.get(zmq.EVENTS)) & zmq.POLLIN)


def signal_of(socket: AnySocket) -> int:
    """The descriptor that tells of news: readable once after nothing was there to receive."""
    return cast("int", socket.get(zmq.FD))
