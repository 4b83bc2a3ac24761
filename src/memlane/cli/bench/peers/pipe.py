"""multiprocessing.Pipe, one per reader; pickled once, written once per reader."""

from __future__ import annotations

import multiprocessing
import pickle

from memlane.cli.bench.channel import Channel, Peer


class Pipes(Channel):
    def prepare(self) -> None:
        self._pipes = [multiprocessing.Pipe(duplex=False) for _ in range(self.setting.readers)]

    def open_reader(self, rank: int, token: object) -> None:
        self._reader = self._pipes[rank][0]
        for _, there in self._pipes:
            there.close()  # or the end of the writer's process would go unnoticed

    def send(self, obj: object) -> None:
        data = pickle.dumps(obj, protocol=5)
        for _, writer in self._pipes:
            writer.send_bytes(data)

    def recv(self) -> object:
        return pickle.loads(self._reader.recv_bytes())


PEERS = (Peer("Pipe", Pipes),)
