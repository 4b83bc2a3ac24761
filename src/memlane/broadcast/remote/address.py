"""Where a writer listens: an address that its readers can reach, a port of the kernel's choice.

And the sockets of both.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, cast

import zmq

from memlane.broadcast.remote.tcp import KEEP_ALIVE
from memlane.broadcast.remote.wire import MOST_CONTROL, PIECE
from memlane.errors import InvalidArgument, InvalidType, SystemFault

if TYPE_CHECKING:
    from memlane.broadcast.remote.places import Keys

_RECONNECT_MS = 50
_CONNECT_MS = 1000
_PROBE_SECONDS = 0.2
FIRST_CONTACT = 3.0
"""Seconds at least, however small the bound: a packet that was lost comes again after one."""


class Endpoint(NamedTuple):
    """Text for ZeroMQ, and what it says."""

    text: str
    host: str
    port: int
    is_ipv6: bool


def checked_host(connect_ip: object) -> str:
    """`connect_ip` if it is one address; None is this host's as its peers see it."""
    if connect_ip is None:
        return own_address()
    if not isinstance(connect_ip, str):
        raise InvalidType(f"connect_ip must be a string, not {type(connect_ip).__name__}")
    try:
        address = ipaddress.ip_address(connect_ip.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise InvalidArgument(f"connect_ip is no IP address: {connect_ip!r}") from None
    if address.is_unspecified or address.is_multicast:
        raise InvalidArgument(
            f"connect_ip {connect_ip} is no address that a reader could connect to; name one, and "
            f"to listen on all interfaces give listen_on_all=True besides"
        )
    return str(address)


def own_address() -> str:
    """The address that packets to other hosts leave from; the loopback's if none would.

    A UDP socket is connected, which asks the kernel for a route and sends nothing.
    """
    for family, anywhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((anywhere, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def is_deserted(endpoint: Endpoint) -> bool:
    """Whether its host refuses a connection, because nobody listens there any more."""
    family = socket.AF_INET6 if endpoint.is_ipv6 else socket.AF_INET
    with suppress(OSError), socket.socket(family) as probe:  # without descriptors nobody can tell
        probe.settimeout(_PROBE_SECONDS)
        return probe.connect_ex((endpoint.host, endpoint.port)) == errno.ECONNREFUSED
    return False


def listener(
    context: zmq.Context[zmq.Socket[bytes]], keys: Keys, bound: float
) -> zmq.Socket[bytes]:
    """The writer's socket, not yet bound; its readers speak within `bound` seconds, and briefly."""
    router = _made(
        context,
        zmq.ROUTER,
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.MAXMSGSIZE, MOST_CONTROL),
        (zmq.HANDSHAKE_IVL, int(bound * 1000)),
    )
    keys.guard(router)
    return router


def connecting(
    context: zmq.Context[zmq.Socket[bytes]], is_ipv6: bool, bound: float
) -> zmq.Socket[bytes]:
    """A reader's socket, not yet connected."""
    return _made(
        context,
        zmq.DEALER,
        (zmq.MAXMSGSIZE, PIECE + MOST_CONTROL),
        (zmq.HANDSHAKE_IVL, int(1000 * max(bound, FIRST_CONTACT))),
        (zmq.RECONNECT_IVL, _RECONNECT_MS),
        (zmq.CONNECT_TIMEOUT, _CONNECT_MS),
        (zmq.IPV6, int(is_ipv6)),
    )


def _made(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, *options: tuple[int, int]
) -> zmq.Socket[bytes]:
    """A socket without limits of its own, because the windows are the limit."""
    made = context.socket(kind)
    unlimited = ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0))
    for option, value in (*unlimited, *options, *KEEP_ALIVE):
        made.set(option, value)
    return made


def bind(listener: zmq.Socket[bytes], host: str, *, on_all: bool) -> Endpoint:
    """Binds to a port of the kernel's choice; the endpoint names `host` in any case."""
    is_ipv6 = ":" in host
    listener.set(zmq.IPV6, int(is_ipv6))
    where = ("[::]" if is_ipv6 else "0.0.0.0") if on_all else _bracketed(host)
    try:
        listener.bind(f"tcp://{where}:*")
    except zmq.ZMQError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL):
            raise InvalidArgument(
                f"this host has no address {host}; connect_ip must be one of its own"
            ) from None
        number = error.errno or errno.EIO
        raise SystemFault(number, f"cannot listen on {host}: {os.strerror(number)}") from None
    bound = cast("bytes", listener.get(zmq.LAST_ENDPOINT))
    port = int(bound.rpartition(b":")[2].rstrip(b"\0"))
    return Endpoint(f"tcp://{_bracketed(host)}:{port}", host, port, is_ipv6)


def endpoint_of(text: str) -> Endpoint:
    """What `tcp://host:port` says; InvalidArgument if it says nothing of the kind."""
    scheme, _, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        is_ipv6 = ipaddress.ip_address(bare).version == 6
        is_known = scheme == "tcp" and port.isdecimal() and 0 < int(port) < 1 << 16
    except ValueError:
        is_known = False
    if not is_known or _bracketed(bare) != host:
        raise InvalidArgument(f"the handle's address is not tcp://host:port, but {text!r}")
    return Endpoint(text, bare, int(port), is_ipv6)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
