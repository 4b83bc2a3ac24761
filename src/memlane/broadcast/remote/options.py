"""What a writer may say about its readers on other hosts, and a handle of their network."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from memlane._checks import MAX_SEGMENT_BYTES, integer_from
from memlane._contexts import need_curve
from memlane.broadcast.remote.endpoint import endpoint_of
from memlane.broadcast.remote.keys import check_keys
from memlane.errors import InvalidArgument, InvalidType

LEAST_LIVENESS = 0.5


@dataclass(frozen=True)
class RemoteOptions:
    """Checked; `MessageQueue` documents them."""

    connect_ip: str | None
    listen_on_all: bool
    window: int
    window_bytes: int
    liveness: float
    insecure: bool
    serializer: str
    relay: bool

    def __post_init__(self) -> None:
        integer_from("remote_window", self.window, 1)
        if integer_from("remote_window_bytes", self.window_bytes, 1) > MAX_SEGMENT_BYTES:
            raise InvalidArgument(f"a remote_window_bytes of {self.window_bytes} cannot be")
        checked_liveness(self.liveness)
        for name, value in (
            ("listen_on_all", self.listen_on_all),
            ("insecure_network", self.insecure),
            ("relay", self.relay),
        ):
            if not isinstance(value, bool):
                raise InvalidType(f"{name} must be True or False, not {value!r}")
        check_security(self.insecure, self.serializer)


def checked_liveness(seconds: object) -> float:
    """Keep-alives go out once a second, so shorter bounds would be no bounds."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise InvalidType(f"remote_liveness must be a number of seconds, not {seconds!r}")
    if not isfinite(seconds) or seconds < LEAST_LIVENESS:
        raise InvalidArgument(f"remote_liveness must be at least {LEAST_LIVENESS}, not {seconds}")
    return float(seconds)


def check_security(insecure: bool, serializer: str) -> None:
    """What arrives without proof of its origin must not be able to execute anything."""
    if insecure and serializer != "msgpack":
        raise InvalidArgument(
            f'insecure_network=True needs serializer="msgpack", not {serializer!r}: whoever '
            f"reaches the network could have readers execute what he wants"
        )
    if not insecure:
        need_curve()


def check_network(
    address: object,
    places: object,
    liveness: object,
    server_key: object,
    keys: object,
    serializer: str,
) -> None:
    """Raises unless a queue with remote readers could have written that into its handle."""
    if not isinstance(address, str) or not isinstance(server_key, str):
        raise InvalidType("the handle's address and key must be text")
    endpoint_of(address)
    checked_liveness(liveness)
    check_security(not server_key, serializer)
    check_keys(server_key, keys, integer_from("n_remote_reader", places, 1))
