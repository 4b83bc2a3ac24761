"""`relay=True`: readers in real processes find out which of them share a host."""

import signal
import time

import pytest

from memlane import MessageQueue, RankTaken, ReaderDied
from tests.support import PATIENCE, assert_in_time, unshare_refusal, until
from tests.support.hosts import Host, attach_all, hosts
from tests.support.queues import BOUND
from tests.support.remote_queues import (
    BRIEF,
    LIVENESS,
    bytes_sent,
    connections_of,
    relay_of,
    remote_writer,
)

pytestmark = pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())


def send(writer: MessageQueue, message: object, there: dict[Host, list[int]]) -> None:
    """One message, and its receipt by all of them."""
    writer.enqueue(message, PATIENCE)
    for host, ranks in there.items():
        for rank in ranks:
            assert host.read(rank) == message


def test_one_stream_reaches_each_of_two_hosts() -> None:
    """One stream to each host; everybody gets everything in order, and nothing is left behind."""
    with remote_writer(5, 1, relay=True) as writer, hosts(2) as (one, two):
        here = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        there = {one: [1, 2, 3], two: [4, 5]}
        attach_all(writer, there)
        writer.wait_until_ready(PATIENCE)
        for host, ranks in there.items():
            for rank in ranks:
                host.ask("wait_until_ready", rank, PATIENCE)
        assert connections_of(writer) == 2
        until(lambda: not one.segments | two.segments)
        for message in (0, b"large" * 10_000, {"in": "order"}):
            send(writer, message, there)
            assert here.dequeue(PATIENCE) == message
        pids = {row.rank: row.pid for row in writer.statistics().readers}
        assert {rank: pids[rank] for rank in range(1, 6)} == one.pids | two.pids
        here.close()


def test_eight_readers_on_a_host_cost_little_more_than_one() -> None:
    """Eight readers on a host cost at most 1.05 times what one costs."""
    payload = bytes(100_000)

    def cost(count: int) -> int:
        with remote_writer(count, relay=True) as writer, hosts() as (host,):
            there = {host: list(range(count))}
            attach_all(writer, there)
            before = bytes_sent(writer)
            for _ in range(20):
                send(writer, payload, there)
            until(lambda: bytes_sent(writer) - before >= 20 * len(payload))
            return bytes_sent(writer) - before

    one, eight = cost(1), cost(8)
    assert one >= 20 * len(payload)
    assert eight <= 1.05 * one


def test_a_killed_reader_and_then_the_relay_are_both_named() -> None:
    """The writer names who died; everybody else goes on."""
    with remote_writer(5, relay=True, **BRIEF) as writer, hosts(2) as (one, two):
        attach_all(writer, {one: [0, 1, 2], two: [3, 4]})
        writer.wait_until_ready(PATIENCE)
        one.signal(2)
        killed = time.monotonic()
        with pytest.raises(ReaderDied) as caught:
            until(lambda: send(writer, "meanwhile", {one: [0, 1], two: [3, 4]}))
        assert_in_time(BOUND + 1.0, killed)  # the calls above take their time
        assert (caught.value.rank, caught.value.pid) == (2, one.pids[2])
        writer.release_reader(2)
        send(writer, "without it", {one: [0, 1], two: [3, 4]})
        one.signal(0)
        until(lambda: [r.rank for r in writer.statistics().readers if r.state == "dead"] == [0])
        with pytest.raises(ReaderDied, match=r"reader 0"):
            writer.enqueue("nobody there")
        writer.release_reader(0)
        send(writer, "without them", {one: [1], two: [3, 4]})


def test_a_stopped_relay_kills_nobody() -> None:
    """Nobody is dead. Its neighbour goes on alone once the relay has not reported for the bound;
    the writer waits for the stopped one only, and then everything arrives there, too."""
    options = {"remote_window": 3, "remote_liveness": LIVENESS}
    with remote_writer(2, relay=True, **options) as writer, hosts() as (host,):
        attach_all(writer, {host: [0, 1]})
        writer.wait_until_ready(PATIENCE)
        host.signal(0, signal.SIGSTOP)
        for number in range(3):
            writer.enqueue(number)
        assert [host.read(1) for _ in range(3)] == [0, 1, 2]
        time.sleep(LIVENESS)  # a wait for what must not happen
        until(lambda: [row.behind for row in writer.statistics().readers] == [3, 0])
        with pytest.raises(TimeoutError, match=r"waiting for reader 0 \([^)]*\)$"):
            writer.enqueue("too much", 0.1)
        assert [row.state for row in writer.statistics().readers] == ["running", "running"]
        host.signal(0, signal.SIGCONT)
        assert [host.read(0) for _ in range(3)] == [0, 1, 2]
        send(writer, "goes on", {host: [0, 1]})


