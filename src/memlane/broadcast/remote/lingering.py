"""The end of a writer: its readers get what is still on its way.

When libzmq has handed everything to the kernel it closes the connection; but an acknowledgement
that arrives after that makes the kernel drop what is not sent yet. So each connection is kept open
by another descriptor, told that nothing more comes, and read until the reader's end closes it.
libzmq at the reader's end does that also while its application computes.
"""

from __future__ import annotations

import select
import socket
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from memlane.broadcast.remote.end import SLICE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import zmq

    from memlane.broadcast.remote.peer import Peer
    from memlane.broadcast.remote.tcp import Connection


def answer_while(
    is_awaited: Callable[[Peer], bool],
    peers: Iterable[Peer],
    answer: Callable[[], float | None],
    news: Iterable[int],
    bound: float,
) -> None:
    """Answers readers, whose words those descriptors tell of, while one is awaited; no longer than
    `bound` seconds."""
    poller = select.poll()
    for descriptor in news:
        poller.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + bound
    while answer() is not None and any(map(is_awaited, peers)):
        if (left := deadline - time.monotonic()) <= 0:
            break
        poller.poll(int(min(left, SLICE) * 1000) + 1)


def close(
    context: zmq.Context[zmq.Socket[bytes]],
    listener: zmq.Socket[bytes],
    connections: Iterable[Connection | None],
    bound: float,
) -> None:
    """Returns when every reader has everything, at the latest after `bound` seconds."""
    deadline = time.monotonic() + bound
    with ExitStack() as stack:
        kept = []
        for connection in connections:
            if connection is not None and connection.is_open:
                with suppress(OSError):  # its reader had the end already, and has closed it since
                    kept.append(stack.enter_context(connection.copy()))
        listener.close(linger=int(bound * 1000))
        context.term()
        poller = select.poll()
        waiting = {}
        for one in kept:
            with suppress(OSError):  # ended meanwhile
                one.setblocking(False)
                one.shutdown(socket.SHUT_WR)
                poller.register(one, select.POLLIN)
                waiting[one.fileno()] = one
        while waiting and (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poller.poll(int(left * 1000) + 1):
                if _is_over(waiting[descriptor]):
                    poller.unregister(descriptor)
                    del waiting[descriptor]


def _is_over(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1 << 16)
    except BlockingIOError:
        return False
    except OSError:
        return True
