"""What the kernel says of addresses: which are this host's, and whether anybody listens there."""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from memlane.errors import InvalidArgument

if TYPE_CHECKING:
    from memlane.broadcast.addresses import Endpoint

_PROBE_SECONDS = 0.2


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
