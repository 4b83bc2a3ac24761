"""Readers and writers on other hosts that are stopped, killed, cut off, or come back (M4, M5).

Fails without the guard: with PUB and SUB, or without `Outbox`, the stopped reader misses messages;
with ZeroMQ's own heartbeats or TCP_USER_TIMEOUT it counts as dead.
"""

import ctypes
import gc
import os
import signal
import time

import pytest

from memlane import MessageQueue, RankTaken, ReaderDied, ReaderGivenUp, TimedOut, WriterDied
from memlane.testing import stalls
from tests.support import PATIENCE, Aside, Link, Remote, assert_in_time, serve, start, until
from tests.support.proxies import Cable
from tests.support.queues import refuses
from tests.support.remote_queues import (
    LIVENESS,
    bytes_sent,
    remote_queue,
    remote_writer,
    remote_writing,
    start_remote_reader,
)
from tests.support.traffic import SIZE, numbered, read_numbered, write_numbered

BOUND = LIVENESS + 1.5
"""Until a death is noticed here, in tests with that bound."""


def test_a_stopped_remote_reader_is_not_dead(method: str) -> None:
    """Stopped is not dead, for longer than the bound and with full buffers: nothing is lost."""
    count = 2000
    with remote_writer(remote_liveness=0.5) as writer:
        reader = start_remote_reader(writer, 0, method)
        reader.begin(read_numbered)
        reader.peer.stop()
        with stalls(0.1) as lines:
            writes = Aside(write_numbered, writer, count)
            time.sleep(4 * 0.5)  # a wait for what must not happen
            until(lambda: lines)
        assert writer.statistics().readers[0].state == "running"
        assert f"reader 0 (pid {reader.pid} at" in lines[0]
        reader.peer.resume()
        writes.result()
        writer.close()
        read, error, _ = reader.outcome()
        assert (read, type(error).__name__) == (count, "WriterClosed")
        reader.call("close")


def test_a_reader_that_computes_is_not_dead() -> None:
    """It makes no call for longer than the bound: it is not dead, and misses nothing."""
    with remote_writer(remote_liveness=LIVENESS) as writer:
        reader = start_remote_reader(writer)
        reader.begin(compute, 2 * LIVENESS)
        for number in range(100):
            writer.enqueue(numbered(number), PATIENCE)
        reader.outcome()
        writer.enqueue(numbered(100), PATIENCE)
        writer.close()
        assert reader.call(read_numbered)[0] == 101
        reader.call("close")


def compute(_queue: MessageQueue, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(100_000))


def test_a_stopped_writer_is_waited_for(method: str) -> None:
    """Its readers wait for it."""
    writer = Remote(start(remote_writing, 1, LIVENESS, method=method))
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        writer.peer.stop()
        with refuses(TimeoutError):
            reader.dequeue(timeout=2 * LIVENESS)
        writer.peer.resume()
        writer.call("enqueue", 1)
        assert reader.dequeue(PATIENCE) == 1
        writer.call("close")


def test_a_killed_reader_is_named_until_released(method: str) -> None:
    """ReaderDied with rank, pid and address, in the call that is blocked, again and again until it
    is released; the other readers go on."""
    with remote_writer(2, remote_window=5, remote_liveness=LIVENESS) as writer:
        doomed = start_remote_reader(writer, 1, method)
        stays = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        reads = Aside(read_numbered, stays)
        for number in range(5):
            writer.enqueue(numbered(number, 8))
        writes = Aside(writer.enqueue, "blocked").until_blocked()
        killed = doomed.peer.kill()
        with refuses(ReaderDied) as caught:
            writes.result()
        assert writes.ended - killed >= LIVENESS
        assert_in_time(BOUND, killed, writes.ended)
        assert (caught.value.rank, caught.value.pid) == (1, doomed.pid)
        assert "127.0.0.1:" in str(caught.value)
        with refuses(ReaderDied):
            writer.enqueue("again", timeout=0)
        with refuses(ReaderDied):
            writer.wait_until_ready(0)
        assert writer.statistics().readers[1].state == "dead"
        writer.release_reader(1)
        for number in range(5, 50):
            writer.enqueue(numbered(number, 8), PATIENCE)
        writer.close()
        assert reads.result()[0] == 50
        stays.close()