def test_late_readers_of_other_hosts_get_everything() -> None:
    """A missing reader is named on both sides; it gets everything from the first, also
    elsewhere."""
    with remote_writer(4, relay=True) as writer, hosts(2) as (one, two):
        attach_all(writer, {one: [0, 1]})
        messages = ["first", b"large" * 10_000]
        for message in messages:
            send(writer, message, {one: [0, 1]})
        two.attach(writer.export_handle(2), 2)
        with pytest.raises(TimeoutError, match=r"waiting for reader 3 \(never attached\)$"):
            writer.wait_until_ready(0.1)
        for host, rank in (one, 0), (one, 1), (two, 2):

            def waits_for(host: Host = host, rank: int = rank) -> str:
                with pytest.raises(TimeoutError) as caught:
                    host.ask("wait_until_ready", rank, 0.1)
                return str(caught.value)

            # The writer is asked once a second.
            until(lambda: waits_for().endswith("waiting for reader 3 (never attached)"))
        one.attach(writer.export_handle(3), 3)
        writer.wait_until_ready(PATIENCE)
        for host, rank in (two, 2), (one, 3):
            assert [host.read(rank) for _ in messages] == messages
        for host, rank in (one, 0), (one, 1), (two, 2), (one, 3):
            host.ask("wait_until_ready", rank, PATIENCE)
        send(writer, "last", {one: [0, 1, 3], two: [2]})


def test_relays_go_on_without_a_released_reader() -> None:
    """The relays go on without him: more messages than their rings have chunks arrive."""
    with remote_writer(3, relay=True) as writer, hosts() as (host,):
        attach_all(writer, {host: [0, 1]})
        writer.release_reader(2)
        for number in range(20):
            send(writer, number, {host: [0, 1]})


def test_who_comes_after_a_relay() -> None:
    """The next one from that host relays anew, from the first message on."""
    with remote_writer(4, relay=True, **BRIEF) as writer, hosts() as (host,):
        attach_all(writer, {host: [0, 1]})
        send(writer, "first", {host: [0, 1]})
        host.signal(0)
        until(lambda: [r.state for r in writer.statistics().readers][:2] == ["dead", "running"])
        writer.release_reader(0)
        attach_all(writer, {host: [2, 3]})
        writer.wait_until_ready(PATIENCE)
        assert [host.read(rank) for rank in (2, 3)] == ["first", "first"]
        send(writer, "second", {host: [1, 2, 3]})
        assert connections_of(writer) == 2


def test_who_comes_when_a_relay_has_just_died() -> None:
    """Before the writer knows: the newcomer sees it, and gets a stream of its own."""
    with remote_writer(3, relay=True, **BRIEF) as writer, hosts() as (host,):
        attach_all(writer, {host: [0, 1]})
        send(writer, "first", {host: [0, 1]})
        host.signal(0)
        host.attach(writer.export_handle(2), 2)
        writer.enqueue("second")
        assert [host.read(2) for _ in range(2)] == ["first", "second"]
        assert host.read(1) == "second"


def test_the_host_after_its_readers_were_killed() -> None:
    """The rest of their ring keeps nobody from starting, and is then removed."""
    with hosts() as (host,):
        with remote_writer(3, relay=True, **BRIEF) as writer:
            attach_all(writer, {host: [0, 1]})
            left = host.segments
            assert len(left) == 1
            for rank in (0, 1):
                host.signal(rank)
            until(lambda: [r.state for r in writer.statistics().readers][:2] == ["dead", "dead"])
        with remote_writer(2, relay=True) as writer:
            attach_all(writer, {host: [0, 1]})
            assert not left & host.segments
            send(writer, "hello", {host: [0, 1]})


def test_a_rank_is_taken_once() -> None:
    """Wherever else somebody comes with it, he is refused."""
    with remote_writer(3, relay=True) as writer, hosts(2) as (one, two):
        attach_all(writer, {one: [0, 1]})
        for host in (one, two):
            with pytest.raises(RankTaken, match=r"reader 1 cannot attach: its place was taken"):
                host.attach(writer.export_handle(1), 1)
        two.attach(writer.export_handle(2), 2)
        send(writer, "hello", {one: [0], two: [2]})


@pytest.mark.parametrize("size", ["64m", "16k"])
def test_readers_without_shared_memory_get_streams_of_their_own(size: str) -> None:
    """Hosts that are taken for one, or have no space: every reader gets a stream of its own."""
    with remote_writer(4, relay=True) as writer, hosts(2, size, "one") as (one, two):
        there = {one: [0], two: [1]} if size == "64m" else {one: [0, 1], two: [2, 3]}
        attach_all(writer, there)
        if size == "64m":
            for rank in (2, 3):
                writer.release_reader(rank)
        writer.wait_until_ready(PATIENCE)
        assert connections_of(writer) == sum(map(len, there.values()))
        for number in range(20):
            send(writer, number, there)
        assert not two.segments


def test_late_reader_of_a_relay_that_has_closed() -> None:
    """A relay stays for those who may come, although its own reader has closed."""
    with remote_writer(2, relay=True) as writer, hosts() as (host,):
        host.attach(writer.export_handle(0), 0)
        writer.enqueue("first")
        host.ask("close", 0)
        until(lambda: writer.statistics().readers[0].state == "closed")
        host.attach(writer.export_handle(1), 1)
        assert relay_of(writer) == 0
        assert host.read(1) == "first"
        for number in range(20):
            send(writer, number, {host: [1]})
