"""Processes that are stopped, and go on: what was due meanwhile is no fault of their peers."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from memlane import Handle, MessageQueue, TimedOut, WriterClosed, WriterUnreachable
from memlane.broadcast.network.reader import NetworkReader
from tests.network.test_deaths import BOUND
from tests.support import PATIENCE, Aside, Link, Peer, Remote, assert_in_time, start, until
from tests.support.proxies import Cable
from tests.support.queues import refuses, start_reader
from tests.support.remote_queues import (
    LIVENESS,
    PATIENT,
    connections_to,
    remote_writer,
    remote_writing,
    start_remote_reader,
)

LONG = 3 * LIVENESS


def stop_for_long(peer: Peer) -> None:
    peer.stop()
    time.sleep(LONG)  # a wait for what must not happen
    peer.resume()


def test_a_reader_that_cannot_connect_does_not_take_its_writer_for_dead() -> None:
    """It has had no time to connect again, so its writer is not dead."""
    with (
        remote_writer() as writer,
        Cable(writer.export_handle(0)) as cable,
    ):
        cable.handle.remote_liveness = LIVENESS
        reader = start_reader(cable.handle)
        reader.begin("dequeue", PATIENCE).until_blocked()
        cable.cut()
        until(lambda: writer.statistics().readers[0].state == "unknown")
        reader.peer.stop()
        cable.mend()
        time.sleep(LONG)
        reader.peer.resume()
        writer.enqueue("alive", PATIENCE)
        assert reader.outcome() == "alive"
        reader.call("close")


def blocked(link: Link, handle_of: int) -> None:
    """Role: a writer whose call waits for a reader, which it loses."""
    with remote_writer(remote_window=1, remote_liveness=LIVENESS) as writer:
        link.tell(writer.export_handle(handle_of))
        link.hear()
        writer.enqueue(1)
        waits = Aside(writer.enqueue, 2, PATIENCE).until_blocked()
        link.tell("waits")
        until(lambda: states(writer) == ["unknown"])
        link.tell("has lost it")
        waits.result()


def test_a_writer_that_cannot_be_reached_does_not_take_its_reader_for_dead() -> None:
    """Its reader could not come back, so it is not dead."""
    writer = start(blocked, 0)
    with Cable(writer.hear()) as cable:
        cable.handle.remote_liveness = PATIENT
        with MessageQueue.create_from_handle(cable.handle, 0) as reader:
            writer.tell()
            assert writer.hear() == "waits"
            cable.cut()
            assert writer.hear() == "has lost it"
            writer.stop()
            cable.mend()
            time.sleep(LONG)
            writer.resume()
            assert [reader.dequeue(PATIENCE) for _ in range(2)] == [1, 2]
            writer.result()


def test_a_reader_that_died_meanwhile_is_noticed() -> None:
    """The writer, whose interpreter was busy, notices that as soon as otherwise."""
    with remote_writer(remote_liveness=LIVENESS) as writer:
        reader = start_remote_reader(writer)
        with writer._writer.lock:  # type: ignore[union-attr]
            reader.peer.kill()
            time.sleep(4 * LIVENESS)
        begun = time.monotonic()
        until(lambda: states(writer) == ["dead"])
        assert_in_time(BOUND, begun)


def states(queue: MessageQueue) -> list[str]:
    return [row.state for row in queue.statistics().readers]


def closing(link: Link) -> str:
    """Role: a writer that closes; how that ended."""
    writer = remote_writer(remote_liveness=LIVENESS)
    link.tell(writer.export_handle(0))
    link.hear()
    writer.enqueue("message")
    try:
        writer.close()
    except TimedOut as error:
        return str(error)
    return "all have confirmed"


def test_a_writer_that_closes() -> None:
    """It listens before it says who has not confirmed."""
    writer = start(closing)
    with MessageQueue.create_from_handle(writer.hear(), 0) as reader:
        writer.tell()
        assert reader.dequeue(PATIENCE) == "message"
        stopping = Aside(stop_for_long, writer)
        with refuses(WriterClosed):
            reader.dequeue(PATIENCE)
        stopping.result()
        assert writer.result() == "all have confirmed"


def stops_while_it_attaches(link: Link, handle: Handle) -> object:
    """Role: stopped in the moment in which it looks whether it has attached."""
    check = NetworkReader.check

    def stop_and_check(self: NetworkReader) -> None:
        NetworkReader.check = check  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGSTOP)
        check(self)

    NetworkReader.check = stop_and_check  # type: ignore[method-assign]
    with MessageQueue.create_from_handle(handle, 0) as reader:
        return reader.dequeue(PATIENCE)


def test_a_reader_that_attaches() -> None:
    """It does not say that nobody has accepted its connection."""
    with remote_writer(remote_liveness=LIVENESS) as writer:
        reader = start(stops_while_it_attaches, writer.export_handle(0))
        stat = Path(f"/proc/{reader.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")
        time.sleep(4 * LIVENESS)
        reader.resume()
        writer.enqueue("message", PATIENCE)
        assert reader.result() == "message"


def test_a_writer_that_is_killed_before_it_answers() -> None:
    """A process that attaches gets an error: nobody listens there any more."""
    writer = Remote(start(remote_writing, 1))
    writer.peer.stop()
    attaching: Aside[Any] = Aside(MessageQueue.create_from_handle, writer.greeting, 0)
    until(lambda: connections_to(writer.greeting))
    writer.peer.kill()
    with refuses(WriterUnreachable, match="no process listens there any more"):
        attaching.result()
