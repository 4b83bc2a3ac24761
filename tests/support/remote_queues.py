"""Queues over the network for tests: on the loopback, in any process, also behind a relay."""

import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from memlane import Closed, Handle, MessageQueue, TimedOut
from tests.support import PATIENCE, Alarm, Aside, Link, Remote, alarm_after, serve, until
from tests.support.queues import segments, start_reader

HERE = "127.0.0.1"
LIVENESS = 1.0
"""Seconds after which an unreachable peer counts as dead in tests of that."""
PATIENT = 10.0
"""The same in all others: on a busy machine a peer may be silent for seconds."""
BRIEF = {"remote_liveness": 3.0}
"""The same where one of several peers dies and the others must not."""


class Writer(MessageQueue):
    """Its `with` block does not wait for readers that never came, or that a test has killed; only
    `close()` does, and raises for them."""

    def __exit__(self, *error: Any) -> None:
        is_waited_for = self._is_closed or all(
            row.state in ("running", "closed") for row in self.statistics().readers
        )
        with suppress(TimedOut):
            self.close(None if is_waited_for else LIVENESS)


def remote_writer(n_remote: int = 1, n_local: int = 0, **options: Any) -> MessageQueue:
    options = {"connect_ip": HERE, "remote_liveness": PATIENT, "max_chunks": 4, **options}
    return Writer(n_remote + n_local, n_local, max_chunk_bytes=4096, **options)


def enqueue_and_go_on(writer: MessageQueue, message: object = "message") -> None:
    """Enqueues; an error that a signal handler raises after the message was sent is raised here, at
    the latest."""
    writer.enqueue(message)
    os.getpid()


@contextmanager
def remote_queue(
    n_remote: int = 1, n_local: int = 0, **options: Any
) -> Iterator[tuple[MessageQueue, list[MessageQueue]]]:
    """A writer and its readers, the local ones first, all in this process."""
    with ExitStack() as stack:
        writer = remote_writer(n_remote, n_local, **options)
        stack.push(writer)
        readers = []
        for rank in range(n_local + n_remote):
            readers.append(MessageQueue.create_from_handle(writer.export_handle(rank), rank))
            stack.callback(readers[-1].close)
        writer.wait_until_ready(PATIENCE)
        yield writer, readers


def reading_all(
    link: Link,
    handle: Handle,
    rank: int,
    number_of: Callable[[Any], int],
    longest: float = 0.0,
) -> tuple[list[int], int]:
    """Role: reads to the end, interrupted after so many seconds at most (0: never); returns the
    numbers of the messages that came, and how many calls were interrupted."""
    dice, count = random.Random(rank), 0
    got: list[int] = []
    with MessageQueue.create_from_handle(handle, rank) as reader:
        link.tell("attached")
        while True:
            try:
                with alarm_after(dice.uniform(1e-6, longest)) if longest else nullcontext():
                    message = reader.dequeue(PATIENCE)
            except Alarm:
                count += 1
            except Closed:
                return got, count
            else:
                got.append(number_of(message))


def start_remote_reader(writer: MessageQueue, rank: int = 0, method: str = "fork") -> Remote:
    """An attached remote reader in its own process."""
    return start_reader(writer.export_handle(rank), rank, method)


def address_of(handle: Handle) -> tuple[str, int]:
    """Host and port of a handle."""
    assert handle.remote_subscribe_addr is not None
    host, _, port = handle.remote_subscribe_addr.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def remote_writing(link: Link, n_remote: int, liveness: float = PATIENT) -> None:
    writer = remote_writer(n_remote, remote_liveness=liveness)
    serve(link, writer, writer.export_handle())


def connections_to(handle: Handle) -> int:
    """Returns how many connections to that writer are established on this host."""
    port = f":{address_of(handle)[1]:04X}"
    rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(port) and row[3] == "01" for row in rows)


_ACKNOWLEDGED = struct.Struct("120xQ")  # tcpi_bytes_acked of `struct tcp_info` (linux/tcp.h)


@contextmanager
def relayed_queue(
    n_readers: int = 3, handle: Any = None, **options: Any
) -> Iterator[tuple[MessageQueue, list[MessageQueue]]]:
    """A writer and readers that all get their messages through the first of them."""
    before = segments()
    with ExitStack() as stack:
        writer = stack.enter_context(remote_writer(n_readers, relay=True, **options))
        readers: list[MessageQueue] = []
        for rank in range(n_readers):
            exported = writer.export_handle(rank)
            exported = exported if handle is None else handle(exported)
            readers.append(MessageQueue.create_from_handle(exported, rank))
            stack.callback(readers[-1].close)
        ready = [Aside(end.wait_until_ready, PATIENCE) for end in (writer, *readers)]
        for each in ready:
            each.result()
        assert connections_of(writer) == 1
        until(lambda: segments() == before, "the name of the ring has gone")
        yield writer, readers


def connections_of(writer: MessageQueue) -> int:
    """Returns how many streams of messages it sends."""
    peers = writer._writer.session._peers  # type: ignore[union-attr]
    return sum(peer.link.name == "STREAMING" for peer in peers)


def relay_of(writer: MessageQueue) -> int:
    """The rank of the one reader that relays."""
    peers = writer._writer.session._peers  # type: ignore[union-attr]
    relay: int
    (relay,) = {peer.via.rank for peer in peers if peer.via is not None}
    return relay


def bytes_sent(writer: MessageQueue) -> int:
    """Bytes that the readers' hosts have acknowledged on this writer's connections."""
    total = 0
    transport = writer._writer.transport  # type: ignore[union-attr]
    for connection in transport.connections.values():
        with socket.fromfd(connection.descriptor, socket.AF_INET, socket.SOCK_STREAM) as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
        total += _ACKNOWLEDGED.unpack_from(info)[0]
    return total
