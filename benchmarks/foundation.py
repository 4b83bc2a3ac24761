"""Measures what waiting, calling, detecting a death and importing cost. Part of `make bench`.

Every figure is measured in this run, with real processes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import needs
from benchmarks.machine import describe
from benchmarks.turns import all_aside, aside, in_turns
from memlane import Handle, MessageQueue, ReaderDied, TimedOut, WriterDied
from memlane.cli.bench.worker import cpu_ns

READERS = 4
SILENCE_SECONDS = 60.0
IDLE_SECONDS = 20.0
STATUS = {  # 52 bytes when encoded
    "step": 123456,
    "phase": "decode",
    "slots": [11, 512, 9],
    "batch": 64,
    "is_last": False,
}
CALLS = 20_000
CALL_RUNS = 9
KILLS = 200
IMPORTS = 41
STATEMENTS = (
    "import numpy",
    "import memlane",
    "import memlane; memlane.MessageQueue",
    "import memlane; memlane.SingleWriterShmObjectStorage",
    "import memlane.engines.vllm; memlane.engines.vllm.register()",
)
LATENCY_RUNS = 5


def _read_all(done: Connection, handle: Handle, rank: int) -> None:
    reader = MessageQueue.create_from_handle(handle, rank)
    for sent_ns in reader:
        done.send(time.monotonic_ns() - sent_ns)


def idle_readers() -> tuple[float, float, float]:
    """CPU of all blocked readers, in % of one core, first and after a silence; us to wake all."""
    with ExitStack() as stack:
        queue = MessageQueue(READERS, READERS)
        roles = [(_read_all, queue.export_handle(), rank) for rank in range(READERS)]
        readers = stack.enter_context(all_aside(roles))
        stack.callback(queue.close)
        queue.wait_until_ready(timeout=30)

        def percent() -> float:
            before = sum(cpu_ns(reader.pid) for reader in readers)
            threading.Event().wait(IDLE_SECONDS)
            used = sum(cpu_ns(reader.pid) for reader in readers) - before
            return used / (IDLE_SECONDS * 1e9) * 100

        threading.Event().wait(0.1)
        first = percent()
        threading.Event().wait(SILENCE_SECONDS)
        later = percent()
        queue.enqueue(time.monotonic_ns())
        slowest = max(reader.hear() for reader in readers)
    return first, later, slowest / 1e3


def _ns(call: Callable[[], Any]) -> float:
    """ns for one call, which may time out; median of several runs."""
    runs = []
    for _ in range(CALL_RUNS):
        begun = time.perf_counter_ns()
        for _ in range(CALLS):
            try:  # noqa: SIM105 - suppress() takes as long as what is measured
                call()
            except TimedOut:
                pass
        runs.append((time.perf_counter_ns() - begun) / CALLS)
    return statistics.median(runs)


def calls() -> tuple[float, float, float]:
    """ns of calls in one process: a small dict there and back, polls of nothing and of no room."""
    with ExitStack() as stack:
        queue = stack.enter_context(MessageQueue(READERS, READERS, None, 256, 2))
        handle = queue.export_handle()
        for rank in range(READERS):
            stack.enter_context(MessageQueue.create_from_handle(handle, rank))
        queue.enqueue(STATUS)
        queue.enqueue(STATUS)
        full_ns = _ns(lambda: queue.enqueue(STATUS, timeout=0))
    with (
        MessageQueue(1, 1) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
    ):

        def pair() -> None:
            queue.enqueue(STATUS)
            reader.dequeue()

        return _ns(pair), _ns(lambda: reader.dequeue(timeout=0)), full_ns


def native_enqueue() -> tuple[float, float]:
    """p50 and p99 of the native part of enqueue in ns, timed in C++; medians of several runs."""
    program = needs.native_program("enqueue_latency")
    runs = [
        json.loads(subprocess.run([program], check=True, capture_output=True, text=True).stdout)
        for _ in range(LATENCY_RUNS)
    ]
    return (
        statistics.median(run["p50_ns"] for run in runs),
        statistics.median(run["p99_ns"] for run in runs),
    )


def _attach_and_wait(_: Connection, handle: Handle) -> None:
    reader = MessageQueue.create_from_handle(handle, 0)
    reader.wait_until_ready(timeout=30)
    signal.pause()


def _create_and_wait(handles: Connection) -> None:
    queue = MessageQueue(1, 1, max_chunk_bytes=64, max_chunks=1)
    handles.send(queue.export_handle())
    queue.wait_until_ready(timeout=30)
    signal.pause()


def _kill_when_asleep(victim: int, sleeper: int) -> list[int]:
    """Kills that process once thread `sleeper` blocks; the time is then appended to the result."""
    killed_at: list[int] = []
    state = Path(f"/proc/self/task/{sleeper}/stat")

    def kill() -> None:
        while state.read_text().rpartition(")")[2].split()[0] != "S":
            pass
        killed_at.append(time.monotonic_ns())
        os.kill(victim, signal.SIGKILL)

    threading.Thread(target=kill).start()
    return killed_at


def _reader_death_ms() -> float:
    with (
        MessageQueue(1, 1, max_chunk_bytes=64, max_chunks=1) as queue,
        aside(_attach_and_wait, queue.export_handle()) as victim,
    ):
        queue.wait_until_ready(timeout=30)
        queue.enqueue(0)
        killed_at = _kill_when_asleep(victim.pid, threading.get_native_id())
        try:
            queue.enqueue(1)
        except ReaderDied:
            noticed = time.monotonic_ns()
    return (noticed - killed_at[0]) / 1e6


def _writer_death_ms() -> float:
    with (
        aside(_create_and_wait) as victim,
        MessageQueue.create_from_handle(victim.hear(), 0) as queue,
    ):
        queue.wait_until_ready(timeout=30)
        killed_at = _kill_when_asleep(victim.pid, threading.get_native_id())
        try:
            queue.dequeue()
        except WriterDied:
            noticed = time.monotonic_ns()
    return (noticed - killed_at[0]) / 1e6


def deaths() -> tuple[float, float]:
    """p50 and p100 in ms from kill -9 to the exception in a call that blocks without timeout."""
    times = [_reader_death_ms() for _ in range(KILLS // 2)]
    times += [_writer_death_ms() for _ in range(KILLS // 2)]
    return statistics.median(times), max(times)


def imports_ms() -> dict[str, float]:
    """Median ms of each statement as the first one of a fresh interpreter; they take turns."""
    environment = {k: v for k, v in os.environ.items() if k != "MEMLANE_VLLM"}

    def seconds(statement: str) -> float:
        program = f"import time; t = time.perf_counter(); {statement}; "
        command = [sys.executable, "-c", program + "print(time.perf_counter() - t)"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        return float(done.stdout)

    found = in_turns(IMPORTS, STATEMENTS, seconds)
    return {statement: 1e3 * statistics.median(times) for statement, times in found.items()}


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.foundation", description=__doc__
    ).parse_args()
    needs.native_program("enqueue_latency")
    print(describe())
    first, later, slowest = idle_readers()
    print(
        f"{READERS} blocked readers together, {IDLE_SECONDS:.0f} s: {first:.3f} % of one core; "
        f"after {SILENCE_SECONDS:.0f} s more of silence {later:.3f} %; then a message reached the "
        f"slowest after {slowest:.0f} us"
    )
    pair, empty, full = calls()
    print(
        f"a 52-byte dict sent and received in one process: {pair:.0f} ns; dequeue(timeout=0) of an "
        f"empty queue {empty / 1e3:.1f} us; enqueue(timeout=0) to a full one, {READERS} readers "
        f"behind, {full / 1e3:.1f} us"
    )
    p50, p99 = native_enqueue()
    print(
        f"native part of enqueue, 225 bytes, one reader polling: p50 {p50:.0f} ns, p99 {p99:.0f} ns"
    )
    median, worst = deaths()
    print(
        f"kill -9 noticed by a blocked peer, {KILLS} kills: "
        f"p50 {median:.0f} ms, p100 {worst:.0f} ms"
    )
    for statement, ms in imports_ms().items():
        print(f"{statement}: {ms:.1f} ms")


if __name__ == "__main__":
    main()
