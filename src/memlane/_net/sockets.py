"""ZeroMQ sockets over TCP for queues and groups: options, monitors and admission.

Nothing here depends on the content of messages. A libzmq socket may move between threads, but only
one may use it at a time. Its descriptor signals *changes*, so after each use of a socket its EVENTS
are read until nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from memlane._base.descriptors import occupy_standard_streams
from memlane._net.tcp import KEEP_ALIVE, Connection, Descriptors, Spare

AnySocket = zmq.Socket[bytes]

MOST_BYTES = 4 * 1024
"""Limit of a frame where peers may be unauthenticated: libzmq allocates what a frame announces."""
MAX_UNIDENTIFIED = 128
"""Limit of connections that have not identified themselves; two more per expected peer."""
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
# As numbers, and without what `zmq.Socket` adds: 1 us, not 7.
_get = cast("Callable[[Any, int], int]", zmq.backend.Socket.get)
_EVENTS_OPTION, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_numbers = count()  # a new address each: libzmq unbinds a monitor only some time after its socket


class Transport:
    """One socket with a monitor.

    Attributes:
        descriptors: of libzmq's TCP sockets, as far as the monitor has reported them.
        listening: those among them that listen.
        readable: the descriptor that signals incoming frames.
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
        """Sets no limits (libzmq's high-water marks) unless `options` has some."""
        self._is_closed = False
        occupy_standard_streams()  # again: they may have been closed since the context was made
        self.spare = Spare()
        self.descriptors = Descriptors(self.spare)
        self.listening: set[int] = set()
        self.socket = context.socket(kind)
        unlimited = ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0))
        for option, value in (*unlimited, *KEEP_ALIVE, *options):
            self.socket.set(option, value)
        # Unlimited, because a full monitor would block libzmq's thread, and with it all
        # connections.
        address = f"inproc://monitor-{next(_numbers)}"
        self.socket.monitor(address, events)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.set(zmq.RCVHWM, 0)
        self._monitor.connect(address)
        self.quiet = (signal_of(self._monitor),)
        self.readable = signal_of(self.socket)

    def events(self) -> Iterator[tuple[str, int]]:
        """Yields events of connections: a name in `_EVENTS`, or "", and libzmq's value."""
        while can_receive(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart())
            name, value = _EVENTS.get(event["event"], ""), event["value"]
            if name in ("listening", "accepted"):
                self.descriptors.note(value)
                if name == "listening":
                    self.listening.add(value)
            elif name == "lost":
                self.descriptors.forget(value)
            yield name, value

    def close(self, linger: int | None = None) -> None:
        """Disables the monitor first: libzmq would block on one that is gone. With `linger` (ms),
        closes the sockets too; otherwise their context closes them."""
        if not self._is_closed:
            self._is_closed = True
            self.spare.close()
            self.socket.disable_monitor()
            if linger is not None:
                self._monitor.close(0)
                self.socket.close(linger)
                self.descriptors.forget_all()


class Listening(Transport):
    """A ROUTER that admits only known keys, and few connections of unidentified peers.

    Args:
        secret: the CURVE key; if empty, every peer is admitted.
        place_of_key: returns the place that belongs to a key, or None to refuse it.
        expected: number of peers expected.
        handshake: limit of a handshake in seconds.

    Attributes:
        connections: of admitted peers that have identified themselves, by route.
    """

    _watched = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

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
        self._most = MAX_UNIDENTIFIED + 2 * expected
        self._port: int | None = None  # until it is bound
        self.connections: dict[bytes, Connection] = {}
        # Bound before the listener, which queries it for every connection.
        self._zap = context.socket(zmq.REP)
        self._zap.bind(_ZAP_ADDRESS)
        super().__init__(
            context,
            zmq.ROUTER,
            self._watched,
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
        """Binds, and returns the port, which the kernel chooses if `address` has port 0."""
        self.socket.set(zmq.IPV6, int(is_ipv6))
        self.socket.bind(address)
        self.reap_unidentified()  # records the listening socket: forked children close it
        bound = cast("bytes", self.socket.get(zmq.LAST_ENDPOINT))
        self._port = int(bound.rpartition(b":")[2].rstrip(b"\0"))
        return self._port

    def accept_authenticated(self) -> Iterator[int]:
        """Answers libzmq's authentication requests (ZAP, RFC 27); yields the places admitted."""
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

    def connection_of(self, part: zmq.Frame) -> Connection | None:
        """The connection on which `part` arrived; None if it has been closed since.

        Forked children close it from now on, before its peer learns that it is connected: the
        monitor's event may not have been read yet.
        """
        with suppress(OSError):
            connection = Connection(part.get(zmq.SRCFD), self.spare, self._port)
            self.descriptors.note(connection.descriptor)
            return connection
        return None

    def has_unidentified(self) -> bool:
        """Returns whether a peer is connected that has sent nothing yet."""
        return bool(self._unidentified())

    def _unidentified(self) -> list[int]:
        """Returns the descriptors of such connections, the oldest first."""
        known = {connection.descriptor for connection in self.connections.values()}
        known |= self.listening
        return [number for number in self.descriptors if number not in known]

    def reap_unidentified(self) -> list[bytes]:
        """Shuts down the oldest connections if too many have not identified themselves; libzmq
        limits the time of a handshake, but not their number. Returns the routes of connections
        that were lost."""
        for _ in self.events():
            pass
        if len(self.descriptors) > self._most:
            for number in self._unidentified()[: -self._most]:
                self.descriptors.shut(number)
        lost = [route for route, known in self.connections.items() if not known.is_open]
        for route in lost:
            del self.connections[route]
        return lost


class Connecting(Transport):
    """A DEALER connected to one peer.

    Args:
        server_key: that peer's CURVE key; if empty, CURVE is not used.
        public, secret: this end's own keys.
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


def can_receive(socket: Any) -> bool:
    """Returns whether a frame can be received. Asking also resets the signal of the socket's
    descriptor."""
    return bool(_get(socket, _EVENTS_OPTION) & _POLLIN)


def signal_of(socket: AnySocket) -> int:
    """The socket's descriptor; becomes readable once after there was nothing to receive."""
    return cast("int", socket.get(zmq.FD))