def test_a_killed_reader_of_an_idle_writer_is_reported() -> None:
    """The first call after the bound raises, and has sent nothing."""
    with remote_writer(remote_liveness=LIVENESS) as writer:
        reader = start_remote_reader(writer)
        reader.peer.kill()
        until(lambda: writer.statistics().readers[0].state == "dead")
        with refuses(ReaderDied):
            writer.enqueue(1)
        assert writer.statistics().messages == 0
        writer.release_reader(0)
        writer.enqueue(1)


def test_readers_get_everything_of_a_killed_writer_first(method: str) -> None:
    """Each reader first gets what has come, without a gap, then WriterDied (M5)."""
    writer = Remote(start(remote_writing, 2, LIVENESS, method=method))
    readers = [MessageQueue.create_from_handle(writer.greeting, rank) for rank in range(2)]
    writer.call(write_numbered, 20)
    for reader in readers:
        assert reader.dequeue(PATIENCE) == numbered(0)
    killed = writer.peer.kill()
    for reader in readers:
        _, error, moment = read_numbered(reader, 1)
        assert isinstance(error, WriterDied), error
        assert error.pid == writer.pid
        assert_in_time(BOUND, killed, moment)
        reader.close()


def test_a_late_reader_gets_the_messages_of_a_killed_writer(method: str) -> None:
    """Messages that have come are there, however long after the writer's death they are taken."""
    writer = Remote(start(remote_writing, 1, method=method))
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        writer.call(write_numbered, 30)
        reader.dequeue(PATIENCE)
        until(lambda: writer.call(bytes_sent) >= 30 * SIZE, "everything has come")
        writer.peer.kill()
        session = reader._reader.session  # type: ignore[union-attr]
        until(lambda: not session.connection.is_connected, "the loss of the connection is seen")
        count, error, _ = read_numbered(reader, 1)
        assert isinstance(error, WriterDied), error
        assert count == 30


def test_a_killed_writer_has_no_ear() -> None:
    """Its host refuses connections to it: readers need not wait for the bound."""
    writer = Remote(start(remote_writing, 1))
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        killed = writer.peer.kill()
        _, error, moment = read_numbered(reader, 0)
        assert isinstance(error, WriterDied), error
        assert_in_time(1.0, killed, moment)


def test_an_exit_without_close_is_a_death() -> None:
    """Dropping the last reference frees sockets and thread, and announces nothing."""
    writer = remote_writer(2, remote_liveness=LIVENESS)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    gone = MessageQueue.create_from_handle(writer.export_handle(), 1)
    del gone
    gc.collect()
    with refuses(ReaderDied):
        while True:
            writer.enqueue(1, PATIENCE)
            assert reader.dequeue(PATIENCE) == 1
    del writer
    gc.collect()
    with refuses(WriterDied):
        reader.dequeue(PATIENCE)
    reader.close()


def test_a_connection_that_comes_back() -> None:
    """Within the bound everything goes on: nothing lost, nothing twice, large messages too."""
    count, size = 200, 300_000
    with (
        remote_writer() as writer,
        Cable(writer.export_handle(0)) as cable,
        MessageQueue.create_from_handle(cable.handle, 0) as reader,
    ):
        reads = Aside(read_numbered, reader)
        for number in range(count):
            writer.enqueue(numbered(number, size), PATIENCE)
            if number % 60 == 30:
                cable.cut(mend=True)
        cable.cut()
        until(lambda: writer.statistics().readers[0].state == "unknown")
        closes = Aside(writer.close)  # also of a reader that is coming back
        cable.mend()
        closes.result()
        read, error, _ = reads.result()
        assert (read, type(error).__name__) == (count, "WriterClosed")


