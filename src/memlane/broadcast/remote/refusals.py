"""Why a writer does not let a reader in, as an exception."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memlane.errors import InvalidArgument, MemlaneError, RankTaken, WriterDied

if TYPE_CHECKING:
    from memlane.broadcast.remote.wire import Refused


def refusal(refused: Refused, writer_pid: int) -> MemlaneError:
    match refused.code:
        case "rank_taken":
            return RankTaken(refused.text)
        case "place_taken":
            return PlaceTaken(refused.text)
        case "gone":
            return WriterDied(writer_pid, f" for this reader: {refused.text}")
        case _:
            return InvalidArgument(refused.text)


class PlaceTaken(RankTaken):
    """That key is of another reader; with more keys there may be another place."""
