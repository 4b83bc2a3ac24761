"""Ranks on other hosts; here each is a mount namespace with its own /dev/shm."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import lab
from memlane import MessageQueue, in_the_same_node_as
from memlane.broadcast import grouping
from memlane.groups import TcpGroup
from tests.support import PATIENCE, Aside, Link, Peer, private_shm, start, unshare_refusal
from tests.support.groups import SECRET, SMALL, groups_of, member, on_ranks
from tests.support.queues import segments

pytestmark = pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())


def elsewhere(port: int, rank: int, size: int, call: Callable[..., Any]) -> Peer:
    """A rank on a host of its own."""
    command = private_shm("64m")
    return start(member, port, rank, size, call, method="spawn", command=command)


def nodes(_link: Link, group: TcpGroup) -> list[list[bool]]:
    return [in_the_same_node_as(group, source, timeout=PATIENCE) for source in range(3)]


def test_in_the_same_node_finds_who_shares_memory() -> None:
    """Two ranks here and one elsewhere, although they share host name and addresses."""
    before = segments()
    with TcpGroup("127.0.0.1", 0, 0, 3, secret=SECRET) as group:
        here = start(member, group.port, 1, 3, nodes)
        there = elsewhere(group.port, 2, 3, nodes)
        own = Aside(nodes, None, group)
        expected = [[True, True, False], [True, True, False], [False, False, True]]
        assert own.result() == expected
        assert here.result() == expected
        assert there.result() == expected
    assert segments() == before


def one_queue_each(_link: Link | None, group: TcpGroup) -> list[object]:
    """Every rank writes a queue of its own in turn; what this one reads of the others."""
    read: list[object] = []
    for writer in range(group.world_size):
        with MessageQueue.create_from_process_group(
            group, *SMALL, writer, timeout=PATIENCE, connect_ip="127.0.0.1"
        ) as queue:
            if group.rank == writer:
                queue.enqueue({"from": writer})
                read.append((queue.n_local_reader, queue.n_remote_reader))
            else:
                read.append((queue._is_local_reader, queue.dequeue(PATIENCE)))
            group.broadcast_obj("all have read", writer)
    return read


def test_queues_over_hosts_share_memory_where_they_can() -> None:
    """Readers that share the writer's memory read from it, the others over the network."""
    before = segments()
    with TcpGroup("127.0.0.1", 0, 0, 3, secret=SECRET) as group:
        here = start(member, group.port, 1, 3, one_queue_each)
        there = elsewhere(group.port, 2, 3, one_queue_each)
        from_ = [{"from": rank} for rank in range(3)]
        own = Aside(one_queue_each, None, group).result()
        assert own == [(1, 1), (True, from_[1]), (True, from_[2])]  # the last behind a relay
        assert here.result() == [(True, from_[0]), (1, 1), (True, from_[2])]
        assert there.result() == [(False, from_[0]), (False, from_[1]), (0, 2)]
    assert segments() == before


RANK = """
import sys
from memlane import MessageQueue
from memlane.groups import TcpGroup

rank, host, patience = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
with (
    TcpGroup(host, 29555, rank, 2, secret="s" * 32, timeout=patience) as group,
    MessageQueue.create_from_process_group(group, 4096, 4, 1, timeout=patience) as queue,
):
    if rank == 1:
        queue.enqueue("by the cable")
    else:
        print(queue.dequeue(patience))
    group.broadcast_obj("over", 1)  # rank 0 has the store: it leaves last
"""


@pytest.mark.skipif(bool(lab.refusal()), reason=lab.refusal() or "")
def test_hosts_without_a_default_route_reach_the_writer() -> None:
    """The writer offers the address by which it reaches the group: it offered 127.0.0.1."""
    with lab.Host() as one, lab.Host() as two, lab.Cable(one, two) as cable:
        host = cable.addresses[0]
        ranks = [
            subprocess.Popen(
                [*each.command, sys.executable, "-c", RANK, str(rank), host, str(PATIENCE)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, each in enumerate((one, two))
        ]
        assert [rank.communicate(timeout=2 * PATIENCE)[0] for rank in ranks] == [
            "by the cable\n",
            "",
        ]


def test_handles_carry_one_secret_each() -> None:
    """The secret that a rank gets admits it, and nobody else."""
    handles: list[Any] = []

    def peek(_link: Link | None, group: TcpGroup) -> None:
        with MessageQueue.create_from_process_group(
            group, *SMALL, timeout=PATIENCE, connect_ip="127.0.0.1"
        ) as queue:
            handles.append(queue.handle)
            if group.rank:
                queue.dequeue(PATIENCE)
            else:
                queue.enqueue(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "_is_here", lambda _name: False)
        with groups_of("tcp", 3) as groups:
            on_ranks(lambda group: peek(None, group), groups)
    readers = [handle for handle in handles if len(handle.remote_reader_keys) == 1]
    assert len({handle.remote_reader_keys[0] for handle in readers}) == 2
