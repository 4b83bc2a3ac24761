"""The cost of a reader that holds a valid key, and means harm, is bounded for its writer.

`MEMLANE_SOAK_ATTACK` is the length of each attack in seconds (default 3). With more than 30, the
latency of another reader counts, too: beside the same run with as many processes that burn a core
as the attack keeps busy.
"""

import faulthandler
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

import pytest
import zmq

from memlane import Handle, MessageQueue, ReaderDied
from memlane._net import sockets
from memlane.broadcast.protocol import frames as wire
from tests.support import PATIENCE, Link, Peer, start, until
from tests.support.remote_queues import LIVENESS, remote_writer, start_remote_reader
from tests.support.strangers import dealer_of, hello, stop_monitor

SECONDS = float(os.environ.get("MEMLANE_SOAK_ATTACK", "3"))
pytestmark = pytest.mark.soak(seconds=60 + 6 * SECONDS)
MOST_GROWTH = 64 << 20
Socket = "zmq.Socket[bytes]"


def attached(context: "zmq.Context[zmq.Socket[bytes]]", handle: Handle, number: int = 0) -> Socket:
    """A connection that has said HELLO."""
    dealer = dealer_of(context, handle, handle.remote_reader_keys[0], handle.remote_server_key)
    stop_monitor(dealer)
    dealer.set(zmq.SNDTIMEO, 200)
    dealer.set(zmq.RCVTIMEO, 1000)  # its connection may be shut without an answer
    with suppress(zmq.Again):
        dealer.send(hello(handle, number=number))
    return dealer


def attached_again(
    context: "zmq.Context[zmq.Socket[bytes]]", handle: Handle, number: int
) -> Socket:
    """The same as soon as one more may be open: those that are closed end in their own time."""
    while True:
        with suppress(zmq.ZMQError):
            return attached(context, handle, number)
        time.sleep(0.001)


def epoch_of(dealer: Socket) -> int:
    return wire.header_of(dealer.recv()).epoch


def connects(dealer: Socket, handle: Handle) -> Iterator[None]:
    """Again and again, and keeps what it can."""
    kept = []
    for number in itertools.count(1):
        kept.append(attached(dealer.context, handle, number))
        if len(kept) > 700:
            kept.pop(0).close(0)
        yield


def asks(dealer: Socket, handle: Handle) -> Iterator[None]:
    """And reads no answer."""
    frame = wire.control(wire.Header(wire.What.ASK, epoch_of(dealer)))
    while True:
        dealer.send(frame)
        yield


def acknowledges(dealer: Socket, handle: Handle) -> Iterator[None]:
    """The same all the time, with frames as large as they may be."""
    frame = wire.control(wire.Header(wire.What.ACK, epoch_of(dealer))) + bytes(4000)
    while True:
        dealer.send(frame)
        yield


def goes_on(dealer: Socket, handle: Handle) -> Iterator[None]:
    """One frame of 131,000 parts, which libzmq passes on only as a whole."""
    while True:
        for _ in range(131_000):
            dealer.send(bytes(2000), zmq.SNDMORE)
        dealer.send(b"")
        yield


def wants_again(dealer: Socket, handle: Handle) -> Iterator[None]:
    """All that was sent, and reads none of it."""
    for number in itertools.count(1):
        dealer.send(hello(handle, number=number))
        yield


ATTACKS = {
    attack.__name__: attack for attack in (connects, asks, acknowledges, goes_on, wants_again)
}


def attacking(link: Link, handle: Handle, name: str, seconds: float, least: int = 0) -> int:
    """Does that for so long, and so often, once it has attached; returns how often.

    It waits for the WELCOME, because the writer ends the oldest unidentified connections beyond its
    limit: where the processor is busy, more than that many come before any is heard, and an attack
    that has not attached by then may never do so.
    """
    faulthandler.dump_traceback_later(
        seconds + 3 * PATIENCE, exit=True
    )  # if it hangs, it says where
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 4096)
        dealer = attached(context, handle)
        dealer.poll()
        steps, count = ATTACKS[name](dealer, handle), 0
        link.tell()
        end = time.monotonic() + seconds
        while time.monotonic() < end or count < least:
            with suppress(zmq.ZMQError):  # its connection was shut, and is made again
                next(steps, None)
                count += 1
                continue
            dealer.close(0)
            dealer = attached_again(context, handle, count + 2)
            steps = ATTACKS[name](dealer, handle)
        context.destroy(0)
        return count


