"""Queues whose remote readers are behind a relay, all in this process."""

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from memlane import MessageQueue
from memlane.broadcast.protocol.states import Link
from tests.harness import PATIENCE, Aside, until
from tests.queues import segments
from tests.remotes import remote_writer

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
    """How many streams of messages it sends."""
    peers = writer._writer.session._peers  # type: ignore[union-attr]
    return sum(peer.link is Link.STREAMING for peer in peers)


def relay_of(writer: MessageQueue) -> int:
    """The rank of the one reader that relays."""
    peers = writer._writer.session._peers  # type: ignore[union-attr]
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
