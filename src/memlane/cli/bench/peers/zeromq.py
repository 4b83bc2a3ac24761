"""ZeroMQ PUB/SUB over ipc without a high-water mark.

An array is sent as a pickle and its out-of-band buffers in one multipart message, without a copy on
either side of the library: the reader's array aliases the received frame, and is read-only.
"""

from __future__ import annotations

import pickle

import zmq

from memlane.cli.bench import frames
from memlane.cli.bench.channel import KIB, Channel, Payload, Peer

_BY_REFERENCE = 64 * KIB  # from this size on, as the library's manual advises
_TIMEOUT_MS = 30_000


class PubSub(Channel):
    def open_writer(self) -> object:
        # XPUB is a PUB that reports subscriptions, so that no message is lost at the start.
        self._socket = zmq.Context().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{self.setting.folder / self.setting.name}"
        self._socket.bind(address)
        return address

    def open_reader(self, rank: int, token: object) -> None:
        self._socket = zmq.Context().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(str(token))

    def ready(self) -> None:
        for _ in range(self.setting.readers):
            if not self._socket.poll(_TIMEOUT_MS):
                raise TimeoutError("a subscriber is missing")
            self._socket.recv()

    def send(self, obj: object) -> None:
        if self.setting.payload.is_array:
            encoded = frames.encode(obj)
            self._socket.send_multipart([encoded.head, *encoded.buffers], copy=False)
        else:
            data = pickle.dumps(obj, protocol=5)
            self._socket.send(data, 0, copy=len(data) < _BY_REFERENCE)

    def recv(self) -> object:
        if self.setting.payload.is_array:
            head, *buffers = self._socket.recv_multipart(copy=False)
            return pickle.loads(head.buffer, buffers=[buffer.buffer for buffer in buffers])
        if self.setting.payload.bytes >= _BY_REFERENCE:
            return pickle.loads(self._socket.recv(copy=False).buffer)
        return pickle.loads(self._socket.recv())

    def close(self) -> None:
        self._socket.close()


def _refuses(payload: Payload) -> str | None:
    return "it has no bound, and memory has" if payload.is_tensor else None


PEERS = (Peer("pyzmq", PubSub, refuses=_refuses),)
