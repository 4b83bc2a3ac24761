"""Peers that count as out of reach: not a peer that is stopped or busy, and nobody while a process
has no descriptor for another connection."""

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from memlane import AccessRefused, Handle, MessageQueue, TimedOut, WriterDied
from memlane.broadcast.network.relay import Relay
from tests.support import PATIENCE, Aside, Link, Remote, assert_in_time, start, until
from tests.support.proxies import Cable
from tests.support.queues import BOUND, refuses
from tests.support.remote_queues import (
    HERE,
    LIVENESS,
    remote_writer,
    remote_writing,
    start_remote_reader,
)


def test_a_writer_that_is_stopped_while_a_connection_is_reset() -> None:
    """Its kernel accepts the next one, and nobody answers: it is waited for, and named."""
    writer = Remote(start(remote_writing, 1, LIVENESS))
    with (
        Cable(writer.greeting) as cable,
        MessageQueue.create_from_handle(cable.handle, 0) as reader,
    ):
        writer.peer.stop()
        cable.cut(mend=True)
        with pytest.raises(TimedOut, match=r"accepted, unanswered for \d.*: busy, stopped"):
            reader.dequeue(timeout=4 * LIVENESS)
        writer.peer.resume()
        writer.call("enqueue", "alive", PATIENCE)
        assert reader.dequeue(PATIENCE) == "alive"
        writer.call("close")


def test_a_proxy_that_restarts_kills_nobody() -> None:
    """It refuses for 0.6 s; a death would be named by 1 s."""

    def restarts() -> bool:
        """False: the machine was too busy for that."""
        with (
            remote_writer() as writer,
            Cable(writer.export_handle(0)) as cable,
            MessageQueue.create_from_handle(cable.handle, 0) as reader,
        ):
            reads = Aside(reader.dequeue).until_blocked()
            began = time.monotonic()
            with cable.refusing():
                time.sleep(0.6)
            if time.monotonic() - began > 0.75:
                return False
            writer.enqueue("alive", PATIENCE)
            return bool(reads.result() == "alive")

    until(restarts)


def test_a_port_that_stays_refused() -> None:
    """Nobody listens there any more: a death, named within a second."""
    with (
        remote_writer() as writer,
        Cable(writer.export_handle(0)) as cable,
    ):
        reader = MessageQueue.create_from_handle(cable.handle, 0)
        reads = Aside(reader.dequeue).until_blocked()
        moment = time.monotonic()
        with cable.refusing():
            with refuses(WriterDied, match="no process listens"):
                reads.result()
            assert_in_time(BOUND, moment, reads.ended)
        reader.close()


def test_handshakes_that_are_cut_at_first() -> None:
    """Three of them prove nothing: the true writer is there."""
    with remote_writer() as writer, Cable(writer.export_handle(0)) as cable:
        cable.cut()
        attaches = Aside(MessageQueue.create_from_handle, cable.handle, 0)
        until(lambda: cable.tries >= 3)
        cable.mend()
        attaches.result().close()


def test_handshakes_that_are_cut_for_ever() -> None:
    """After the bound the error says what may be wrong."""
    with (
        remote_writer(remote_liveness=LIVENESS) as writer,
        Cable(writer.export_handle(0)) as cable,
    ):
        cable.cut()
        begun = time.monotonic()
        with refuses(AccessRefused, match=r"every handshake was ended for .* proxy or firewall"):
            MessageQueue.create_from_handle(cable.handle, 0)
        assert time.monotonic() - begun >= LIVENESS
        assert_in_time(5 * LIVENESS, begun)


@contextmanager
def no_descriptor() -> Iterator[None]:
    """Lets no descriptor be opened during the block, not even in place of one that is closed
    meanwhile."""
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    held: list[int] = []
    is_over = threading.Event()

    def take() -> None:
        while not is_over.wait(0.001):
            with suppress(OSError):
                while True:
                    held.append(os.dup(0))

    taking = threading.Thread(target=take)
    taking.start()
    until(lambda: held)
    try:
        yield
    finally:
        is_over.set()
        taking.join()
        for number in held:
            os.close(number)


