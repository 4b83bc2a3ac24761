"""Another process takes the port of a writer that has died.

Fails without the guard: with `identify` left out, the reader accepts what the plaintext one sends.
"""

import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import zmq

from memlane import AccessRefused, MessageQueue, TimedOut, WriterDied, WriterUnreachable
from memlane.broadcast.protocol import frames as wire
from tests.support import PATIENCE, Remote, start
from tests.support.queues import refuses
from tests.support.remote_queues import LIVENESS, address_of, remote_writing


class Bomb:
    went_off = False

    def __reduce__(self) -> Any:
        return setattr, (Bomb, "went_off", True)


def hostile_frames(epoch: int, sequence: int) -> list[bytes]:
    """Returns what the writer would send next, if it meant harm."""
    body = pickle.dumps(Bomb())
    welcome = wire.control(
        wire.Header(wire.What.WELCOME, epoch, sequence), wire.Welcome(1, 100, 1 << 20)
    )
    return [welcome, wire.whole_header(epoch, sequence, wire.Kind.OBJECT, len(body)) + body]


@contextmanager
def router_at(port: int, epoch: int, *, has_keys: bool) -> Iterator[None]:
    """Answers whatever it hears; with keys of its own, or in plaintext."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        router = stack.enter_context(context.socket(zmq.ROUTER))
        stop = stack.enter_context(context.socket(zmq.PAIR))
        asked = context.socket(zmq.PAIR)
        asked.bind("inproc://stop")
        stop.connect("inproc://stop")
        router.set(zmq.LINGER, 0)
        if has_keys:
            router.set(zmq.CURVE_SERVER, 1)
            router.set(zmq.CURVE_SECRETKEY, zmq.curve_keypair()[1])
        router.bind(f"tcp://127.0.0.1:{port}")

        def answer() -> None:
            while not asked.poll(0):
                if router.poll(20):
                    route, *_ = router.recv_multipart()
                    for frame in hostile_frames(epoch, 1):
                        router.send_multipart([route, frame])
            asked.close(0)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            stop.send(b"")
            thread.join()


@contextmanager
def parrot_at(port: int, epoch: int) -> Iterator[None]:
    """Sends back what it hears, and hostile frames in plain ZMTP."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\1" + bytes(31)
    frames = b"".join(
        b"\x02" + len(frame).to_bytes(8, "big") + frame for frame in hostile_frames(epoch, 1)
    )
    with socket.create_server(("127.0.0.1", port)) as listener:
        is_over = False

        def answer() -> None:
            while True:
                one, _ = listener.accept()
                with one, suppress(OSError):
                    if is_over:
                        return
                    one.sendall(greeting + frames)
                    one.sendall(one.recv(4096))

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            is_over = True
            socket.create_connection(("127.0.0.1", port)).close()
            thread.join()


SQUATTERS: dict[str, Callable[[int, int], Any]] = {
    "another writer": lambda port, epoch: router_at(port, epoch, has_keys=True),
    "no CURVE": lambda port, epoch: router_at(port, epoch, has_keys=False),
    "no ZeroMQ": parrot_at,
}


@pytest.mark.parametrize("name", SQUATTERS)
def test_a_port_that_is_taken_over(name: str) -> None:
    """Its reader, and whoever comes with its handle later, get an error and never a message."""
    writer = Remote(start(remote_writing, 1, LIVENESS))
    handle = writer.greeting
    with MessageQueue.create_from_handle(handle, 0) as reader:
        writer.call("enqueue", "genuine")
        assert reader.dequeue(PATIENCE) == "genuine"
        epoch = reader._reader.session.epoch  # type: ignore[union-attr]
        writer.peer.kill()
        port = address_of(handle)[1]
        with SQUATTERS[name](port, epoch):
            with refuses(WriterDied, AccessRefused):
                reader.dequeue(PATIENCE)
            with refuses(AccessRefused, TimedOut, WriterUnreachable):
                MessageQueue.create_from_handle(handle, 0, timeout=1.0)
    assert not Bomb.went_off
