"""Remote ends that start and end in every way leave no socket, thread, context or descriptor.

The fixture of all tests checks that nothing is left; a context that is left has threads.
``MEMLANE_SOAK_STRANGERS`` from 1,000 on: 200 rounds, else 20.
"""

import gc
import os
import random
import resource
import signal
import socket
import threading
from contextlib import suppress
from typing import Any

import pytest

from memlane import Closed, Handle, MessageQueue, WriterUnreachable
from memlane._net import contexts
from memlane.broadcast.network.reader import NetworkReader
from memlane.broadcast.protocol.writer_session import WriterSession
from memlane.groups import TcpGroup
from tests.support import PATIENCE, Aside, Link, holdings, start, until
from tests.support.groups import SECRET
from tests.support.limits import descriptors, until_nothing_is_left, with_limits
from tests.support.queues import refuses
from tests.support.remote_queues import (
    HERE,
    LIVENESS,
    address_of,
    connections_to,
    remote_queue,
    remote_writer,
)
from tests.support.starts import NETWORK

ROUNDS = 200 if int(os.environ.get("MEMLANE_SOAK_STRANGERS", "0")) >= 1000 else 20


@pytest.mark.parametrize("name", NETWORK)
def test_an_end_with_few_descriptors_starts_or_leaves_nothing(name: str) -> None:
    """However few there are: an error and nothing left, or success in the end.

    Fails without the guard: libzmq ends the process (`new_context`).
    """
    outcome = start(with_limits, name, resource.RLIMIT_NOFILE, descriptors).result()
    assert outcome.startswith("failed"), outcome


