"""Begins a collective call in a caller's group."""

from __future__ import annotations

import sys
from typing import Any

from memlane._base.arguments import integer_from
from memlane._base.deadline import Deadline, Fallback
from memlane._importing import fork_waits
from memlane.errors import InvalidArgument, InvalidType
from memlane.groups.broadcasts import BroadcastCollectives
from memlane.groups.collectives import Collectives
from memlane.groups.tcp import TcpGroup


def collectives_of(group: Any, timeout: float | None) -> Collectives:
    """Begins a collective call of `group`: a torch process group, a TcpGroup, or a similar object.

    Raises:
        InvalidType: it is not a group, or this process is not in it.
        RankMissing: the group's store did not answer in time.
    """
    if isinstance(group, TcpGroup):
        own = group.timeout if isinstance(timeout, Fallback) else timeout
        return group.collectives(Deadline(own))
    deadline = Deadline(timeout)
    if "torch.distributed" in sys.modules:  # otherwise it cannot be one of torch's
        with fork_waits:
            from memlane.groups import torch_store

        if torch_store.is_process_group(group):
            own_store = torch_store.store_of(group)
            place = _place(group.rank(), group.size())
        else:
            own_store = getattr(group, "store", None)
            place = None
        if torch_store.is_torch_store(own_store):
            place = place or _place(group.rank, group.world_size)
            met = torch_store.group_over(group, own_store, *place, deadline)
            return met.collectives(deadline)
    try:
        rank, size = _place(group.rank, group.world_size)
    except AttributeError:
        raise InvalidType(
            f"{type(group).__name__} is not a group that this process is in; pass a process group "
            f"of torch, or an object with rank, world_size and broadcast_obj(obj, src)"
        ) from None
    return BroadcastCollectives(group, rank, size, deadline)


def _place(rank: object, size: object) -> tuple[int, int]:
    ranks = integer_from("world_size", size, 1)
    own = integer_from("rank", rank, 0)
    if own >= ranks:
        raise InvalidArgument(f"rank must be below the world_size of {ranks}, not {own}")
    return own, ranks
