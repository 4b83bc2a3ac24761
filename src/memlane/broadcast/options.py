"""A writer's options for readers on other hosts; checked even if it has none."""

from __future__ import annotations

from dataclasses import dataclass

from memlane._base.arguments import MAX_SEGMENT_BYTES, integer_from
from memlane.errors import InvalidArgument, InvalidType

LEAST_LIVENESS, MOST_LIVENESS = 0.5, 86_400.0


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
    late_readers: bool

    def __post_init__(self) -> None:
        if self.connect_ip is not None and not isinstance(self.connect_ip, str):
            raise InvalidType(f"connect_ip must be a string, not {type(self.connect_ip).__name__}")
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