def test_a_connection_that_does_not_come_back() -> None:
    """After the bound both sides raise, and when it is back they do so still."""
    with (
        remote_writer(1, remote_window=2, remote_liveness=LIVENESS) as writer,
        Cable(writer.export_handle(0)) as cable,
    ):
        reader = MessageQueue.create_from_handle(cable.handle, 0)
        reads = Aside(reader.dequeue).until_blocked()
        moment = time.monotonic()
        cable.cut()
        with refuses(ReaderDied, match="was lost and not restored"):
            while True:
                writer.enqueue(1, PATIENCE)
        assert time.monotonic() - moment >= LIVENESS
        assert_in_time(BOUND, moment)
        with refuses(WriterDied):
            reads.result()
        assert_in_time(BOUND, moment, reads.ended)
        cable.mend()
        with refuses(WriterDied):
            reader.dequeue(PATIENCE)
        with refuses(ReaderDied):
            writer.enqueue(1)
        reader.close()


def test_deaths_of_a_mixed_queue_are_found_here_and_elsewhere() -> None:
    """A death here is found while the writer waits for a reader elsewhere, and the reverse."""
    options = {"remote_window": 1, "remote_liveness": LIVENESS}
    with remote_queue(1, 1, **options) as (writer, (local, remote)):
        writer.enqueue(1)
        writes = Aside(writer.enqueue, 2).until_blocked()
        local._finalizer()  # type: ignore[misc]  # gone without a close
        with refuses(ReaderDied) as caught:
            writes.result()
        assert caught.value.rank == 0
        writer.release_reader(0)
        assert remote.dequeue(PATIENCE) == 1
        writer.enqueue(2, PATIENCE)
        remote._finalizer()  # type: ignore[misc]
        with refuses(ReaderDied) as caught:
            writer.enqueue(3, PATIENCE)
            writer.enqueue(4, PATIENCE)
        assert caught.value.rank == 1
        writer.release_reader(1)
        writer.enqueue(3)
    with remote_queue(1, 1, remote_liveness=LIVENESS) as (writer, (local, remote)):
        for number in range(4):
            writer.enqueue(number)
        writes = Aside(writer.enqueue, "the ring is full").until_blocked()
        remote._finalizer()  # type: ignore[misc]
        with refuses(ReaderDied) as caught:
            writes.result()
        assert caught.value.rank == 1
        assert [local.dequeue(PATIENCE) for _ in range(4)] == [0, 1, 2, 3]


def test_attaching_to_a_stopped_writer_waits_for_it() -> None:
    """It is waited for as long as the call may last, by name, and then attached to."""
    writer = start(remote_writing, 1)
    handle = writer.hear()
    writer.stop()
    words = r"waiting for the writer \(at tcp://.*, accepted, unanswered for"
    with refuses(TimedOut, match=words):
        MessageQueue.create_from_handle(handle, 0, timeout=0.5)
    writer.resume()
    with MessageQueue.create_from_handle(handle, 0, timeout=PATIENCE):
        pass
    writer.kill()


def test_a_successor_is_refused_and_does_not_hide_the_death() -> None:
    """A process that comes with a dead reader's handle, again and again, cannot take its place."""

    def is_dead() -> bool:
        with refuses(RankTaken, ReaderGivenUp):
            MessageQueue.create_from_handle(writer.export_handle(0), 0)
        return writer.statistics().readers[0].state == "dead"

    with remote_writer(remote_liveness=LIVENESS) as writer:
        start_remote_reader(writer).peer.kill()
        until(is_dead)
        with refuses(ReaderDied):
            writer.enqueue(1)


