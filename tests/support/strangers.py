"""Hostile peers of every kind, without or with a listed key: roles that run in their own process.

Each connects `count` times, and returns how often it was admitted or got what it must not know.
"""

import os
import socket
import time
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from memlane import Handle
from memlane.broadcast.protocol import frames as wire
from tests.support import PATIENCE, Link
from tests.support.remote_queues import LIVENESS, address_of

# What ZeroMQ sends first (ZMTP 3.1): signature, version, mechanism, role; 64 bytes.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
PLAIN_GREETING = GREETING.replace(b"CURVE", b"NULL\0")

GARBAGE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x80\x05cos\nsystem\n(S'true'\ntR.",
    os.urandom(4096),
    PLAIN_GREETING,
    PLAIN_GREETING + b"\x04\x26\x05READY" + bytes(32) + b"\x00\x04mlq\x01",
]
# Announced but mostly not sent: a command and a message of 2**62 bytes, a command of 1 MiB.
OVERSIZED = [
    GREETING + b"\x06\x40" + bytes(7) + b"\x05HELLO",
    GREETING + b"\x02\x40" + bytes(7),
    GREETING + b"\x06" + (1 << 20).to_bytes(8, "big") + b"\x05HELLO" + bytes(1 << 16),
]
# Handshakes that begin and do not continue.
BEGUN = [GREETING[:10], GREETING, GREETING + b"\x04\xc8\x05HELLO\x01\x00" + bytes(72)]


def hello(
    handle: Handle,
    rank: int = 1,
    token: str = "",
    *,
    sequence: int = 0,
    piece: int = 0,
    number: int = 0,
) -> bytes:
    """A reader's first frame, or a later one that resumes; the session is always the same."""
    body = wire.Hello(
        handle.queue_id, rank, 1, b"s" * 16, token, 0, sequence, piece, "", number=number
    )
    return wire.control(wire.Header(wire.What.HELLO, 0), body)


def raw(_link: Link, handle: Handle, count: int, texts: list[bytes]) -> int:
    """Sends bytes over plain TCP, and waits until the writer ends the connection."""
    heard = 0
    for number in range(count):
        with socket.create_connection(address_of(handle), PATIENCE) as one:
            said = b""
            try:
                one.sendall(texts[number % len(texts)])
                one.shutdown(socket.SHUT_WR)
                while part := one.recv(4096):
                    said += part
            except TimeoutError:
                raise
            except OSError:  # the writer reset it: also an end
                pass
            heard += b"READY" in said or b"mlq" in said
    return heard


def half_open(_link: Link, handle: Handle, count: int, texts: list[bytes]) -> int:
    """Opens all connections at once, and keeps them until the writer ends them."""
    ones = []
    for number in range(count):
        ones.append(socket.create_connection(address_of(handle), PATIENCE))
        ones[-1].sendall(texts[number % len(texts)])
    for one in ones:
        with one, suppress(ConnectionError):
            while one.recv(4096):
                pass
    return 0


def keyless(_link: Link, handle: Handle, count: int, server_key: str) -> int:
    """Connects with an unlisted key, for the right writer or another one; ten at a time."""
    heard, context = 0, zmq.Context()
    for _ in range(-(-count // 10)):
        ones = [dealer_of(context, handle, None, server_key) for _ in range(10)]
        for one in ones:
            with suppress(zmq.Again):  # it was refused already, and has no peer to send to
                one.send(hello(handle), zmq.NOBLOCK)
        # Sometimes libzmq gives up at the stranger's end without an event: all share one wait.
        end = time.monotonic() + LIVENESS
        fates = [fates_of(one, 1, max(0.0, end - time.monotonic())) for one in ones]
        heard += sum(zmq.EVENT_HANDSHAKE_SUCCEEDED in fate for fate in fates)
        heard += sum(bool(one.poll(0)) for one in ones)
        for one in ones:
            one.close(0)
    context.term()
    return heard


_FATES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


def fates_of(one: "zmq.Socket[bytes]", count: int, patience: float = PATIENCE) -> list[int]:
    """The reported events of its handshake, and then of its connection."""
    fates: list[int] = []
    with one.get_monitor_socket() as monitor:  # opened before it connected
        while len(fates) < count and monitor.poll(int(patience * 1000)):
            fates.append(int(parse_monitor_message(monitor.recv_multipart())["event"]))
        one.disable_monitor()
    return fates


def stop_monitor(one: "zmq.Socket[bytes]") -> None:
    """Keeps the monitor's end while it is stopped: libzmq would wait for ever on one that is gone,
    and pyzmq drops its own first."""
    monitor = one.get_monitor_socket()
    one.disable_monitor()
    monitor.close(0)


def replaying(_link: Link, handle: Handle, count: int, frames: list[bytes]) -> int:
    """Connects with a listed key that is in use, and replays another session's frames each time."""
    heard, context = 0, zmq.Context()
    for _ in range(count):
        one = dealer_of(context, handle, handle.remote_reader_keys[0], handle.remote_server_key)
        for frame in frames:
            one.send(frame)
        heard += wire.header_of(one.recv()).what != wire.What.REFUSED
        stop_monitor(one)
        one.close(0)
    context.term()
    return heard


def oversizing(_link: Link, handle: Handle, count: int) -> int:
    """Sends a frame of 1 MiB with a listed key; the connection ends each time."""
    heard, context = 0, zmq.Context()
    for _ in range(count):
        one = dealer_of(context, handle, handle.remote_reader_keys[0], handle.remote_server_key)
        one.send(bytes(1 << 20))
        fates = fates_of(one, 2)
        assert fates == [zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED]
        heard += bool(one.poll(0))
        one.close(0)
    context.term()
    return heard


def dealer_of(
    context: "zmq.Context[zmq.Socket[bytes]]",
    handle: Handle,
    secret: str | None,
    server_key: str,
    *options: tuple[int, Any],
) -> "zmq.Socket[bytes]":
    """A reader's socket, made by a stranger; without a secret it makes up a key."""
    dealer = context.socket(zmq.DEALER)
    for option, value in options:
        dealer.set(option, value)
    dealer.set(zmq.LINGER, 0)
    dealer.set(zmq.RCVTIMEO, int(PATIENCE * 1000))
    if server_key:
        public, made_up = zmq.curve_keypair()
        if secret is not None:
            public, made_up = zmq.curve_public(secret.encode()), secret.encode()
        dealer.set(zmq.CURVE_SERVERKEY, server_key.encode())
        dealer.set(zmq.CURVE_PUBLICKEY, public)
        dealer.set(zmq.CURVE_SECRETKEY, made_up)
    dealer.get_monitor_socket(_FATES)
    assert handle.remote_subscribe_addr is not None
    dealer.connect(handle.remote_subscribe_addr)
    return dealer
