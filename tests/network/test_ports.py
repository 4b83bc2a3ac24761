"""The ports that a writer listens on for readers of other hosts."""

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from memlane import InvalidArgument, InvalidType, MessageQueue, SystemFault
from tests.support import PATIENCE
from tests.support.queues import refuses
from tests.support.remote_queues import remote_queue


@contextmanager
def taken(count: int) -> Iterator[range]:
    """Ports in a row: another program listens on `count` of them, and the last one is free."""
    for first in range(20_000, 32_000, 10):
        ports = range(first, first + count + 1)
        listeners = [socket.socket() for _ in ports]
        try:
            for port, listener in zip(ports, listeners, strict=True):
                listener.bind(("127.0.0.1", port))
                listener.listen()
            listeners.pop().close()
            yield ports
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        finally:
            for listener in listeners:
                listener.close()


def port_of(writer: MessageQueue) -> int:
    address = writer.handle.remote_subscribe_addr
    assert address is not None
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("way", ["port", "environment"])
def test_a_writer_listens_on_the_first_free_port_of_a_range(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with taken(3) as ports:
        text = f"{ports[0]}-{ports[-1]}"
        options: dict[str, Any] = {"port": text} if way == "port" else {}
        monkeypatch.setenv("MEMLANE_PORTS", "1-1" if way == "port" else text)
        with remote_queue(**options) as (writer, (reader,)):
            assert port_of(writer) == ports[-1]
            writer.enqueue("there")
            assert reader.dequeue(PATIENCE) == "there"
            with pytest.raises(SystemFault, match=f"port {ports[0]} to {ports[-1]} is in use"):
                MessageQueue(1, 0, connect_ip="127.0.0.1", port=text)
        with MessageQueue(1, 0, connect_ip="127.0.0.1", port=ports[-1]) as writer:
            assert port_of(writer) == ports[-1]


@pytest.mark.parametrize(
    "port", ["", "1-", "-1", "2-1", "65536", 0, -1, "a", "1-2-3", "0-5", " 1", "9" * 5000, 1 << 70]
)
def test_what_is_no_port_is_refused_on_every_queue(
    port: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refuses(InvalidArgument, match="port must be a port, or a range"):
        MessageQueue(1, port=port)
    for wrong in (True, 1.0, [1]):
        with refuses(InvalidType):
            MessageQueue(1, port=wrong)  # type: ignore[arg-type]
    if isinstance(port, str) and 0 < len(port) < 9:
        monkeypatch.setenv("MEMLANE_PORTS", port)
        MessageQueue(1).close()  # which has no network
        with refuses(InvalidArgument, match="MEMLANE_PORTS must be a port, or a range"):
            MessageQueue(1, 0, connect_ip="127.0.0.1")