@pytest.mark.parametrize("kind", ["writer", "reader", "group"])
def test_no_thread_can_be_started(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what was made before stays; nobody listens.

    The look for threads comes before; here other processes have taken them since.
    """
    monkeypatch.setattr(contexts, "need_threads", lambda _count: None)
    with remote_writer() as other:
        handle = other.export_handle()

        def refuse(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        before = holdings("memlane-")
        make = {
            "writer": remote_writer,
            "reader": lambda: MessageQueue.create_from_handle(handle, 0),
            "group": lambda: TcpGroup(HERE, 0, 0, 2, secret=SECRET),
        }[kind]
        with refuses(OSError, match="cannot start the thread 'memlane-"):
            make()
        monkeypatch.undo()
        until_nothing_is_left(before, "but for a moment at the other writer")
        MessageQueue.create_from_handle(handle, 0).close()


def test_an_address_that_is_not_ours() -> None:
    """Found only when everything else is made."""
    for _ in range(5):
        with refuses(ValueError):
            remote_writer(1, 1, connect_ip="192.0.2.1")


def test_many_rounds_leave_no_thread_or_descriptor() -> None:
    """Threads and descriptors are as many after each, however the ends are closed."""

    def now() -> tuple[int, int]:
        held = holdings("memlane-")
        return held.descriptors.total(), held.threads.total()

    def is_more(held: tuple[int, ...]) -> bool:
        return any(count > most for count, most in zip(held, least, strict=True))

    with remote_queue(2, 1):
        pass
    # Perhaps with a thread that was joined, and that the kernel still has.
    least: tuple[int, ...] = now()
    for number in range(ROUNDS):
        with remote_queue(2, number % 2, remote_liveness=LIVENESS) as (writer, readers):
            writer.enqueue(number)
            if number % 3:
                assert [reader.dequeue(PATIENCE) for reader in readers] == [number] * len(readers)
            if number % 4 == 1:
                writer.close()
            if number % 10 == 2:
                readers[-1]._finalizer()  # type: ignore[misc]  # a death
        until(lambda: not is_more(now()), f"no more than before round {number}")
        least = tuple(map(min, least, now()))


class Collects:
    """Collects garbage where something else was to be called, in the thread of an end."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.threads: list[str] = []

    def __call__(self) -> Any:
        gc.collect()
        self.threads.append(threading.current_thread().name)
        return self._call()


def test_a_finalizer_in_the_ends_own_thread() -> None:
    """An end that is garbage may be collected by its own thread, which then frees everything.

    Fails without the guard: it went on to listen, and the next collection hung.
    """
    gc.collect()
    gc.disable()
    try:
        writer: Any = remote_writer()
        remote = writer._writer
        collects = Collects(remote.transport.accept_authenticated)
        remote.transport.accept_authenticated = collects
        where, thread = address_of(writer.handle), remote._thread
        writer.itself = writer
        del writer, remote
        socket.create_connection(where).close()  # this wakes it
        until(lambda: not thread.is_alive())
        assert collects.threads == ["memlane-writer"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where)
    finally:
        gc.enable()


@pytest.mark.parametrize("first", ["ring", "network"])
def test_close_that_raises(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a mixed queue cannot be closed properly: the other half is."""
    with remote_queue(1, 1) as (writer, (local, remote)):
        end: Any = writer._writer
        owner = end._here.ring if first == "ring" else end.transport
        real = owner.close

        def raising(*timeout: float | None) -> None:
            real(*timeout)
            raise OSError("the name cannot be removed")

        monkeypatch.setattr(owner, "close", raising)
        with pytest.raises(OSError, match="cannot be removed"):
            writer.close()
        monkeypatch.undo()
        for reader in (local, remote):
            with refuses(Closed):
                reader.dequeue(PATIENCE)


def test_a_forked_child_keeps_what_is_not_ours() -> None:
    """Only that writer's sockets are closed in it, and not those of the same port elsewhere."""
    with remote_writer() as writer:
        port = address_of(writer.handle)[1]
        with socket.create_server(("127.0.0.2", port)):

            def child(_link: object) -> list[str]:
                return [
                    f"{name[0]}"
                    for number in map(int, os.listdir("/proc/self/fd"))
                    if (name := name_of(number)) and name[1] == port
                ]

            assert start(child).result() == ["127.0.0.2"]


def test_a_fork_leaves_the_sockets_of_others_alone() -> None:
    """Also where sockets have a default timeout, which makes each one non-blocking that is looked
    at.

    Fails without the guard: every socket of the parent was looked at in the child.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs, remote_writer():
        socket.setdefaulttimeout(PATIENCE)
        try:
            assert start(lambda _link: 1).result() == 1
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(ours.fileno())
        assert os.get_blocking(theirs.fileno())


def closed_by_a_handler(_link: Link, call: str) -> int:
    """Role: a signal handler closes writers in calls that are not one at a time.

    The alarm comes again: CPython 3.11 may overlook a signal for as long as the main thread runs
    alone, if another thread looked whether there is one when it came (4 of 35,000 here).
    """
    dice, count = random.Random(1), 0
    for _ in range(60):
        with remote_writer(2) as writer:
            signal.signal(signal.SIGALRM, lambda *_, writer=writer: writer.close())
            signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-5, 2e-3), 0.5)
            with suppress(Closed):
                while True:
                    writer.statistics() if call == "statistics" else writer.export_handle(1)
            signal.setitimer(signal.ITIMER_REAL, 0)
        count += 1
    return count


@pytest.mark.parametrize("call", ["statistics", "export_handle"])
def test_a_handler_closes_beside_a_call(call: str) -> None:
    """Nobody waits for himself.

    Fails without the guard: close() joined a thread that waited for the lock of the call.
    """
    assert start(closed_by_a_handler, call).result() == 60


def name_of(descriptor: int) -> Any:
    """Returns where that socket of the internet is bound; None if it is another kind of socket."""
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        return found.getsockname() if found.family == socket.AF_INET else None
    finally:
        found.detach()


def attaches_late(link: Link, handle: Handle) -> list[object]:
    """Its thread hears all that there is before the call that attaches comes to look."""
    until_attached = NetworkReader._until

    def late(self: NetworkReader, *arguments: Any) -> None:
        link.tell()
        link.hear()
        until_attached(self, *arguments)

    NetworkReader._until = late  # type: ignore[method-assign]
    with MessageQueue.create_from_handle(handle, 0, timeout=PATIENCE) as reader:
        return list(reader)


def test_writer_that_closes_while_a_reader_still_attaches() -> None:
    """A reader that the writer has let in has attached, and gets everything."""
    with remote_writer() as writer:
        reader = start(attaches_late, writer.export_handle(0))
        reader.hear()
        writer.wait_until_ready(PATIENCE)
        writer.enqueue("message")
        writer.close()
        reader.tell()
        assert reader.result() == ["message"]


def silent_writer(link: Link) -> None:
    """Lets readers connect, and answers nobody."""
    WriterSession._greet = lambda *_: (True, None)  # type: ignore[assignment, method-assign]
    with remote_writer() as writer:
        link.tell(writer.export_handle(0))
        link.hear()


def test_writer_that_dies_while_a_reader_attaches() -> None:
    """It is not waited for."""
    writer = start(silent_writer)
    handle = writer.hear()
    attaching = Aside(MessageQueue.create_from_handle, handle, 0)
    until(lambda: connections_to(handle))
    writer.kill()
    with refuses(WriterUnreachable, match="no process listens there any more"):
        attaching.result()
