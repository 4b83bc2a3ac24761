"""M10: forked children have copies that they can only close; locks and names stay the parent's.

Fails without the guard: a child that unlocks, unlinks or announces would end the parent's queue;
one that keeps the lock's descriptor would hide the parent's death.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from memlane import Handle, MessageQueue, ReaderDied, ShmRingBuffer, WriterDied, WrongProcess
from tests.support import Aside, Link, Peer, assert_in_time, start
from tests.support.queues import (
    BOUND,
    drain,
    fill,
    path_of,
    queue_of,
    refuses,
    ring_of,
    start_reader,
    sweep,
)

CALLS: dict[str, Callable[[MessageQueue, MessageQueue], object]] = {
    "enqueue": lambda writer, _: writer.enqueue(1, timeout=0),
    "acquire_write": lambda writer, _: writer.acquire_write(timeout=0).__enter__(),
    "writer ready": lambda writer, _: writer.wait_until_ready(timeout=0),
    "release_reader": lambda writer, _: writer.release_reader(0),
    "writer broadcast": lambda writer, _: writer.broadcast_object(1),
    "dequeue": lambda _, reader: reader.dequeue(timeout=0),
    "acquire_read": lambda _, reader: reader.acquire_read(timeout=0).__enter__(),
    "reader ready": lambda _, reader: reader.wait_until_ready(timeout=0),
    "reader broadcast": lambda _, reader: reader.broadcast_object(),
    "iteration": lambda _, reader: next(iter(reader)),
    "writer with": lambda writer, _: writer.__enter__(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_every_call_but_close_raises_wrong_process_in_a_child(
    call: Callable[[MessageQueue, MessageQueue], object],
) -> None:
    """Every call but close raises WrongProcess in the child, and changes nothing."""
    with queue_of() as (writer, (reader,)):
        writer.enqueue("for the parent")

        def child(_link: Link) -> None:
            with refuses(RuntimeError) as caught:
                call(writer, reader)
            assert isinstance(caught.value, WrongProcess)
            for end in (writer, reader):
                end.close()
                end.close()

        start(child).result()
        writer.enqueue("too")
        assert drain(reader) == ["for the parent", "too"]


def test_close_in_the_child_is_not_announced() -> None:
    """Peers in other processes see neither a close nor a death."""
    with MessageQueue(2, 2, None, 256, 2) as writer:
        remote = start_reader(writer.export_handle(0), 0)
        reader = MessageQueue.create_from_handle(writer.export_handle(1), 1)
        remote.begin("dequeue").until_blocked()

        def child(_link: Link) -> None:
            writer.close()
            reader.close()

        start(child).result()
        writer.enqueue(1, timeout=0)
        assert (remote.outcome(), reader.dequeue(timeout=0)) == (1, 1)
        assert fill(writer) == 2
        with refuses(TimeoutError):
            writer.enqueue("full, for nobody is gone", timeout=2 * BOUND)
        remote.call("close")
        reader.close()


def test_fork_while_a_thread_is_blocked() -> None:
    """The child can close an end that a thread of the parent was using at the fork."""
    with queue_of() as (writer, (reader,)):
        waits = Aside(reader.dequeue).until_blocked()

        def child(_link: Link) -> None:
            with refuses(WrongProcess):
                reader.dequeue(timeout=0)
            reader.close()
            writer.close()

        start(child).result()
        writer.enqueue(1)
        assert waits.result() == 1


def test_the_child_can_have_queues_of_its_own() -> None:
    """A forked child of a writer can attach as a reader, and be a writer of another queue."""
    with MessageQueue(1, 1, None, 256, 2) as writer:
        handle = writer.export_handle()

        def child(link: Link) -> object:
            with queue_of(1) as (own, (other,)), MessageQueue.create_from_handle(handle, 0) as end:
                own.enqueue(end.dequeue())
                link.tell()
                return other.dequeue()

        peer = start(child)
        writer.enqueue("down")
        peer.hear()
        assert peer.result() == "down"


def test_a_child_that_closes_a_ring_keeps_its_name() -> None:
    """A child that closes the creator's ring does not remove the name."""
    with ring_of() as ring:

        def child(_link: Link) -> None:
            ring.close()

        start(child).result()
        assert path_of(ring).exists()
        ShmRingBuffer(*ring.handle()).close()


def stay(alive: int) -> None:
    """Lives until the test closes the other end of the pipe."""
    os.read(alive, 1)
    os._exit(0)


def parent(link: Link, pipe: tuple[int, int], handle: Handle | None, how: str) -> None:
    """Role: has an end of a queue, leaves a child behind, is killed."""
    alive, hold = pipe
    os.close(hold)
    if handle is None:
        queue = MessageQueue(1, 1, None, 256, 2)
        link.tell(queue.export_handle())
    else:
        queue = MessageQueue.create_from_handle(handle, 0)
        link.tell()
    if how == "exec":
        code = "import os, sys; os.read(int(sys.argv[1]), 1)"
        os.set_inheritable(alive, True)
        command = [sys.executable, "-c", code, str(alive)]
        child = subprocess.Popen(command, close_fds=False).pid
    elif (child := os.fork()) == 0:
        if how == "fork and close":
            queue.close()
        stay(alive)
    link.tell(child)
    link.hear()


@pytest.fixture
def pipe() -> object:
    """The write end keeps the grandchild alive; it ends when the test does."""
    alive, hold = os.pipe()
    yield alive, hold
    os.close(alive)
    os.close(hold)


def lives(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] not in "ZX"


def doomed(pipe: tuple[int, int], handle: Handle | None, how: str) -> tuple[Peer, object, int]:
    peer = start(parent, pipe, handle, how)
    return peer, peer.hear(), peer.hear()


@pytest.mark.parametrize("how", ["fork", "fork and close", "exec"])
def test_a_writer_is_killed_while_its_child_lives(pipe: tuple[int, int], how: str) -> None:
    """The reader notices within 1 s, although the child has the memory and the descriptors."""
    peer, handle, child = doomed(pipe, None, how)
    assert isinstance(handle, Handle)
    with MessageQueue.create_from_handle(handle, 0) as reader:
        waits = Aside(reader.dequeue).until_blocked()
        killed = peer.kill()
        with refuses(WriterDied) as caught:
            waits.result()
        assert_in_time(BOUND, killed, waits.ended)
        assert caught.value.pid == peer.pid
        assert lives(child)
    sweep()


@pytest.mark.parametrize("how", ["fork", "fork and close", "exec"])
def test_a_reader_is_killed_while_its_child_lives(pipe: tuple[int, int], how: str) -> None:
    """The writer notices within 1 s, although the child has the memory and the descriptors."""
    with MessageQueue(1, 1, None, 256, 2) as writer:
        peer, _, child = doomed(pipe, writer.export_handle(), how)
        fill(writer)
        blocked = Aside(writer.enqueue, "never").until_blocked()
        killed = peer.kill()
        with refuses(ReaderDied) as caught:
            blocked.result()
        assert_in_time(BOUND, killed, blocked.ended)
        assert (caught.value.rank, caught.value.pid) == (0, peer.pid)
        assert lives(child)
