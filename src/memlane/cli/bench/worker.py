"""Runs a peer's writer and readers for a slice: the writer's process forks the readers."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from memlane.cli.bench.channel import Channel, Peer, Setting
from memlane.cli.bench.processes import FORK, follow, lead

STAMPS = 1024  # how many messages of one slice can be stamped
SETTLE = 0.15
_LOOK_AGAIN = 0.0002


def cpu_ns(pid: int) -> int:
    """Processor time of all threads of a process, in ns."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks)


def _same(left: Any, right: Any) -> bool:
    """Returns whether a message arrived as it was sent."""
    if hasattr(left, "untyped_storage"):  # torch's
        return bool(left.equal(right))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and bool(left == right)


class _Process:
    """Writers and readers have a board, which all inherit: a row of times in monotonic ns for each,
    the writer's first. At the end of a reader's row: how many messages it has read in the slice."""

    def __init__(self, channel: Channel, board: memoryview) -> None:
        self.channel, self.board = channel, board
        self.obj = channel.setting.payload.make()

    def close(self) -> None:
        self.channel.close()


class Reader(_Process):
    def __init__(self, channel: Channel, board: memoryview, rank: int) -> None:
        super().__init__(channel, board)
        self.rank = rank

    def open(self, token: object) -> None:
        self.channel.open_reader(self.rank, token)

    def check(self, messages: int) -> None:
        for _ in range(messages):
            obj = self.channel.recv()
            if not _same(obj, self.obj):
                raise AssertionError("a message arrived changed")
            del obj
            self.channel.release()

    def stamp(self, messages: int) -> None:
        channel, board, row = self.channel, self.board, 1 + self.rank
        for i in range(messages):
            obj = channel.recv()
            board[row, i] = time.monotonic_ns()
            del obj
            channel.release()
            board[row, STAMPS] = i + 1

    def take(self, messages: int) -> int:
        recv, release = self.channel.recv, self.channel.release
        for _ in range(messages):
            obj = recv()
            del obj
            release()
        return time.monotonic_ns()


class Writer(_Process):
    def open(self, readers: list[tuple[int, Connection]]) -> None:
        """`readers`: their pids, and the pipes of their orders."""
        self.readers = readers
        self.all("open", self.channel.open_writer())()
        self.channel.ready()

    def all(self, order: str, *args: object) -> Callable[[], list[Any]]:
        """Sends the order to all readers; the returned function waits for their answers."""
        for _, pipe in self.readers:
            pipe.send((order, args))
        return lambda: [pipe.recv() for _, pipe in self.readers]

    def warm_up(self) -> None:
        """Uses all of the memory once, and checks that objects arrive unchanged."""
        answers = self.all("check", self.channel.warm_up)
        for _ in range(self.channel.warm_up):
            self.channel.send(self.obj)
        answers()

    def paced(self, messages: int, pause: float) -> npt.NDArray[np.int64]:
        """From before `send` until the reader has the object, in ns, by reader and message. All
        readers are asleep before each message."""
        board, send, obj = self.board, self.channel.send, self.obj
        rows = range(1, 1 + len(self.readers))
        for row in rows:
            board[row, STAMPS] = 0
        answers = self.all("stamp", messages)
        time.sleep(SETTLE / 10)
        for i in range(messages):
            while min(board[row, STAMPS] for row in rows) < i:
                time.sleep(_LOOK_AGAIN)
            time.sleep(pause)
            board[0, i] = time.monotonic_ns()
            send(obj)
        answers()
        times: npt.NDArray[np.int64] = np.asarray(board)[:, :messages]
        ways: npt.NDArray[np.int64] = times[1:] - times[0]
        return ways

    def back_to_back(self, messages: int) -> float:
        """Messages per second, until every reader has the last one."""
        answers = self.all("take", messages)
        time.sleep(SETTLE / 10)
        send, obj = self.channel.send, self.obj
        start = time.monotonic_ns()
        for _ in range(messages):
            send(obj)
        end: int = max(answers())
        return messages / (end - start) * 1e9

    def idle(self, seconds: float) -> float:
        """CPU time of all readers together while no message arrives, in % of one core."""
        answers = self.all("take", 1)
        time.sleep(SETTLE)
        start, before = time.monotonic_ns(), self.used_ns()
        time.sleep(seconds)
        used, end = self.used_ns() - before, time.monotonic_ns()
        self.channel.send(self.obj)
        answers()
        return used / (end - start) * 100

    def used_ns(self) -> int:
        """CPU time of all readers."""
        return sum(cpu_ns(pid) for pid, _ in self.readers)

    def close(self) -> None:
        self.all("close")()
        super().close()


def writer_main(kind: type[Writer], peer: Peer, setting: Setting, orders: Connection) -> None:
    """The body of the process that a `Session` starts."""

    def open_peer() -> Writer:
        channel = peer.channel(setting)
        channel.prepare()
        rows = 1 + setting.readers
        memory = mmap.mmap(-1, 8 * rows * (STAMPS + 1))
        board = memoryview(memory).cast("B").cast("q", (rows, STAMPS + 1))
        readers: list[tuple[int, Connection]] = []
        for rank in range(setting.readers):
            here, there = FORK.Pipe()
            reader = Reader(channel, board, rank)
            process = FORK.Process(target=follow, args=(reader, there, orders))
            process.start()
            readers.append((cast(int, process.pid), here))
        writer = kind(channel, board)
        writer.open(readers)
        return writer

    lead(open_peer, orders)
