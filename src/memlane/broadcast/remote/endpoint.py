"""Where a writer listens: an address that its readers can reach, a port of the kernel's choice."""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import suppress
from typing import NamedTuple

from memlane.errors import InvalidArgument

_PROBE_SECONDS = 0.2


class Endpoint(NamedTuple):
    """An address as text for ZeroMQ, and its parts."""

    text: str
    host: str
    port: int
    is_ipv6: bool


def checked_host(connect_ip: str | None) -> str:
    """`connect_ip`, checked; for None, the address by which peers see this host."""
    if connect_ip is None:
        return own_address()
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


def own_address() -> str:
    """The source address of packets to other hosts; the loopback address if there is no route.

    Connecting a UDP socket asks the kernel for a route and sends nothing.
    """
    for family, anywhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((anywhere, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def is_deserted(endpoint: Endpoint) -> bool:
    """Whether its host refuses a connection, because nobody listens there any more."""
    family = socket.AF_INET6 if endpoint.is_ipv6 else socket.AF_INET
    with suppress(OSError), socket.socket(family) as probe:  # False if out of descriptors
        probe.settimeout(_PROBE_SECONDS)
        return probe.connect_ex((endpoint.host, endpoint.port)) == errno.ECONNREFUSED
    return False


def endpoint_of(text: str) -> Endpoint:
    """Parses `tcp://host:port`; InvalidArgument for anything else."""
    scheme, _, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        is_ipv6 = ipaddress.ip_address(bare).version == 6
        is_known = scheme == "tcp" and port.isdecimal() and 0 < int(port) < 1 << 16
    except ValueError:
        is_known = False
    if not is_known or bracketed(bare) != host:
        raise InvalidArgument(f"the handle's address is not tcp://host:port, but {text!r}")
    return Endpoint(text, bare, int(port), is_ipv6)


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
