"""Queues whose remote readers stand behind a relay, all in this process."""

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from memlane import Handle, MessageQueue
from memlane.broadcast.relay import relaying_reader
from tests.harness import PATIENCE, Aside
from tests.remotes import remote_writer

_ACKNOWLEDGED = struct.Struct("120xQ")  # tcpi_bytes_acked of `struct tcp_info` (linux/tcp.h)


def relaying(handle: Handle, ranks: list[int], chunks: tuple[int, int] = (4096, 4)) -> MessageQueue:
    """The first of the ranks, which relays to all of them."""
    made = relaying_reader(handle, ranks[0], ranks, *chunks)
    queue = MessageQueue.__new__(MessageQueue)
    queue._setup(made.handle, made.geometry, None, made)
    return queue


@contextmanager
def relayed_queue(
    n_readers: int = 3, handle: Any = None, **options: Any
) -> Iterator[tuple[MessageQueue, list[MessageQueue]]]:
    """A writer and readers that all get their messages through the first of them."""
    ranks = list(range(n_readers))
    with ExitStack() as stack:
        writer = stack.enter_context(remote_writer(n_readers, **options))
        writer._writer.relay_through(0, ranks)  # type: ignore[union-attr]
        exported = writer.export_handle(0)
        readers = [relaying(exported if handle is None else handle(exported), ranks)]
        stack.callback(readers[0].close)
        for rank in ranks[1:]:
            readers.append(MessageQueue.create_from_handle(readers[0].handle, rank))
            stack.callback(readers[-1].close)
        ready = [Aside(end.wait_until_ready, PATIENCE) for end in (writer, *readers)]
        for each in ready:
            each.result()
        yield writer, readers


def bytes_sent(writer: MessageQueue) -> int:
    """What the readers' hosts have acknowledged of this writer's connections."""
    total = 0
    for peer in writer._writer.remote.peers:  # type: ignore[union-attr]
        if peer.connection is not None:
            with socket.fromfd(
                peer.connection.descriptor, socket.AF_INET, socket.SOCK_STREAM
            ) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
            total += _ACKNOWLEDGED.unpack_from(info)[0]
    return total
