"""Channels between two processes over TCP, opened first by the writer and then by the reader."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from typing import Any

import zmq

from memlane import MessageQueue

HERE = "127.0.0.1"
BY_REFERENCE = 64 * 1024  # from this size on, as the library's manual advises


class Channel(ABC):
    """`open_writer` returns the token that the reader needs."""

    def __init__(self, *, encrypted: bool) -> None:
        self.encrypted = encrypted

    @abstractmethod
    def open_writer(self) -> Any: ...
    @abstractmethod
    def open_reader(self, token: Any) -> None: ...
    @abstractmethod
    def send(self, obj: object) -> None: ...
    @abstractmethod
    def receive(self) -> object: ...
    @abstractmethod
    def close(self) -> None: ...


class PushPull(Channel):
    def open_writer(self) -> Any:
        self._socket = zmq.Context().socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, 0)
        keys = None
        if self.encrypted:
            public, secret = zmq.curve_keypair()
            self._socket.set(zmq.CURVE_SERVER, 1)
            self._socket.set(zmq.CURVE_SECRETKEY, secret)
            keys = (public, *zmq.curve_keypair())
        self._socket.bind(f"tcp://{HERE}:*")
        return self._socket.get(zmq.LAST_ENDPOINT), keys

    def open_reader(self, token: Any) -> None:
        address, keys = token
        self._socket = zmq.Context().socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        if keys:
            for option, key in zip(
                (zmq.CURVE_SERVERKEY, zmq.CURVE_PUBLICKEY, zmq.CURVE_SECRETKEY), keys, strict=True
            ):
                self._socket.set(option, key)
        self._socket.connect(address)

    def send(self, obj: object) -> None:
        data = obj if isinstance(obj, bytes) else pickle.dumps(obj, protocol=5)
        self._socket.send(data, 0, len(data) < BY_REFERENCE)

    def receive(self) -> object:
        frame = self._socket.recv(copy=False)
        return frame.buffer if len(frame) > 4096 else frame.bytes

    def close(self) -> None:
        self._socket.close()


class Pickled(PushPull):
    """The same, but the reader decodes."""

    def receive(self) -> object:
        return pickle.loads(self._socket.recv())


class Memlane(Channel):
    def open_writer(self) -> Any:
        options: dict[str, Any] = {"connect_ip": HERE}
        if not self.encrypted:
            options |= {"insecure_network": True, "serializer": "msgpack"}
        self._queue = MessageQueue(1, 0, **options)
        return self._queue.export_handle(0)

    def open_reader(self, token: Any) -> None:
        self._queue = MessageQueue.create_from_handle(token, 0)

    def send(self, obj: object) -> None:
        self._queue.enqueue(obj)

    def receive(self) -> object:
        return self._queue.dequeue()

    def close(self) -> None:
        self._queue.close()


KINDS: dict[str, tuple[type[Channel], bool]] = {
    "pyzmq CURVE": (PushPull, True),
    "memlane CURVE": (Memlane, True),
    "pyzmq plain": (PushPull, False),
    "memlane plain": (Memlane, False),
}
DICT_KINDS = KINDS | {"pyzmq CURVE": (Pickled, True), "pyzmq plain": (Pickled, False)}
