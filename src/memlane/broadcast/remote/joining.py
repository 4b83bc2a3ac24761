"""How a reader finds its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from memlane.broadcast.remote.peer import usual_place
from memlane.broadcast.remote.reader import PlaceTaken, RemoteReader
from memlane.errors import InvalidArgument, RankTaken

if TYPE_CHECKING:
    from memlane.broadcast.handle import Handle

R = TypeVar("R", bound=RemoteReader)


def attach(handle: Handle, rank: int, kind: type[R]) -> R:
    """Reader `rank`, in the first place that is free for it, its usual one first.

    Raises as `RemoteReader` does.
    """
    secrets = handle.remote_reader_keys
    if not secrets:
        raise InvalidArgument(
            f"the handle was exported for a local reader, and not for reader {rank}: it carries no "
            f"key for the network"
        )
    first = min(usual_place(rank, handle.local_reader_ranks), len(secrets) - 1)
    refused: PlaceTaken | None = None
    for secret in (*secrets[first:], *secrets[:first]):
        try:
            return kind(handle, rank, secret)
        except PlaceTaken as error:
            refused = error
    if len(secrets) > 1:
        raise RankTaken(
            f"reader {rank} cannot attach: the queue has {handle.n_remote_reader} remote readers, "
            f"and all of their places are taken"
        )
    raise RankTaken(f"reader {rank} cannot attach: {refused}")