@pytest.mark.parametrize("end", ["writer", "reader"])
def test_a_forked_child_may_only_close_an_end(end: str) -> None:
    """Only close() may be called there; it changes nothing, and keeps no dead parent alive."""
    parent = Remote(start(forking_writer if end == "writer" else serving))
    if end == "writer":
        with MessageQueue.create_from_handle(parent.greeting, 0) as reader:
            child = parent.call(fork)
            parent.call("enqueue", 1)
            assert reader.dequeue(PATIENCE) == 1
            parent.peer.kill()
            with refuses(WriterDied):
                reader.dequeue(PATIENCE)
            os.kill(child, 9)
        return
    with remote_writer(remote_liveness=LIVENESS) as writer:
        parent.peer.tell((attach, (writer.export_handle(0),), {}))
        assert parent.peer.hear() == "begun"
        child = parent.outcome()
        writer.enqueue(1)
        parent.peer.kill()
        with refuses(ReaderDied):
            while True:
                writer.enqueue(1, PATIENCE)
        os.kill(child, 9)


def test_a_fork_just_after_a_reader_has_attached() -> None:
    """libzmq has reported the connection, but the writer's thread has not read that yet.

    Fails without the guard: the child kept the dead writer's connection open.
    """
    parent = Remote(start(forking_writer, True))
    with MessageQueue.create_from_handle(parent.greeting, 0) as reader:
        child = parent.call(fork)
        parent.peer.kill()
        try:
            with refuses(WriterDied):
                reader.dequeue(PATIENCE)
        finally:
            os.kill(child, 9)


def test_a_child_that_c_code_forks_hides_no_death() -> None:
    """It keeps no dead writer alive either, though Python hears of no fork."""
    writer = start(forking_by_c)
    with MessageQueue.create_from_handle(writer.hear(), 0) as reader:
        assert reader.dequeue(PATIENCE) == "before"
        writer.tell("fork")
        child = writer.hear()
        writer.kill()
        try:
            with refuses(WriterDied):
                reader.dequeue(PATIENCE)
        finally:
            os.kill(child, 9)


def forking_by_c(link: Link) -> None:
    """Role: a writer whose child knows nothing of Python."""
    libc = ctypes.PyDLL(None)
    with remote_writer() as writer:
        link.tell(writer.export_handle())
        writer.enqueue("before")
        link.hear()
        child = libc.fork()
        if child == 0:
            while True:
                libc.pause()
        link.tell(child)
        signal.pause()


def forking_writer(link: Link, reads_no_events: bool = False) -> None:
    writer = remote_writer()
    if reads_no_events:
        writer._writer.transport.events = lambda: iter(())  # type: ignore
    serve(link, writer, writer.export_handle())


def serving(link: Link) -> None:
    serve(link, KEPT)


KEPT: list[MessageQueue] = []


def attach(kept: list[MessageQueue], handle: object) -> int:
    kept.append(MessageQueue.create_from_handle(handle, 0))  # type: ignore[arg-type]
    return fork(kept[0])


def fork(queue: MessageQueue) -> int:
    """A child that checks what it may call, and stays."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call = queue.enqueue if queue._is_writer else queue.broadcast_object
            try:
                call(1)
            except RuntimeError as error:
                os.write(write, type(error).__name__.encode())
            queue.close()
            time.sleep(10 * PATIENCE)
        finally:
            os._exit(0)
    said = os.read(read, 100)
    os.close(read)
    os.close(write)
    assert said == b"WrongProcess", said
    return child


def test_a_remote_reader_that_dies_while_a_local_one_is_waited_for() -> None:
    """The wait until all are ready ends with its death, as that of a local reader ends it."""
    with remote_writer(1, 1, remote_liveness=LIVENESS) as writer:
        remote = start_remote_reader(writer, 1)
        waits = Aside(writer.wait_until_ready, PATIENCE).until_blocked()
        killed = remote.peer.kill()
        with refuses(ReaderDied) as caught:
            waits.result()
        assert_in_time(BOUND, killed, waits.ended)
        assert (caught.value.rank, caught.value.pid) == (1, remote.pid)


def test_a_wait_for_a_local_reader_shows_the_timeout_that_was_passed() -> None:
    """Not what was left of it when the remote ones had attached."""
    with (
        remote_writer(1, 1) as writer,
        MessageQueue.create_from_handle(writer.export_handle(1), 1),
        refuses(TimedOut, match=r"after 0\.25 s waiting for reader 0"),
    ):
        writer.wait_until_ready(0.25)
