"""Not a store: ZeroMQ PUSH over ipc, one socket per reader, pickle protocol 5.

Arrays are sent beside the pickle, without a copy on either side of the library: the reader's arrays
alias the received frames. A send returns before the bytes are sent; `put to got` includes it all.
"""

from __future__ import annotations

import pickle
from typing import Any

import zmq

from benchmarks.store.channel import Channel, Peer
from benchmarks.store.payloads import to_arrays, to_tensors
from memlane.cli.bench import frames


class Push(Channel):
    has_view = False
    can_read_again = False

    def prepare(self) -> None:
        self._is_tensors = self.setting.payload.name == "tensors"
        self._trackers: list[Any] = []

    def open_writer(self) -> object:
        context = zmq.Context()
        self._sockets, addresses = [], []
        for rank in range(self.setting.readers):
            address = f"ipc://{self.setting.folder / self.setting.name}-{rank}"
            socket = context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
            self._sockets.append(socket)
            addresses.append(address)
        return addresses

    def open_reader(self, rank: int, token: Any) -> None:
        socket = zmq.Context().socket(zmq.PULL)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(token[rank])
        self._sockets = [socket]

    def put(self, obj: Any) -> Any:
        encoded = frames.encode(to_arrays(obj) if self._is_tensors else obj)
        for socket in self._sockets:
            parts: Any = [encoded.head, *encoded.buffers]
            self._trackers.append(socket.send_multipart(parts, copy=False, track=True))

    def settle(self) -> None:
        while self._trackers:
            self._trackers.pop().wait()

    def get(self, place: Any) -> Any:
        head, *buffers = self._sockets[0].recv_multipart(copy=False)
        obj = pickle.loads(head.buffer, buffers=[buffer.buffer for buffer in buffers])
        return to_tensors(obj) if self._is_tensors else obj

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()


PEERS = (Peer("pyzmq push", Push),)
