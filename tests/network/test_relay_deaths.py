"""Deaths and stops behind a relay, in real processes on another host.

The other host is a mount namespace with its own /dev/shm, in which a process forks the ranks.
The first to attach relays.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from memlane import MessageQueue, ReaderDied, WriterDied
from memlane.groups import TcpGroup
from tests.support import (
    PATIENCE,
    Aside,
    Link,
    Peer,
    Remote,
    assert_in_time,
    dismiss,
    private_shm,
    serve,
    start,
    unshare_refusal,
    until,
)
from tests.support.groups import SECRET, SMALL, member
from tests.support.queues import BOUND, fill, segments
from tests.support.remote_queues import relay_of

pytestmark = pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
RANKS = [1, 2, 3]
SIZE = 4


def over(group: TcpGroup, writer_rank: int = 0) -> MessageQueue:
    return MessageQueue.create_from_process_group(
        group, *SMALL, writer_rank, timeout=PATIENCE, connect_ip="127.0.0.1", remote_window=8
    )


def end_of(link: Link, group: TcpGroup) -> None:
    """A rank that does what it is asked to do."""
    queue = over(group)
    serve(link, queue, os.getpid())


def host(link: Link, port: int) -> None:
    """Forks the ranks, and passes on what they are asked and what they answer."""
    started = {rank: start(member, port, rank, SIZE, end_of) for rank in RANKS}
    peers = {rank: Remote(peer) for rank, peer in started.items()}
    link.tell({rank: peer.pid for rank, peer in peers.items()})
    while (request := link.hear(timeout=10 * PATIENCE)) is not None:
        rank, call, *arguments = request
        try:
            link.tell(peers[rank].call(call, *arguments))
        except Exception as error:
            link.tell(error)
    dismiss()


class Elsewhere:
    """The readers of the other host."""

    def __init__(self, peer: Peer, pids: dict[int, int], writer: MessageQueue) -> None:
        self.peer, self.pids = peer, pids
        self.relay = relay_of(writer)
        self.behind = [rank for rank in RANKS if rank != self.relay]

    def call(self, rank: int, call: str, *arguments: Any) -> Any:
        self.peer.tell((rank, call, *arguments))
        answer = self.peer.hear()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, rank: int) -> float:
        moment = time.monotonic()
        os.kill(self.pids[rank], signal.SIGKILL)
        return moment


@contextmanager
def two_hosts() -> Iterator[tuple[MessageQueue, Elsewhere]]:
    """The writer here, three readers there, the first of them relaying."""
    before = segments()
    with TcpGroup("127.0.0.1", 0, 0, SIZE, secret=SECRET) as group:
        making = Aside(over, group)
        there = start(host, group.port, method="spawn", command=private_shm("64m"))
        writer = making.result()
        assert segments() == before
        elsewhere = Elsewhere(there, there.hear(), writer)
        yield writer, elsewhere
        writer.close()
        there.tell(None)
        there.result()


def send(writer: MessageQueue, there: Elsewhere, message: object, ranks: list[int]) -> None:
    """One message, and its receipt by those ranks."""
    writer.enqueue(message, PATIENCE)
    for rank in ranks:
        assert there.call(rank, "dequeue", PATIENCE) == message


def test_a_killed_reader_behind_a_relay_is_named() -> None:
    """The writer names it within a second; the others there go on."""
    with two_hosts() as (writer, there):
        dead, alive = there.behind
        killed = there.kill(dead)
        with pytest.raises(ReaderDied) as caught:
            until(lambda: send(writer, there, "meanwhile", [there.relay, alive]))
        assert_in_time(BOUND + 1.0, killed)  # the calls above take their time
        assert (caught.value.rank, caught.value.pid) == (dead, there.pids[dead])
        writer.release_reader(dead)
        writer.enqueue("after", PATIENCE)
        for rank in (there.relay, alive):
            while there.call(rank, "dequeue", PATIENCE) != "after":
                pass


def test_a_killed_reader_of_an_idle_writer_is_reported() -> None:
    """The relay looks at its readers also when nothing is sent."""
    with two_hosts() as (writer, there):
        dead = there.behind[0]
        killed = there.kill(dead)
        until(lambda: [r.rank for r in writer.statistics().readers if r.state == "dead"] == [dead])
        assert_in_time(BOUND + 1.0, killed)


def test_a_killed_relay_is_named_and_its_readers_go_on() -> None:
    """The writer names it alone; those behind it go on by themselves, without loss."""
    with two_hosts() as (writer, there):
        writer.enqueue("before", PATIENCE)
        for rank in RANKS:
            assert there.call(rank, "dequeue", PATIENCE) == "before"
        writer.enqueue("in its hands", PATIENCE)
        there.kill(there.relay)
        for rank in there.behind:
            assert there.call(rank, "dequeue", PATIENCE) == "in its hands"
        until(
            lambda: (
                [r.rank for r in writer.statistics().readers if r.state == "dead"] == [there.relay]
            )
        )
        with pytest.raises(ReaderDied, match="its connection was lost") as caught:
            writer.enqueue("nobody there", PATIENCE)
        assert (caught.value.rank, caught.value.pid) == (
            there.relay,
            there.pids[there.relay],
        )  # and not whom it served
        writer.release_reader(there.relay)
        send(writer, there, "without it", there.behind)


def test_a_stopped_reader_behind_a_relay_is_not_dead() -> None:
    """It is not dead: the writer waits, and says for whom."""
    with two_hosts() as (writer, there):
        stopped, other = there.behind
        os.kill(there.pids[stopped], signal.SIGSTOP)
        sent = fill(writer)
        for rank in (there.relay, other):  # as far ahead of it as the relay's ring lets them
            for number in range(SMALL[1]):
                assert there.call(rank, "dequeue", PATIENCE) == number
        words = rf"for reader {stopped} \(pid \d+ at .*reader {there.relay}'s relay"
        with pytest.raises(TimeoutError, match=words):
            until(lambda: writer.enqueue("more", 0.5))
        os.kill(there.pids[stopped], signal.SIGCONT)
        for number in range(sent):
            assert there.call(stopped, "dequeue", PATIENCE) == number


def test_a_reader_that_waits_learns_whom_its_writer_waits_for() -> None:
    """It tells the relay that it waits for from the writer whom that waits for."""
    with two_hosts() as (_, there):
        relay, writer = (
            rf"the relay \(pid {there.pids[there.relay]} .*\)",
            rf"the writer \(pid {os.getpid()} at",
        )
        for rank in (there.relay, there.behind[0]):
            with pytest.raises(TimeoutError, match=f"for {relay} of {writer}"):
                there.call(rank, "dequeue", 0.1)


def until_all_are_ready(group: TcpGroup) -> None:
    for rank in range(SIZE):
        group.broadcast_obj(None, rank)


def writing(link: Link, group: TcpGroup) -> None:
    with over(group, 3) as queue:
        until_all_are_ready(group)
        queue.enqueue("complete")
        until(lambda: all(row.behind == 0 for row in queue.statistics().readers))
        link.tell(os.getpid())
        link.hear()


def reading(_link: Link, group: TcpGroup) -> tuple[str, int, str]:
    """Returns what came, whom it misses then, and its report of that."""
    with over(group, 3) as queue:
        until_all_are_ready(group)
        seen: str = queue.dequeue(PATIENCE)
        with pytest.raises(WriterDied) as caught:
            queue.dequeue(PATIENCE)
        return seen, caught.value.pid, str(caught.value)


def pair(_link: Link, port: int) -> list[tuple[str, int, str]]:
    peers = [start(member, port, rank, SIZE, reading) for rank in (1, 2)]
    return [peer.result() for peer in peers]


def test_readers_behind_a_relay_learn_whose_death_it_is() -> None:
    """Everybody behind the relay gets what was complete, then hears whose death it is."""
    with TcpGroup("127.0.0.1", 0, 0, SIZE, secret=SECRET) as group:
        own = Aside(reading, None, group)
        there = start(pair, group.port, method="spawn", command=private_shm("64m"))
        writer = start(member, group.port, 3, SIZE, writing)
        writer.hear()
        writer.kill()
        told = [own.result(), *there.result()]
        assert [seen for seen, _, _ in told] == ["complete"] * 3
        assert [pid for _, pid, _ in told] == [writer.pid] * 3
        for _, _, text in told[1:]:
            assert re.search(r"died at tcp://127\.0\.0\.1:\d+: its host refuses connections", text)
