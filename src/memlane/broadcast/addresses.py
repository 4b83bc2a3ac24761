"""What a handle says of its queue's network: addresses and keys as text, parsed and checked.

Opens nothing, and imports no sockets: handles pass through processes that have no network.
"""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from memlane._base.arguments import integer_from
from memlane._importing import fork_waits
from memlane.broadcast.options import checked_liveness
from memlane.errors import InvalidArgument, InvalidType


class Endpoint(NamedTuple):
    """An address as text for ZeroMQ, and its parts."""

    text: str
    host: str
    port: int
    is_ipv6: bool


def check_network(
    address: object,
    places: object,
    liveness: object,
    server_key: object,
    keys: object,
    serializer: str,
) -> None:
    """Raises unless a queue with remote readers could have put these values into its handle."""
    if not isinstance(address, str) or not isinstance(server_key, str):
        raise InvalidType("the handle's address and key must be text")
    endpoint_of(address)
    checked_liveness(liveness)
    if not server_key and serializer != "msgpack":
        raise InvalidArgument(
            "the handle has no remote_server_key, as only a queue with insecure_network=True and "
            f'serializer="msgpack" does without, and its serializer is {serializer!r}; send the '
            "whole handle, as pickle or to_json() give it"
        )
    _check_keys(server_key, keys, integer_from("n_remote_reader", places, 1))


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


def _check_keys(server_key: str, keys: object, places: int) -> None:
    """Raises unless a handle could carry these keys."""
    if not isinstance(keys, list) or len(keys) > places:
        raise InvalidArgument(f"the handle must have at most {places} keys of remote readers")
    if server_key and not all(_is_key(key) for key in (server_key, *keys)):
        raise InvalidArgument("a key in the handle is not a CURVE key")
    if not all(isinstance(key, str) and len(key) <= 64 for key in keys):
        raise InvalidArgument("a key in the handle was not made by memlane")


def _is_key(text: object) -> bool:
    """Is it a CURVE key, as text?"""
    if not isinstance(text, str) or len(text) != 40:
        return False
    with fork_waits:
        from zmq.utils import z85

    try:
        return len(z85.decode(text.encode("ascii"))) == 32
    except (ValueError, KeyError, UnicodeError):
        return False
