"""Ranks on other hosts: here each is a mount namespace with a /dev/shm of its own."""

from collections.abc import Callable
from typing import Any

import pytest

from memlane import in_the_same_node_as
from memlane.groups import TcpGroup
from tests.groups import SECRET, member
from tests.harness import PATIENCE, Aside, Link, Peer, private_shm, start, unshare_refusal
from tests.queues import segments

pytestmark = pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())


def elsewhere(port: int, rank: int, size: int, call: Callable[..., Any]) -> Peer:
    """A rank on a host of its own."""
    command = private_shm("64m")
    return start(member, port, rank, size, call, method="spawn", command=command)


def nodes(_link: Link, group: TcpGroup) -> list[list[bool]]:
    return [in_the_same_node_as(group, source, timeout=PATIENCE) for source in range(3)]


def test_in_the_same_node() -> None:
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
