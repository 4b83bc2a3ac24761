"""Measures how cost grows: with the readers of a queue, the queues of a process, the size of a
message.

A message to readers that sleep, some milliseconds after all had the one before: the writer's call,
and until the last of the readers has it, beside one futex wake of as many. Queues are idle, and
both their ends are in one process; every reader is watched, as by an event loop. Sizes are bytes
objects to one reader.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.broadcast.floor import Floor
from benchmarks.command import say
from benchmarks.turns import all_aside, aside, in_turns
from memlane import Handle, MessageQueue
from memlane.cli.bench.channel import DICT

READERS = (1, 2, 4, 8, 16, 32, 64)
QUEUES = (1, 10, 100, 1000)
SIZES = tuple(4**exponent for exponent in range(16))
MESSAGES, ROUNDS = 200, 3
PAUSE = 0.002
IDLE = 5.0
"""Seconds over which idle queues are watched."""


def _read(pipe: Connection, handle: Handle, rank: int, count: int) -> None:
    with MessageQueue.create_from_handle(handle, rank) as queue:
        queue.wait_until_ready(60)
        stamps = []
        for _ in range(count):
            message = queue.dequeue(60)
            stamps.append(time.monotonic_ns())
            del message
        pipe.send(stamps)


def _send(readers: int, message: object, count: int, **options: Any) -> dict[str, float]:
    """Medians in us: of the writer's calls, and until the last reader has the message."""
    with ExitStack() as stack:
        queue = stack.enter_context(MessageQueue(readers, readers, **options))
        roles = [(_read, queue.export_handle(rank), rank, count) for rank in range(readers)]
        running = stack.enter_context(all_aside(roles))
        queue.wait_until_ready(60)
        begun, called = [], []
        for _ in range(count):
            time.sleep(PAUSE)
            while any(reader.behind for reader in queue.statistics().readers):
                time.sleep(PAUSE)
            begun.append(time.monotonic_ns())
            queue.enqueue(message, 60)
            called.append(time.monotonic_ns())
        came = np.array([reader.hear() for reader in running])
    return {
        "call": float(np.median(np.subtract(called, begun))) / 1e3,
        "last": float(np.median(came.max(axis=0) - begun)) / 1e3,
    }


def _median(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _of_readers() -> dict[int, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        floor = Floor(Path(folder))

        def measure(readers: int) -> dict[str, float]:
            waking = np.reshape(floor.futex_ns(readers, MESSAGES), (readers, MESSAGES))
            wake = float(np.median(waking.max(axis=0))) / 1e3
            return {**_send(readers, DICT.make(), MESSAGES), "wake": wake}

        found = in_turns(ROUNDS, READERS, measure)
    return {readers: _median(rounds) for readers, rounds in found.items()}


def _number(field: str, text: str) -> float:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{field}:"))
    return float(line.split()[1])


def _state() -> dict[str, float]:
    status = Path("/proc/self/status").read_text()
    memory = Path("/proc/self/smaps_rollup").read_text()
    return {
        "memory": _number("Pss", memory) / 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": _number("Threads", status),
    }


def _hold(pipe: Connection, queues: int) -> None:
    before = _state()
    with ExitStack() as stack:
        for _ in range(queues):
            queue = stack.enter_context(MessageQueue(1, 1, max_chunk_bytes=4096, max_chunks=4))
            reader = MessageQueue.create_from_handle(queue.export_handle(0), 0)
            stack.enter_context(reader)
            queue.wait_until_ready(60)
            reader.fileno()
        after, cpu = _state(), time.process_time()
        time.sleep(IDLE)
        figures = {name: after[name] - before[name] for name in before}
        figures["cpu"] = 100 * (time.process_time() - cpu) / IDLE
        pipe.send(figures)


def _of_queues() -> dict[int, dict[str, float]]:
    found = {}
    for queues in QUEUES:
        with aside(_hold, queues) as process:
            found[queues] = process.hear()
    return found


def _of_sizes() -> dict[int, dict[str, float]]:
    def measure(size: int) -> dict[str, float]:
        return _send(1, bytes(size), max(5, min(MESSAGES, (1 << 31) // size)))

    found = in_turns(ROUNDS, SIZES, measure)
    return {size: _median(rounds) for size, rounds in found.items()}


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {"rounds": ROUNDS}
    for name, work in (("readers", _of_readers), ("queues", _of_queues), ("sizes", _of_sizes)):
        say(f"  {name}")
        found[name] = work()
    return found


def table(raw: dict[str, Any]) -> str:
    """For the manual."""
    lines = ["| readers | the writer's call, us | last reader has it, us | one futex wake, us |"]
    lines.append("|---|---|---|---|")
    for readers, row in raw["readers"].items():
        lines.append(f"| {readers} | {row['call']:.0f} | {row['last']:.0f} | {row['wake']:.0f} |")
    lines += ["", "| queues | MiB | descriptors | threads | % of a core, idle |"]
    lines.append("|---|---|---|---|---|")
    for queues, row in raw["queues"].items():
        figures = f"{row['descriptors']:.0f} | {row['threads']:.0f} | {row['cpu']:.2f}"
        lines.append(f"| {queues} | {row['memory']:.1f} | {figures} |")
    lines += ["", "| bytes | the writer's call, us | the reader has it, us | GB/s |"]
    lines.append("|---|---|---|---|")
    for size, row in raw["sizes"].items():
        rate = int(size) / row["last"] / 1e3
        lines.append(f"| {int(size):,} | {row['call']:,.0f} | {row['last']:,.0f} | {rate:.2g} |")
    return "\n".join(lines)
