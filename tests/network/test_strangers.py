"""A peer that has not proven an expected key is not counted, not parsed, not decoded.

``MEMLANE_SOAK_STRANGERS`` is the number of each kind (default 40), while a writer sends to a
real reader as fast as both can.
"""

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from memlane import AccessRefused, Handle, MessageQueue
from memlane._net import sockets
from memlane._net.tcp import Connection
from memlane.broadcast.protocol import frames as wire
from memlane.broadcast.protocol.writer_session import WriterSession
from tests.support import PATIENCE, Aside, holdings, late_since, start, strangers, until
from tests.support.proxies import recording
from tests.support.queues import refuses
from tests.support.remote_queues import (
    HERE,
    LIVENESS,
    address_of,
    remote_queue,
    remote_writer,
    start_remote_reader,
)
from tests.support.strangers import dealer_of, hello
from tests.support.traffic import numbered, read_numbered

STRANGERS = int(os.environ.get("MEMLANE_SOAK_STRANGERS", "40"))
pytestmark = pytest.mark.soak(seconds=60 + STRANGERS // 2)
# Strangers may take so much of the machine (in processes of their own), and of the writer's memory.
LEAST_RATE = 0.1
MOST_GROWTH = 32 << 20


class Flow:
    """A writer that sends numbers to a remote reader 0 for as long as the test wants."""

    def __init__(self, writer: MessageQueue) -> None:
        self.writer = writer
        self.sent = 0
        self._reader = start_remote_reader(writer)
        self._reader.begin(read_numbered)
        self._is_over = False
        self._writes = Aside(self._write)

    def _write(self) -> None:
        while not self._is_over:
            self.writer.enqueue(numbered(self.sent, 100), PATIENCE)
            self.sent += 1

    def rates(self, is_over: Callable[[], object]) -> tuple[float, float]:
        """Messages per second until the condition holds; and of seconds in which the machine had
        time, which are an eighth of them at least."""
        begun, sent = time.monotonic(), self.sent
        until(is_over, timeout=PATIENCE + STRANGERS, pause=0.01)
        took = time.monotonic() - begun
        count = self.sent - sent
        return count / took, count / max(took - late_since(begun), took / 8)

    def end(self) -> None:
        """Checks that everything sent has arrived, once and in order."""
        self._is_over = True
        self._writes.result()
        self.writer.close()
        read, error, _ = self._reader.outcome()
        assert (read, type(error).__name__) == (self.sent, "WriterClosed")
        self._reader.call("close")
        self._reader.leave()


def seconds(count: float) -> Callable[[], bool]:
    """For `rates`."""
    end = time.monotonic() + count
    return lambda: time.monotonic() >= end


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.fixture
def greeted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The places of all peers that proved a key and said hello."""
    places: list[int] = []
    real = WriterSession._greet

    def greet(*args: Any) -> Any:
        places.append(-1 if args[4] is None else args[4])
        return real(*args)

    monkeypatch.setattr(WriterSession, "_greet", greet)
    return places


def keys_of_another(writer: MessageQueue) -> str:
    return zmq.curve_public(zmq.curve_keypair()[1]).decode()


def bytes_of_a_session(writer: MessageQueue) -> list[bytes]:
    """Everything a reader of this very queue has sent, byte by byte."""
    with (
        recording(writer.export_handle(1)) as (handle, said),
        MessageQueue.create_from_handle(handle, 1) as reader,
        refuses(TimeoutError),
    ):
        reader.dequeue(0.01)
    return [said()]


def frames_of_a_session(writer: MessageQueue) -> list[bytes]:
    """Returns what a reader sends in another session, and a bye that would be this one's."""
    epoch = writer._writer.session.epoch  # type: ignore[union-attr]
    said = [(wire.What.ACK, 3), (wire.What.ASK, 0), (wire.What.BYE, 0)]
    return [
        *(wire.control(wire.Header(what, epoch, number)) for what, number in said),
        hello(writer.handle, rank=0),
    ]


KINDS: dict[str, tuple[Callable[..., int], Any]] = {
    "garbage": (strangers.raw, strangers.GARBAGE),
    "oversized, unproven": (strangers.raw, strangers.OVERSIZED),
    "silent": (strangers.half_open, [b""]),
    "handshake begun": (strangers.half_open, strangers.BEGUN),
    "no key": (strangers.keyless, ""),
    "wrong server key": (strangers.keyless, keys_of_another),
    "key not listed": (strangers.keyless, lambda writer: writer.handle.remote_server_key),
    "replayed bytes": (strangers.raw, bytes_of_a_session),
    "replayed frames, key of reader 0": (strangers.replaying, frames_of_a_session),
    "oversized, key of reader 1": (strangers.oversizing, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_are_neither_counted_nor_decoded(kind: str, greeted: list[int]) -> None:
    """No frame of theirs is counted or decoded; the reader gets everything meanwhile, and the
    writer has no descriptor, thread or noticeable memory more afterwards."""
    role, argument = KINDS[kind]
    with remote_writer(2, remote_liveness=LIVENESS) as writer:
        arguments = [argument(writer)] if callable(argument) else [argument]
        if kind != "replayed bytes":
            writer.release_reader(1)  # or the writer would wait for it
        flow = Flow(writer)
        alone, _ = flow.rates(seconds(0.3))
        before, memory, known = holdings("memlane-"), resident(), len(greeted)
        handle = writer.export_handle(0 if "reader 0" in kind else 1)
        if argument is None:
            arguments = []
        strange = start(role, handle, STRANGERS, *arguments)
        long_enough = seconds(0.3)
        _, disturbed = flow.rates(lambda: long_enough() and strange.has_spoken())
        assert strange.result() == 0
        until(lambda: holdings("memlane-").descriptors.total() <= before.descriptors.total())
        until(lambda: holdings("memlane-").threads.total() <= before.threads.total())
        assert resident() - memory < MOST_GROWTH
        states = [row.state for row in writer.statistics().readers]
        assert states == ["running", "closed"]
        assert greeted[known:] == ([0] * STRANGERS if "frames" in kind else [])
        flow.end()
    print(f"{kind}: {alone:.0f} messages a second alone, {disturbed:.0f} beside {STRANGERS}")
    assert disturbed >= LEAST_RATE * alone


def test_the_oldest_half_open_connections_are_ended() -> None:
    """The oldest are ended for newer ones, long before the time of a handshake is over; a reader
    that comes in between is let in."""
    most = sockets.MAX_UNIDENTIFIED + 2
    with remote_writer(1, remote_liveness=4 * PATIENCE) as writer:
        ones = [socket.create_connection(address_of(writer.handle), PATIENCE)]
        with MessageQueue.create_from_handle(writer.export_handle(0), 0) as reader:
            before = holdings("memlane-").descriptors.total()
            for _ in range(most + 20):
                ones.append(socket.create_connection(address_of(writer.handle), PATIENCE))
                assert ones[-1].recv(10)  # it was accepted
            for oldest in ones[:20]:
                while oldest.recv(4096):
                    pass
            until(lambda: holdings("memlane-").descriptors.total() <= before + len(ones) + most)
            writer.enqueue("through")
            assert reader.dequeue(PATIENCE) == "through"
        for one in ones:
            one.close()


def test_strangers_while_the_writer_is_busy() -> None:
    """Its interpreter comes to nothing, and libzmq's thread waits for nobody.

    Fails without the guard: with a limit of the monitor's own nobody was accepted any more.
    """
    with remote_queue() as (writer, (reader,)):
        with writer._writer.lock:  # type: ignore[union-attr]
            for _ in range(1100):  # two events each; the limit was 2,000
                with socket.create_connection(address_of(writer.handle), PATIENCE) as one:
                    one.settimeout(PATIENCE)
                    assert one.recv(10)
        writer.enqueue("through")
        assert reader.dequeue(PATIENCE) == "through"


@contextmanager
def knocking(
    handle: Handle, secret: str | None = None, *options: tuple[int, Any]
) -> Iterator["zmq.Socket[bytes]"]:
    """A stranger's socket, and its context."""
    with (
        zmq.Context() as context,
        dealer_of(context, handle, secret, handle.remote_server_key, *options) as d,
    ):
        yield d


def test_a_key_that_is_not_listed() -> None:
    """The reader is told so."""
    with remote_writer(2) as writer:
        handle = writer.export_handle(1)
        handle.remote_reader_keys = [zmq.curve_keypair()[1].decode()]
        with refuses(PermissionError) as caught:
            MessageQueue.create_from_handle(handle, 1)
        assert isinstance(caught.value, AccessRefused)


def test_what_a_listed_reader_may_not_send() -> None:
    """Broken and replayed frames change nothing; an oversized one ends its connection."""
    with remote_writer(2, remote_liveness=LIVENESS) as writer:
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
            hello(handle, piece=-1),
            hello(handle, piece=1 << 32),
            hello(handle, piece=1),
            hello(handle, rank=-5),
            struct.pack("<3sB", b"mlq", 200) + bytes(44),
        ]
        with knocking(handle, handle.remote_reader_keys[0]) as dealer:
            dealer.send(hello(handle))
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


@pytest.mark.parametrize(("sequence", "piece"), [(0, 1), (1, 1), (1, (1 << 32) - 1)])
def test_a_reader_that_resumes_where_no_frame_is(
    sequence: int, piece: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused, and logged once; the writer and the other readers go on."""
    with remote_writer(2, remote_liveness=LIVENESS) as writer:
        other = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        handle = writer.export_handle(1)
        with knocking(handle, handle.remote_reader_keys[0]) as dealer:
            dealer.send(hello(handle))
            until(lambda: writer.statistics().readers[1].state != "absent")
            writer.enqueue("first")
            for number in (1, 2):
                dealer.send(hello(handle, sequence=sequence, piece=piece, number=number))
            answers = []
            while answers.count(wire.What.REFUSED) < 2:
                assert dealer.poll(int(PATIENCE * 1000))
                answers.append(wire.header_of(dealer.recv()).what)
            writer.enqueue("second")
            assert [other.dequeue(PATIENCE) for _ in range(2)] == ["first", "second"]
            lines = [line for line in caplog.messages if "reader 1" in line]
            assert len(lines) == 1
            assert "cannot resume" in lines[0]
        until(lambda: writer.statistics().readers[1].state == "dead")
        other.close()


def test_strangers_of_an_insecure_queue_are_not_counted() -> None:
    """Without a token they are not counted; what they send is not taken for a reader's."""
    with remote_queue(serializer="msgpack", insecure_network=True) as (writer, (reader,)):
        handle = writer.export_handle()
        for token in ("", "x" * 32):
            with knocking(handle) as dealer:
                dealer.send(hello(handle, 0, token))
                dealer.send(b"\x80\x05.")
                assert not dealer.poll(50)
        writer.enqueue(1)
        assert reader.dequeue(PATIENCE) == 1
        assert [row.state for row in writer.statistics().readers] == ["running"]


def test_a_key_does_not_speak_for_the_connection_of_another() -> None:
    """A peer chooses the name of its connection: it does not speak for whoever had that before."""
    with remote_writer(2, remote_liveness=5.0) as writer:
        handles = [writer.export_handle(rank) for rank in range(2)]
        secrets = [handle.remote_reader_keys[0] for handle in handles]
        with knocking(handles[0], secrets[0]) as lost:
            lost.send(hello(handles[0], 0))
            epoch = wire.header_of(lost.recv()).epoch
            route = writer._writer.session._peers[0].route  # type: ignore[union-attr]
            writer.enqueue("message")
        until(lambda: writer.statistics().readers[0].state == "unknown")
        with knocking(handles[1], secrets[1], (zmq.ROUTING_ID, route)) as other:
            other.send(wire.control(wire.Header(wire.What.ACK, epoch, 1)))
            other.send(hello(handles[1], 1, number=1))
            other.recv()
            assert writer.statistics().readers[0].behind == 1


def test_a_key_that_does_not_read_why_it_is_refused() -> None:
    """On a second connection, while it reads everything on the first."""
    with remote_writer(2) as writer:
        handle = writer.export_handle(0)
        once = ((zmq.RCVHWM, 1), (zmq.RCVBUF, 4096), (zmq.RECONNECT_IVL, -1))
        with (
            knocking(handle, handle.remote_reader_keys[0]) as first,
            knocking(handle, handle.remote_reader_keys[0], *once) as second,
        ):
            first.send(hello(handle, 0))
            ask = wire.control(wire.Header(wire.What.ASK, wire.header_of(first.recv()).epoch))
            again = hello(handle, 0).replace(b"s" * 16, b"t" * 16)  # the place is taken
            second.send(again)
            for _ in range(1000):
                with suppress(zmq.Again):
                    for _ in range(100):
                        second.send(again, zmq.NOBLOCK)
                first.send(ask)
                first.recv()
                if len(writer._writer.transport.descriptors) == 2:  # type: ignore[union-attr]
                    return  # the port, and the first connection
            pytest.fail("its answers are kept without a bound")


def test_a_connection_is_shut_by_what_it_is() -> None:
    """And not by its number, which may be a newer one's."""
    with remote_writer() as writer, socket.create_server((HERE, 0)) as listener:
        transport: Any = writer._writer.transport  # type: ignore[union-attr]

        def pair() -> tuple[socket.socket, socket.socket]:
            there = socket.create_connection(listener.getsockname())
            return listener.accept()[0], there

        (old, old_peer), (new, new_peer) = pair(), pair()
        with old, old_peer, new, new_peer, writer._writer.lock:  # type: ignore[union-attr]
            transport.connections[b"old"] = Connection(old.fileno(), transport.spare)
            os.dup2(new.fileno(), old.fileno())
            transport.descriptors.note(old.fileno())
            transport.shut(b"old")
            del transport.connections[b"old"]
            transport.descriptors.forget(old.fileno())
            new_peer.sendall(b"alive")
            assert old.recv(5) == b"alive"
