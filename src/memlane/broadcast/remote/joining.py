"""How a reader finds its place."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from memlane.broadcast.remote.peer import usual_place
from memlane.broadcast.remote.reader_session import PlaceTaken
from memlane.errors import InvalidArgument, RankTaken

if TYPE_CHECKING:
    from memlane.broadcast.handle import Handle
    from memlane.broadcast.remote.reader import RemoteReader

    R = TypeVar("R", bound=RemoteReader)


def attach(
    kind: type[R], handle: Handle, rank: int, deadline: float | None, timeout: float | None
) -> R:
    """Attaches reader `rank` at the first free place, trying its usual one first.

    Raises as `RemoteReader` does.
    """
    secrets = handle.remote_reader_keys
    if not secrets:
        raise InvalidArgument(
            f"the handle has no network key, because it is the writer's own or was exported for a "
            f"local reader; attach with export_handle({rank})"
        )
    host = where_memory_is_shared()
    first = min(usual_place(rank, handle.local_reader_ranks), len(secrets) - 1)
    refused: PlaceTaken | None = None
    for secret in (*secrets[first:], *secrets[:first]):
        try:
            return kind(handle, rank, secret, host, deadline, timeout)
        except PlaceTaken as error:
            refused = error
    if len(secrets) > 1:
        raise RankTaken(
            f"reader {rank} cannot attach: the queue has {handle.n_remote_reader} remote readers, "
            f"and all of their places are taken"
        )
    raise RankTaken(f"reader {rank} cannot attach: {refused}")


def where_memory_is_shared() -> str:
    """A hash of the kernel's boot id, the device of /dev/shm and the user. Processes with equal
    hashes may share segments, which attaching then tests. Empty if it cannot be determined."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        device = os.stat("/dev/shm").st_dev
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {device} {os.geteuid()}".encode()).hexdigest()[:32]