def reads_without_descriptors(link: Link, handle: Handle) -> list[object]:
    """Loses its connection while it can open no other."""
    with MessageQueue.create_from_handle(handle, 0) as reader:
        seen: list[object] = []
        with no_descriptor():
            link.tell()
            link.hear()
            try:
                seen.append(reader.dequeue(3 * LIVENESS))
            except Exception as error:
                seen.append(type(error).__name__)
        seen.append(reader.dequeue(PATIENCE))
        return seen


def test_a_reader_without_a_descriptor_does_not_take_its_writer_for_dead() -> None:
    """It cannot come back, and does not take its writer for dead."""
    with (
        remote_writer() as writer,
        Cable(writer.export_handle(0)) as cable,
    ):
        cable.handle.remote_liveness = LIVENESS
        reader = start(reads_without_descriptors, cable.handle)
        reader.hear()
        cable.cut(mend=True)
        reader.tell()
        writer.enqueue("alive", PATIENCE)
        assert reader.result() == ["TimedOut", "alive"]


def writes_without_descriptors(link: Link) -> list[str]:
    """A reader says HELLO, and later comes back, while no descriptor can be opened here."""

    def states() -> list[str]:
        return [row.state for row in writer.statistics().readers]

    with remote_writer(2, remote_liveness=LIVENESS) as writer:
        link.tell(writer.export_handle())
        link.hear()
        with no_descriptor():
            link.tell()
            link.hear()
            until(lambda: states() == ["unknown", "running"])
            time.sleep(3 * LIVENESS)  # a wait for what must not happen
            seen = states()
        link.tell()
        link.hear()
        writer.enqueue("alive", PATIENCE)
        return seen


def test_a_writer_without_a_descriptor_takes_nobody_for_dead() -> None:
    """Readers stay alive whose connection was lost then, and those that are connected."""
    peer = start(writes_without_descriptors)
    handle = peer.hear()
    with (
        Cable(handle) as cable,
        MessageQueue.create_from_handle(cable.handle, 0) as lost,
        MessageQueue.create_from_handle(handle, 1) as stays,
    ):
        peer.tell()
        peer.hear()
        cable.cut(mend=True)
        peer.tell()
        peer.hear()
        peer.tell()
        assert [queue.dequeue(PATIENCE) for queue in (lost, stays)] == ["alive", "alive"]
        assert peer.result() == ["unknown", "running"]


def stops_before_its_first_report(link: Link, handle: Handle) -> object:
    """The first reader of its host, which therefore relays."""
    begins = Relay.start

    def start_late(relay: Relay) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        begins(relay)

    Relay.start = start_late  # type: ignore[method-assign]
    with MessageQueue.create_from_handle(handle, 0) as reader:
        return reader.dequeue(PATIENCE)


def test_a_relay_that_is_stopped_before_its_first_report() -> None:
    """Its neighbour waits for the bound, then gets a stream of its own; the writer names both."""
    with remote_writer(2, relay=True, remote_liveness=2 * LIVENESS) as writer:
        relay = start(stops_before_its_first_report, writer.export_handle(0))
        until(lambda: writer.statistics().readers[0].state == "running")
        attaches = Aside(MessageQueue.create_from_handle, writer.export_handle(1), 1)
        waits = "reader 1 (attaching behind reader 0's relay, which has not reported for"

        def is_named() -> bool:
            with pytest.raises(TimedOut) as caught:
                writer.wait_until_ready(0.01)
            return waits in str(caught.value)

        until(is_named)
        with attaches.result() as reader:
            writer.enqueue("message")
            assert reader.dequeue(PATIENCE) == "message"
            relay.resume()
            assert relay.result() == "message"


def vanishes_after_accepting(link: Link) -> None:
    """A host that accepts connections and is then never heard of: its process stays stopped."""
    with socket.create_server((HERE, 0)) as listener:
        link.tell(listener.getsockname()[1])
        link.hear()


def test_a_process_that_accepts_and_never_answers() -> None:
    """It may be the writer, so attaching waits; the error says what it has seen."""
    with remote_writer(remote_liveness=LIVENESS) as writer:
        squatter = start(vanishes_after_accepting)
        handle = writer.export_handle(0)
        handle.remote_subscribe_addr = f"tcp://{HERE}:{squatter.hear()}"
        with refuses(TimedOut, match="accepted, unanswered for"):
            MessageQueue.create_from_handle(handle, 0, timeout=3 * LIVENESS)
        squatter.tell()
        squatter.result()
        start_remote_reader(writer).call("close")
