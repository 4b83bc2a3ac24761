"""Resolves names of hosts, and finds the address by which other hosts reach this one. Connections
that are opened here only ask the kernel; nothing is sent over them."""

from __future__ import annotations

import errno
import ipaddress
import select
import socket
import time
from contextlib import ExitStack, suppress
from typing import NamedTuple

from memlane.errors import InvalidArgument, SystemFault


class Address(NamedTuple):
    """An IP address as text; a link-local one of IPv6 has its scope."""

    host: str
    is_ipv6: bool

    def at(self, port: int) -> str:
        """Returns the address of a port in ZeroMQ's form."""
        return f"tcp://[{self.host}]:{port}" if self.is_ipv6 else f"tcp://{self.host}:{port}"

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback


def addresses_of(host: str) -> list[Address]:
    """Returns the addresses of a host in the order in which the resolver prefers them.

    Raises:
        SystemFault: the name is not known.
        InvalidArgument: it cannot be one.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        what = f"cannot resolve the group's host {host!r}: {error}"
        raise SystemFault(error.errno, what) from None
    except UnicodeError:
        raise InvalidArgument(f"{host!r} cannot be the name of a host") from None
    return list(dict.fromkeys(_address(family, at) for family, _, _, _, at in found))


def _address(family: int, at: tuple[object, ...]) -> Address:
    host, scope = str(at[0]), at[3] if family == socket.AF_INET6 else 0
    if isinstance(scope, int) and scope and "%" not in host:
        host = f"{host}%{socket.if_indextoname(scope)}"
    return Address(host, family == socket.AF_INET6)


def answering(addresses: list[Address], port: int, seconds: float) -> tuple[Address, bool | None]:
    """Returns the address that is the first to accept a connection within `seconds`, and True. If
    none does, returns one whose host refuses it, because nobody listens there, and False; if none
    is refused, the first, and None."""
    end = time.monotonic() + seconds
    with ExitStack() as probing:
        poller, asked = select.poll(), dict[int, tuple[socket.socket, Address]]()
        refused: list[Address] = []
        for address in addresses:
            family = socket.AF_INET6 if address.is_ipv6 else socket.AF_INET
            with suppress(OSError):  # no IPv6 here, no descriptor, no such scope
                probe = probing.enter_context(socket.socket(family))
                probe.setblocking(False)
                place = socket.getaddrinfo(address.host, port, type=socket.SOCK_STREAM)[0][4]
                outcome = probe.connect_ex(place)
                if outcome == errno.ECONNREFUSED:
                    refused.append(address)
                if outcome in (0, errno.EINPROGRESS):
                    asked[probe.fileno()] = probe, address
                    poller.register(probe, select.POLLOUT)
        while asked and (left := end - time.monotonic()) > 0:
            for number, _ in poller.poll(int(left * 1000) + 1):
                probe, address = asked.pop(number)
                poller.unregister(number)
                outcome = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if outcome == 0:
                    return address, True
                if outcome == errno.ECONNREFUSED:
                    refused.append(address)
    return (refused or addresses)[0], False if refused else None


def own_address(towards: str | None = None) -> str | None:
    """Returns the source address of packets to the host `towards`; if that is a loopback or
    link-local one, or None, of packets to anywhere. None: there is no route.

    Connecting a UDP socket asks the kernel for a route and sends nothing.
    """
    loopback = None
    if towards is not None:
        with suppress(OSError, UnicodeError):
            for family, _, _, _, at in socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM):
                source = _source(family, at)
                if source is not None and not (source.is_loopback or source.is_link_local):
                    return str(source)
                if source is not None and source.is_loopback:
                    loopback = loopback or str(source)
    for family, anywhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        if (source := _source(family, (anywhere, 9))) is not None:
            return str(source)
    return loopback


def _source(
    family: int, at: tuple[object, ...]
) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(at)
        return ipaddress.ip_address(probe.getsockname()[0])
    return None