def burning(_link: Link, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def measuring(link: Link, handle: Handle) -> list[float]:
    """Delays of messages that carry when they were sent, sorted."""
    with MessageQueue.create_from_handle(handle, 0) as reader:
        link.tell()
        delays = [time.monotonic() - sent for sent, _ in reader]
    return sorted(delays)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def run(beside: Callable[[MessageQueue], list[Peer]]) -> tuple[float, list[float]]:
    """By how much the writer's memory has grown, in bytes for each 0.1 s in which its process got
    no time; and the delays of the other reader."""
    # A window that one who reads nothing cannot fill before the end, or it would stop the others.
    with remote_writer(2, remote_window=100_000, remote_window_bytes=4 << 20) as writer:
        reader = start(measuring, writer.export_handle(0))
        reader.hear()
        others = beside(writer)
        before = most = resident()
        now, longest = time.monotonic(), 0.1
        end = now + SECONDS
        while now < end:
            try:
                writer.enqueue((time.monotonic(), bytes(100)), 0.05)
            except ReaderDied as death:
                writer.release_reader(death.rank)
            except TimeoutError:
                pass
            most = max(most, resident())
            time.sleep(0.002)
            last, now = now, time.monotonic()
            longest = max(longest, now - last - 0.05)
        for other in others:
            other.result()
        with suppress(Exception):  # the member that lies is dead by now, or has not read
            writer.close(timeout=1.0)
        return (most - before) * 0.1 / longest, reader.result()


@pytest.mark.parametrize("name", ATTACKS)
def test_the_holder_of_one_key_cannot_fill_the_writers_memory(name: str) -> None:
    """Its holder can neither fill the writer's memory nor keep others from reading."""

    def attack(writer: MessageQueue) -> list[Peer]:
        peer = start(attacking, writer.export_handle(1), name, SECONDS)
        peer.hear()
        return [peer]

    growth, delays = run(attack)
    print(f"{name}: {growth / (1 << 20):.1f} MiB")
    # Beside other tests the writer's threads may not get to run as often as the bound supposes.
    bound = MOST_GROWTH if SECONDS > 30 else 4 * MOST_GROWTH
    assert growth < bound, f"{growth / (1 << 20):.0f} MiB"
    assert delays
    if SECONDS > 30:
        _, usual = run(lambda _writer: [start(burning, SECONDS) for _ in range(2)])
        late, else_late = (d[int(0.99 * len(d))] for d in (delays, usual))
        text = f"p99 {late * 1e3:.1f} ms, without it {else_late * 1e3:.1f} ms"
        assert late <= 5 * else_late + 0.001, text


def test_all_descriptors_stay_free() -> None:
    """Connections of one key replace each other."""
    with remote_writer(2, remote_liveness=LIVENESS) as writer:
        good = start_remote_reader(writer)
        peer = start(attacking, writer.export_handle(1), "connects", 1.0, 1000)
        peer.hear()
        # Only a reader that has attached can die. One that never has is absent for ever.
        assert writer.statistics().readers[1].state != "absent"
        before, counts = len(os.listdir("/proc/self/fd")), []
        while not peer.has_spoken():
            counts.append(len(os.listdir("/proc/self/fd")))
            time.sleep(0.05)
        assert peer.result() >= 1000
        # Not the most: while the writer's thread waits for a processor, libzmq accepts any number.
        assert median(counts) - before < 1.5 * sockets.MAX_UNIDENTIFIED
        until(lambda: writer.statistics().readers[1].state == "dead", "the attacker is dead")
        writer.release_reader(1)
        writer.enqueue("alive", PATIENCE)
        assert good.call("dequeue") == "alive"
        good.call("close")
