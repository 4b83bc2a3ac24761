"""A slow link: what is queued when the writer closes still arrives."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from memlane import Closed, Handle, TimedOut
from tests.support import PATIENCE, Aside
from tests.support.queues import start_reader
from tests.support.remote_queues import HERE, address_of, remote_writer

RATE = 3 << 20
"""Bytes a second."""


@contextmanager
def slow_way(handle: Handle, rate: int = RATE) -> Iterator[Handle]:
    """From the writer so many bytes a second at most; 0: none."""
    there = socket.create_connection(address_of(handle))
    there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)

    def carry(source: socket.socket, sink: socket.socket, most: int | None) -> None:
        with suppress(OSError):
            while most != 0 and (part := source.recv(1 << 16)):
                sink.sendall(part)
                if most:
                    time.sleep(len(part) / most)  # the link's, not the test's
            if most != 0:
                sink.shutdown(socket.SHUT_WR)

    with there, socket.create_server((HERE, 0)) as listener:

        def accept() -> None:
            here, _ = listener.accept()
            with here:
                up = threading.Thread(target=carry, args=(here, there, None))
                up.start()
                carry(there, here, rate)
                up.join()

        thread = threading.Thread(target=accept)
        thread.start()
        yield replace(handle, remote_subscribe_addr=f"tcp://{HERE}:{listener.getsockname()[1]}")
        thread.join()


def test_close_waits_while_there_is_progress() -> None:
    """Longer than the bound, and for all of it.

    Fails without the guard: close() waited for as long as the bound, and the rest was lost.
    """
    writer = remote_writer(1, remote_liveness=0.5)
    with slow_way(writer.export_handle(0)) as handle:
        reader = start_reader(handle, 0)
        for _ in range(6):
            writer.enqueue(bytes(1 << 20))
        began = time.monotonic()
        closing = Aside(writer.close)
        for _ in range(6):
            assert len(reader.call("dequeue", PATIENCE)) == 1 << 20
        with pytest.raises(Closed):
            reader.call("dequeue", PATIENCE)
        closing.result()
        assert time.monotonic() - began > 0.5
        reader.leave()


def test_close_names_who_is_left() -> None:
    """Its time over, everything is freed, and the reader hears of it."""
    writer = remote_writer(1, remote_liveness=4.0)
    with slow_way(writer.export_handle(0)) as handle:
        reader = start_reader(handle, 0)
        for _ in range(6):
            writer.enqueue(bytes(1 << 20))
        with pytest.raises(TimedOut, match=r"but reader 0 \(pid \d+ at") as raised:
            writer.close(timeout=0.1)
        assert raised.value.ranks == (0,)
        assert repr(writer).count("closed") == 1
        reader.leave()
