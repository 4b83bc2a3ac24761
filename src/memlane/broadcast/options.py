"""The network of a queue: its writer's options, and the address that a handle has of it.

Both are checked when they are made, also where there is no network: nothing here opens a socket.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from memlane._base.arguments import MAX_SEGMENT_BYTES, integer_from
from memlane._importing import fork_waits
from memlane.errors import InvalidArgument, InvalidType

if TYPE_CHECKING:
    from memlane._base.serialization import Codec

LEAST_LIVENESS, MOST_LIVENESS = 0.5, 86_400.0


@dataclass(frozen=True)
class RemoteOptions:
    """Checked; `MessageQueue` documents them."""

    connect_ip: str | None
    port: int | str | None
    listen_on_all: bool
    window: int
    window_bytes: int
    liveness: float
    insecure: bool
    serializer: str
    relay: bool
    late_readers: bool

    def __post_init__(self) -> None:
        if self.connect_ip is not None and not isinstance(self.connect_ip, str):
            raise InvalidType(f"connect_ip must be a string, not {type(self.connect_ip).__name__}")
        _ports_in("port", self.port)
        integer_from("remote_window", self.window, 1, MAX_SEGMENT_BYTES)
        integer_from("remote_window_bytes", self.window_bytes, 1, MAX_SEGMENT_BYTES)
        checked_liveness(self.liveness)
        for name, value in (
            ("listen_on_all", self.listen_on_all),
            ("insecure_network", self.insecure),
            ("relay", self.relay),
            ("late_readers", self.late_readers),
        ):
            if not isinstance(value, bool):
                raise InvalidType(f"{name} must be True or False, not {value!r}")
        check_security(self.insecure, self.serializer)

    @property
    def ports(self) -> Sequence[int | str]:
        """To listen on, the first that is free; "*": the system chooses one. Raises
        InvalidArgument for a `MEMLANE_PORTS` that names none."""
        if self.port is not None:
            return _ports_in("port", self.port)
        return _ports_in("MEMLANE_PORTS", os.environ.get("MEMLANE_PORTS") or None)


def _ports_in(source: str, port: object) -> Sequence[int | str]:
    if port is None:
        return "*"
    if isinstance(port, bool) or not isinstance(port, (int, str)):
        raise InvalidType(f"{source} must be a number, a text or None, not {port!r}")
    if isinstance(port, int):
        ports = range(port, port + 1)
    else:
        first, dash, last = port[:12].partition("-")
        bounds = [first, last] if dash else [first]
        is_range = all(bound.isdecimal() for bound in bounds)
        ports = range(int(bounds[0]), int(bounds[-1]) + 1) if is_range else range(0)
    if ports and ports[0] > 0 and ports[-1] < 1 << 16:
        return ports
    text = f"{port:#x}" if isinstance(port, int) and abs(port) >> 64 else repr(port)
    raise InvalidArgument(f'{source} must be a port, or a range as "29500-29599", not {text}')


class Endpoint(NamedTuple):
    """An address as text for ZeroMQ, and its parts."""

    text: str
    host: str
    port: int
    is_ipv6: bool


@dataclass(frozen=True)
class NetworkAddress:
    """The address of a writer for readers on other hosts. Raises unless a queue could have made it.

    Attributes:
        queue_id: in hexadecimal.
        codec: for the messages.
        local_ranks: ranks of readers on the writer's host, which are not among the others.
        places: number of readers on other hosts.
        liveness: seconds after which an unreachable peer counts as dead.
        server_key: the writer's public key; empty if the network is plaintext.
        secrets: of all places, or of one.
        label: what people call the queue.
    """

    endpoint: Endpoint
    queue_id: str
    codec: Codec
    local_ranks: tuple[int, ...]
    places: int
    liveness: float
    server_key: str = field(repr=False)
    secrets: list[str] = field(repr=False)
    label: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.server_key, str):
            raise InvalidType("the handle's remote_server_key must be text")
        checked_liveness(self.liveness)
        places = integer_from("n_remote_reader", self.places, 1)
        if not isinstance(self.secrets, list) or len(self.secrets) > places:
            raise InvalidArgument(f"the handle must have at most {places} keys of remote readers")
        if self.server_key and not all(map(_is_key, (self.server_key, *self.secrets))):
            raise InvalidArgument("a key in the handle is not a CURVE key")
        if not all(isinstance(secret, str) and len(secret) <= 64 for secret in self.secrets):
            raise InvalidArgument("a key in the handle was not made by memlane")


def endpoint_of(text: object) -> Endpoint:
    """Parses `tcp://host:port`; InvalidArgument for anything else."""
    with fork_waits:
        import ipaddress  # only handles with a network need it

    if not isinstance(text, str):
        raise InvalidType("the handle's address must be text")
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


def _is_key(text: object) -> bool:
    """Returns whether it is a CURVE key, as text."""
    if not isinstance(text, str) or len(text) != 40:
        return False
    with fork_waits:
        from zmq.utils import z85

    try:
        return len(z85.decode(text.encode("ascii"))) == 32
    except (ValueError, KeyError, UnicodeError):
        return False


def checked_liveness(seconds: object) -> float:
    """Keep-alives are sent once a second, so a shorter bound could not be kept."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise InvalidType(f"remote_liveness must be a number of seconds, not {seconds!r}")
    if not LEAST_LIVENESS <= seconds <= MOST_LIVENESS:
        raise InvalidArgument(
            f"remote_liveness must be {LEAST_LIVENESS} to {MOST_LIVENESS:.0f} s, not {seconds}"
        )
    return float(seconds)


def check_security(insecure: bool, serializer: str) -> None:
    """Decoding unauthenticated messages must not execute code."""
    if insecure and serializer != "msgpack":
        raise InvalidArgument(
            f'insecure_network=True needs serializer="msgpack", not {serializer!r}: otherwise '
            f"anyone on the network could make readers execute code"
        )
