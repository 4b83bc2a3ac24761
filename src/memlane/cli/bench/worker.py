"""The processes of one peer: the writer's process forks the readers and executes orders.

Between two slices all processes sleep on the pipe of their orders, even those of peers that poll.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

from memlane.cli.bench.board import Board
from memlane.cli.bench.channel import Channel, Peer, Setting
from memlane.cli.bench.payloads import same
from memlane.cli.bench.processes import FORK, follow, lead

SETTLE = 0.15


def _cpu_ns(pid: int) -> int:
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks)


class _Process:
    """Shared by writer and readers. `back` is a channel from reader 0 to the writer."""

    def __init__(self, channel: Channel, back: Channel, board: Board) -> None:
        self.channel = channel
        self.back = back
        self.board = board
        self.obj = channel.setting.payload.make()

    def close(self) -> None:
        self.channel.close()
        self.back.close()


class _Reader(_Process):
    def __init__(self, channel: Channel, back: Channel, board: Board, rank: int) -> None:
        super().__init__(channel, back, board)
        self.rank = rank

    def open(self, token: object, has_back: bool) -> object:
        self.channel.open_reader(self.rank, token)
        return self.back.open_writer() if has_back else None

    def open_back(self) -> None:
        self.back.ready()

    def check(self, messages: int) -> None:
        for _ in range(messages):
            obj = self.channel.recv()
            if not same(obj, self.obj):
                raise AssertionError("a message arrived changed")
            del obj
            self.channel.release()

    def stamp(self, messages: int) -> None:
        channel, stamps, progress, rank = (
            self.channel,
            self.board.received[self.rank],
            self.board.progress,
            self.rank,
        )
        for i in range(messages):
            obj = channel.recv()
            stamps[i] = time.monotonic_ns()
            del obj
            channel.release()
            progress[rank] = i + 1

    def take(self, messages: int) -> int:
        recv, release = self.channel.recv, self.channel.release
        for _ in range(messages):
            obj = recv()
            del obj
            release()
        return time.monotonic_ns()

    def reply(self, messages: int) -> None:
        recv, release, send, obj = (
            self.channel.recv,
            self.channel.release,
            self.back.send,
            self.obj,
        )
        for _ in range(messages):
            got = recv()
            del got
            release()
            send(obj)


class _Writer(_Process):
    def start(self, readers: list[tuple[int, Connection]], has_back: bool) -> None:
        self.readers = readers
        token = self.channel.open_writer()
        back_token = self._ask("open", token, has_back)()[0]
        if has_back:
            self.back.open_reader(0, back_token)
        self.channel.ready()
        if has_back:
            self._ask("open_back")()

    def _ask(self, order: str, *args: object) -> Callable[[], list[object]]:
        """Sends the order to all readers; the returned function waits for their answers."""
        for _, pipe in self.readers:
            pipe.send((order, args))
        return lambda: [pipe.recv() for _, pipe in self.readers]

    def warm_up(self) -> None:
        """Uses all of the memory once, and checks that objects arrive unchanged."""
        messages = self.channel.warm_up
        answers = self._ask("check", messages)
        for _ in range(messages):
            self.channel.send(self.obj)
        answers()

    def paced(self, messages: int, pause: float) -> object:
        """One-way times in ns by reader and message, all readers asleep before each message."""
        self.board.reset()
        answers = self._ask("stamp", messages)
        time.sleep(SETTLE / 10)
        sent, send, obj = self.board.sent, self.channel.send, self.obj
        for i in range(messages):
            self.board.wait_for(i)
            time.sleep(pause)
            sent[i] = time.monotonic_ns()
            send(obj)
        answers()
        return self.board.ways_ns(messages)

    def back_to_back(self, messages: int) -> float:
        """Messages per second, until every reader has the last one."""
        answers = self._ask("take", messages)
        time.sleep(SETTLE / 10)
        send, obj = self.channel.send, self.obj
        start = time.monotonic_ns()
        for _ in range(messages):
            send(obj)
        ends = [end for end in answers() if isinstance(end, int)]
        return messages / (max(ends) - start) * 1e9

    def round_trip(self, messages: int) -> float:
        """Mean ns to reader 0 and back through the same kind of channel."""
        answers = self._ask("reply", messages)
        channel, back, obj = self.channel, self.back, self.obj
        time.sleep(SETTLE / 10)
        start = time.monotonic_ns()
        for _ in range(messages):
            channel.send(obj)
            got = back.recv()
            del got
            back.release()
        end = time.monotonic_ns()
        answers()
        return (end - start) / messages

    def idle(self, seconds: float) -> float:
        """CPU time of all readers together while no message arrives, in % of one core."""
        answers = self._ask("take", 1)
        time.sleep(SETTLE)
        pids = [pid for pid, _ in self.readers]
        start, before = time.monotonic_ns(), sum(map(_cpu_ns, pids))
        time.sleep(seconds)
        used, end = sum(map(_cpu_ns, pids)) - before, time.monotonic_ns()
        self.channel.send(self.obj)
        answers()
        return used / (end - start) * 100

    def trickle(self, seconds: float, every: float, step: float) -> list[tuple[float, float]]:
        """Sends a message every `every` seconds. Returns, for every `step` seconds, the time since
        the start and the cores that all readers together have used since the last sample."""
        pids = [pid for pid, _ in self.readers]
        answers = self._ask("take", int(seconds / every))
        time.sleep(SETTLE)
        begun = last = time.monotonic()
        used, due = sum(map(_cpu_ns, pids)), begun + every
        samples: list[tuple[float, float]] = []
        while last < begun + seconds:
            time.sleep(max(0.0, begun + (len(samples) + 1) * step - time.monotonic()))
            now, total = time.monotonic(), sum(map(_cpu_ns, pids))
            samples.append((now - begun, (total - used) / 1e9 / (now - last)))
            last, used = now, total
            if now >= due - step / 2:
                due += every
                self.channel.send(self.obj)
        answers()
        return samples

    def close(self) -> None:
        self._ask("close")()
        super().close()


def writer_main(peer: Peer, setting: Setting, has_back: bool, orders: Connection) -> None:
    """The body of the process that `session.Session` starts."""

    def open_peer() -> _Writer:
        channel = peer.channel(setting)
        back_setting = Setting(
            setting.payload, 1, setting.folder, setting.prefix, setting.name + "-back"
        )
        back = peer.channel(back_setting)
        channel.prepare()
        if has_back:
            back.prepare()
        board = Board(setting.readers)
        writer = _Writer(channel, back, board)
        readers: list[tuple[int, Connection]] = []
        for rank in range(setting.readers):
            here, there = FORK.Pipe()
            process = FORK.Process(
                target=follow, args=(_Reader(channel, back, board, rank), there, orders)
            )
            process.start()
            readers.append((cast(int, process.pid), here))
        writer.start(readers, has_back)
        return writer

    lead(open_peer, orders)
