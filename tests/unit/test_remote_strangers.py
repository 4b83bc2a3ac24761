"""M11, M18: who has not proven an expected key is neither counted, nor heard, nor decoded.

``MEMLANE_SOAK_STRANGERS`` is how many of each kind come (default 40). Fails without the guard: with
`Keys.guard` left out the garbage below reaches the writer's `hear`.
"""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import zmq

from memlane import AccessRefused, Handle, MessageQueue
from memlane.broadcast.remote import wire
from tests.harness import PATIENCE, until
from tests.queues import refuses
from tests.remotes import address_of, remote_queue, remote_writer

STRANGERS = int(os.environ.get("MEMLANE_SOAK_STRANGERS", "40"))
pytestmark = pytest.mark.soak(seconds=60 + STRANGERS // 4)

GARBAGE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x80\x05cos\nsystem\n(S'true'\ntR.",
    os.urandom(4096),
    b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31),
    # a frame of 2**62 bytes, announced after the greeting of ZMTP 3.1
    b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE".ljust(23, b"\0") + bytes(32) + b"\x02" + b"\x40" * 8,
]


@contextmanager
def undisturbed() -> Iterator[MessageQueue]:
    """A writer whose one reader of two gets everything meanwhile, and who sees nobody else."""
    with remote_writer(2) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        writer.enqueue("before")
        assert reader.dequeue(PATIENCE) == "before"
        yield writer
        for number in range(20):
            writer.enqueue(number, PATIENCE)
        assert [reader.dequeue(PATIENCE) for _ in range(20)] == list(range(20))
        assert [row.state for row in writer.statistics().readers] == ["running", "absent"]
        with refuses(TimeoutError, match="reader 1"):
            writer.wait_until_ready(0)
        reader.close()


def heard(writer: MessageQueue, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Everything that is parsed from now on."""
    seen: list[bytes] = []
    real = wire.header_of

    def spy(part: bytes) -> wire.Header:
        seen.append(part)
        return real(part)

    monkeypatch.setattr("memlane.broadcast.remote.attending.header_of", spy)
    return seen


def test_bytes_of_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they send, their connection ends, and nothing of it is parsed."""
    with undisturbed() as writer:
        seen = heard(writer, monkeypatch)
        for number in range(STRANGERS):
            with socket.create_connection(address_of(writer.handle)) as stranger:
                stranger.sendall(GARBAGE[number % len(GARBAGE)])
        assert not [part for part in seen if not part.startswith(b"mlq")]


def test_half_open_connections() -> None:
    """Those that say nothing are ended within the time of a handshake."""
    with undisturbed() as writer, ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(address_of(writer.handle), PATIENCE))
            for _ in range(STRANGERS)
        ]
        for one in silent:
            while one.recv(4096):
                pass  # its greeting; then the end


@contextmanager
def knocking(handle: Handle, secret: str | None, server_key: str) -> Iterator[zmq.Socket[bytes]]:
    """A DEALER that says hello over and over; without a secret it makes a key up."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.LINGER, 0)
    if server_key:
        public, made_up = zmq.curve_keypair()
        if secret is not None:
            public, made_up = zmq.curve_public(secret.encode()), secret.encode()
        dealer.set(zmq.CURVE_SERVERKEY, server_key.encode())
        dealer.set(zmq.CURVE_PUBLICKEY, public)
        dealer.set(zmq.CURVE_SECRETKEY, made_up)
    assert handle.remote_subscribe_addr is not None
    dealer.connect(handle.remote_subscribe_addr)
    dealer.send(hello(handle))
    try:
        yield dealer
    finally:
        dealer.close(0)
        context.term()


def hello(handle: Handle, rank: int = 1, token: str = "") -> bytes:
    body = wire.Hello(handle.queue_id, rank, 1, b"s" * 16, token, 0, 0, 0, "")
    return wire.control(wire.Header(wire.What.HELLO, 0), body)


def test_keys_of_strangers() -> None:
    """A wrong server key, the right one with a key that is not listed, or none: never a frame."""
    _, other = zmq.curve_keypair()
    with undisturbed() as writer:
        handle = writer.export_handle(1)
        wrong = zmq.curve_public(other).decode()
        for server_key in (handle.remote_server_key, wrong, ""):
            for _ in range(max(1, STRANGERS // 20)):
                with knocking(handle, None, server_key) as dealer:
                    assert not dealer.poll(20)
        handle.remote_reader_keys = [zmq.curve_keypair()[1].decode()]
        with refuses(PermissionError) as caught:
            MessageQueue.create_from_handle(handle, 1)
        assert isinstance(caught.value, AccessRefused)


def test_what_a_listed_reader_may_not_send() -> None:
    """Broken and replayed frames change nothing; an oversized one ends its connection."""
    with remote_writer(2) as writer:
        other = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        handle = writer.export_handle(1)
        frames = [
            b"",
            b"mlq",
            os.urandom(48),
            wire.control(wire.Header(wire.What.ACK, 12345, 1)),
            wire.control(wire.Header(wire.What.MESSAGE, 12345, 1)),
            wire.control(wire.Header(wire.What.HELLO, 0)) + b"\xc1",
            hello(handle, rank=1 << 63),
            hello(handle, rank=0),
            hello(handle, rank=-5),
            struct.pack("<3sB", b"mlq", 200) + bytes(44),
        ]
        with knocking(handle, handle.remote_reader_keys[0], handle.remote_server_key) as dealer:
            assert dealer.poll(int(PATIENCE * 1000))  # it is let in: this is reader 1
            epoch = wire.header_of(dealer.recv()).epoch
            frames += [wire.control(wire.Header(wire.What.ACK, epoch, n)) for n in (5, 1 << 63)]
            for frame in frames:
                dealer.send(frame)
                dealer.send_multipart([frame, frame])
            writer.enqueue("through")
            assert other.dequeue(PATIENCE) == "through"
            row = writer.statistics().readers[1]
            assert (row.rank, row.state, row.behind) == (1, "running", 1)
            dealer.send(bytes(1 << 20))
            until(lambda: writer.statistics().readers[1].state == "unknown")
        until(lambda: writer.statistics().readers[1].state == "dead")
        writer.release_reader(1)
        writer.enqueue("goes on")
        assert other.dequeue(PATIENCE) == "goes on"
        other.close()


def test_strangers_of_an_insecure_queue() -> None:
    """Without a token they are not counted; what they send is not taken for a reader's."""
    with remote_queue(serializer="msgpack", insecure_network=True) as (writer, (reader,)):
        handle = writer.export_handle()
        for token in ("", "x" * 32):
            with knocking(handle, None, "") as dealer:
                dealer.send(hello(handle, 0, token))
                dealer.send(b"\x80\x05.")
                assert not dealer.poll(50)
        writer.enqueue(1)
        assert reader.dequeue(PATIENCE) == 1
        assert [row.state for row in writer.statistics().readers] == ["running"]
