"""ZeroMQ's sockets over TCP, as queues and groups use them: options, monitors, and who is let in.

Nothing here knows what is said. A socket of libzmq may change threads, but only one may use it at a
time. Its descriptor signals *changes*, so after each use of a socket its EVENTS are read until
nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from memlane._tcp import KEEP_ALIVE, Connection, Descriptors

AnySocket = zmq.Socket[bytes]

MOST_BYTES = 4 * 1024
"""Of a frame of somebody who may be a stranger: libzmq allocates what a frame announces."""
MOST_AT_DOOR = 128
"""Connections that may wait before they say anything, and two more for each that is expected."""
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"memlane"

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
_numbers = count()  # libzmq unbinds a monitor some time after its socket was closed
_WATCHED_BY_LISTENER = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class Transport:
    """One socket with a monitor.

    Attributes:
        descriptors: of libzmq's TCP sockets, as far as the monitor has told.
        news: the descriptor that signals frames.
        quiet: the descriptors that signal everything else.
    """

    quiet: tuple[int, ...]

    def __init__(
        self,
        context: zmq.Context[AnySocket],
        kind: int,
        events: int,
        options: tuple[tuple[int, int], ...],
    ) -> None:
        """Without limits of its own, unless `options` has some."""
        self._is_closed = False
        self.descriptors = Descriptors()
        self.socket = context.socket(kind)
        unlimited = ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0))
        for option, value in (*unlimited, *KEEP_ALIVE, *options):
            self.socket.set(option, value)
        # If the monitor were full, libzmq's thread would wait for its reader, and all connections
        # with it.
        address = f"inproc://monitor-{next(_numbers)}"
        self.socket.monitor(address, events)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.set(zmq.RCVHWM, 0)
        self._monitor.connect(address)
        self.quiet = (signal_of(self._monitor),)
        self.news = signal_of(self.socket)

    def events(self) -> Iterator[tuple[str, int]]:
        """What became of connections: a name in `_EVENTS`, and libzmq's value."""
        while can_receive(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart())
            name, value = _EVENTS.get(event["event"], ""), event["value"]
            if name in ("listening", "accepted"):
                self.descriptors.note(value)
            elif name == "lost":
                self.descriptors.forget(value)
            yield name, value

    def close(self, linger: int | None = None) -> None:
        """The monitor first: what libzmq says into one that is gone blocks it. With `linger` (ms)
        the sockets as well, which otherwise go with their context."""
        if not self._is_closed:
            self._is_closed = True
            self.socket.disable_monitor()
            if linger is not None:
                self._monitor.close(0)
                self.socket.close(linger)
                self.descriptors.forget_all()


class Listening(Transport):
    """A ROUTER to which only known keys get through, and at whose door few may wait.

    Args:
        secret: the CURVE key; empty: everybody gets through.
        place_of_key: of who may; None: nobody's.
        expected: how many may.
        handshake: seconds.

    Attributes:
        connections: of those that were let in and have said who they are, by route.
    """

    def __init__(
        self,
        context: zmq.Context[AnySocket],
        secret: bytes,
        place_of_key: Callable[[bytes], int | None],
        expected: int,
        handshake: float,
        *options: tuple[int, int],
    ) -> None:
        self._place_of_key = place_of_key
        self._most = MOST_AT_DOOR + 2 * expected
        self.connections: dict[bytes, Connection] = {}
        # Before the listener is bound, which asks it for every connection.
        self._zap = context.socket(zmq.REP)
        self._zap.bind(_ZAP_ADDRESS)
        super().__init__(
            context,
            zmq.ROUTER,
            _WATCHED_BY_LISTENER,
            (
                (zmq.ROUTER_MANDATORY, 1),
                (zmq.MAXMSGSIZE, MOST_BYTES),
                (zmq.HANDSHAKE_IVL, int(handshake * 1000)),
                *options,
            ),
        )
        if secret:
            self.socket.set(zmq.CURVE_SERVER, 1)
            self.socket.set(zmq.CURVE_SECRETKEY, secret)
            self.socket.set(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
            self.socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.quiet = (signal_of(self._zap), *self.quiet)

    def bind(self, address: str, *, is_ipv6: bool) -> int:
        """The port, of the kernel's choice if that is 0."""
        self.socket.set(zmq.IPV6, int(is_ipv6))
        self.socket.bind(address)
        self.look_at_door()  # so that a child that is forked at once closes what listens, too
        bound = cast("bytes", self.socket.get(zmq.LAST_ENDPOINT))
        return int(bound.rpartition(b":")[2].rstrip(b"\0"))

    def let_in(self) -> Iterator[int]:
        """Answers libzmq (ZAP, RFC 27) which keys are accepted; yields their places."""
        while can_receive(self._zap):
            version, request, _domain, _address, _identity, mechanism, *credentials = (
                self._zap.recv_multipart()
            )
            place = None
            if mechanism == b"CURVE" and len(credentials) == 1:
                place = self._place_of_key(credentials[0])
            if place is None:
                self._zap.send_multipart([version, request, b"400", b"not expected", b"", b""])
            else:
                user = str(place).encode()
                self._zap.send_multipart([version, request, b"200", b"OK", user, b""])
                yield place

    def look_at_door(self) -> list[bytes]:
        """Ends the oldest connections if too many have not said who they are. libzmq ends those
        whose handshake takes too long, but does not count them. Returns the routes that were
        lost."""
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


class Connecting(Transport):
    """A DEALER of one peer.

    Args:
        server_key: of that peer, and
        public, secret: the own ones; empty: no CURVE.
    """

    def __init__(
        self,
        context: zmq.Context[AnySocket],
        events: int,
        server_key: bytes,
        public: bytes,
        secret: bytes,
        *options: tuple[int, int],
    ) -> None:
        super().__init__(context, zmq.DEALER, events, options)
        if server_key:
            self.socket.set(zmq.CURVE_SERVERKEY, server_key)
            self.socket.set(zmq.CURVE_PUBLICKEY, public)
            self.socket.set(zmq.CURVE_SECRETKEY, secret)


WATCHED_BY_DEALER = sum(_EVENTS) & ~zmq.EVENT_ACCEPTED


def connection_of(part: zmq.Frame) -> Connection | None:
    """By which that came; None if it has ended since."""
    with suppress(OSError):
        return Connection(part.get(zmq.SRCFD))
    return None


def can_receive(socket: Any) -> bool:
    """Is there a frame? Asking also takes back the signal of the socket's descriptor."""
    return bool(socket.get(zmq.EVENTS) & zmq.POLLIN)


def signal_of(socket: AnySocket) -> int:
    """The descriptor that tells of news: readable once after nothing was there to receive."""
    return cast("int", socket.get(zmq.FD))
