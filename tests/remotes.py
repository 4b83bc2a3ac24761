"""Queues over the network for tests: on the loopback, in this process and in others."""

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from memlane import Handle, MessageQueue, TimedOut
from tests.harness import PATIENCE, Remote
from tests.queues import start_reader

HERE = "127.0.0.1"
LIVENESS = 1.0
"""Seconds after which an unreachable peer counts as dead in tests."""


class Writer(MessageQueue):
    """Its `with` block ignores readers that a test has killed; only `close()` raises for them."""

    def __exit__(self, *error: Any) -> None:
        with suppress(TimedOut):
            super().__exit__(*error)


def remote_writer(n_remote: int = 1, n_local: int = 0, **options: Any) -> MessageQueue:
    options = {"connect_ip": HERE, "remote_liveness": LIVENESS, "max_chunks": 4, **options}
    return Writer(n_remote + n_local, n_local, max_chunk_bytes=4096, **options)


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


def start_remote_reader(writer: MessageQueue, rank: int = 0, method: str = "fork") -> Remote:
    """An attached remote reader in its own process."""
    return start_reader(writer.export_handle(rank), rank, method)


def address_of(handle: Handle) -> tuple[str, int]:
    """Host and port of a handle."""
    assert handle.remote_subscribe_addr is not None
    host, _, port = handle.remote_subscribe_addr.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


class Cable:
    """A TCP proxy that a test can cut: connections through it end at once.

    If one side shuts down its direction, that is forwarded, and the other side can still send.
    """

    def __init__(self, handle: Handle) -> None:
        self._to = address_of(handle)
        self._listener = socket.create_server((HERE, 0))
        self._port = self._listener.getsockname()[1]
        self.handle = replace(handle, remote_subscribe_addr=f"tcp://{HERE}:{self._port}")
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._silent: set[socket.socket] = set()  # these have sent everything
        self._is_cut = False
        self._lock = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def cut(self, *, mend: bool = False) -> None:
        """End all connections; refuse new ones, or with `mend` accept them again."""
        with self._lock:
            self._is_cut = not mend
            for end in list(self._pairs):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Accept connections again."""
        with self._lock:
            self._is_cut = False

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Ends all connections; refuses new ones for the block, as if nobody listened."""
        self.cut()
        self._stop()
        self._listener.close()
        yield
        self._listener = socket.create_server((HERE, self._port))
        self._is_cut = self._closing = False
        self._woken.recv(1)
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        self._closing = True
        self._wake.send(b"x")
        self._thread.join()

    def close(self) -> None:
        self._stop()
        for end in (self._listener, self._wake, self._woken, *self._pairs):
            end.close()

    def __enter__(self) -> "Cable":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _carry(self) -> None:
        while not self._closing:
            speaking = self._pairs.keys() - self._silent
            ready, _, _ = select.select([self._listener, self._woken, *speaking], [], [])
            with self._lock:
                for end in ready:
                    if end is self._listener:
                        self._accept()
                    elif end in self._pairs:
                        self._pass_on(end)

    def _accept(self) -> None:
        here, _ = self._listener.accept()
        if self._is_cut:
            here.close()
            return
        try:
            there = socket.create_connection(self._to)
        except ConnectionRefusedError:  # the writer is gone
            here.close()
            return
        self._pairs[here], self._pairs[there] = there, here

    def _pass_on(self, end: socket.socket) -> None:
        other = self._pairs[end]
        try:
            data = end.recv(1 << 16)
            if data:
                other.sendall(data)
                return
            self._silent.add(end)
            other.shutdown(socket.SHUT_WR)
            if other not in self._silent:
                return
        except OSError:  # one of them was reset
            pass
        for one in (end, other):
            del self._pairs[one]
            self._silent.discard(one)
            one.close()
