"""What a handle says of the network, checked before anything is believed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memlane._checks import integer_from
from memlane.broadcast.remote.address import endpoint_of
from memlane.broadcast.remote.options import check_security, checked_liveness
from memlane.broadcast.remote.places import is_key
from memlane.errors import InvalidArgument, InvalidType

if TYPE_CHECKING:
    from memlane.broadcast.handle import Handle


def check_handle(handle: Handle) -> None:
    """Raises unless a queue with remote readers could have written it."""
    address, server_key = handle.remote_subscribe_addr, handle.remote_server_key
    if not isinstance(address, str) or not isinstance(server_key, str):
        raise InvalidType("the handle's address and key must be text")
    endpoint_of(address)
    integer_from("n_remote_reader", handle.n_remote_reader, 1)
    checked_liveness(handle.remote_liveness)
    check_security(not server_key, handle.serializer)
    keys = handle.remote_reader_keys
    if not isinstance(keys, list) or len(keys) > handle.n_remote_reader:
        raise InvalidArgument(
            f"the handle must have at most {handle.n_remote_reader} keys of remote readers"
        )
    if server_key and not all(is_key(key) for key in (server_key, *keys)):
        raise InvalidArgument("a key in the handle is no CURVE key")
    if not all(isinstance(key, str) and len(key) <= 64 for key in keys):
        raise InvalidArgument("a key in the handle is none of memlane's")
