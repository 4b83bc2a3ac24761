"""Checks what a handle says about the network of its queue's remote readers."""

from __future__ import annotations

from memlane._base.arguments import integer_from
from memlane._net.contexts import need_curve
from memlane.broadcast.options import check_security, checked_liveness
from memlane.broadcast.remote.endpoint import endpoint_of
from memlane.broadcast.remote.keys import check_keys
from memlane.errors import InvalidType


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
    check_security(not server_key, serializer)
    if server_key:
        need_curve()
    check_keys(server_key, keys, integer_from("n_remote_reader", places, 1))
