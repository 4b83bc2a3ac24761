"""create_from_handle of a storage, in other processes."""

import pytest

from memlane import (
    RankTaken,
)
from tests.support.queues import refuses, segments
from tests.support.stores import Storage, start_store_reader, store_of


def test_readers_attach_from_several_processes(method: str) -> None:
    """The same between processes."""
    with store_of(2, attached=0) as (writer, _):
        remotes = [start_store_reader(writer, method) for _ in range(2)]
        place = writer.put("k", b"x")
        assert [remote.call("get", *place) for remote in remotes] == [b"x"] * 2
        seen = writer.statistics().readers
        assert {reader.pid for reader in seen} == {remote.pid for remote in remotes}
        assert [reader.outstanding for reader in seen] == [0, 0]
        with refuses(RankTaken, match=f"pid {seen[0].pid}, pid {seen[1].pid}"):
            Storage.create_from_handle(writer.handle())
        for remote in remotes:
            remote.leave()


@pytest.mark.parametrize("turn", range(5))
def test_last_readers_who_come_at_once(turn: int) -> None:
    """One of them removes the name; a kill of all processes then leaves nothing."""
    with store_of(4, attached=0, unlink_when_complete=True) as (writer, _):
        readers = [start_store_reader(writer) for _ in range(4)]
        for reader in readers:
            assert reader.call("statistics").role == "reader"
        assert writer.ring_buffer.handle()[1] not in segments(), turn
        for reader in readers:
            reader.leave()
