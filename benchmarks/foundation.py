"""What waiting, sending, detecting a death and importing cost. Part of `make bench`.

Every figure is measured in this run, with real processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks import needs
from benchmarks.machine import describe
from memlane import Handle, MessageQueue, ReaderDied, WriterDied

ROOT = Path(__file__).parent.parent
FORK = multiprocessing.get_context("fork")

IDLE_READERS = 4
IDLE_SECONDS = 10.0
KILLS = 200
IMPORTS = 11
LATENCY_RUNS = 5


def _read_all(handle: Handle, rank: int, done: Connection) -> None:
    reader = MessageQueue.create_from_handle(handle, rank)
    for sent_ns in reader:
        done.send(time.monotonic_ns() - sent_ns)


def _cpu_ns(process: BaseProcess) -> int:
    return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0])


def idle_readers() -> tuple[float, float]:
    """CPU of all blocked readers, in % of one core; us until the slowest has the next message."""
    with MessageQueue(IDLE_READERS, IDLE_READERS) as queue:
        here, there = FORK.Pipe()
        readers = [
            FORK.Process(target=_read_all, args=(queue.export_handle(), rank, there))
            for rank in range(IDLE_READERS)
        ]
        for reader in readers:
            reader.start()
        queue.wait_until_ready(timeout=30)
        threading.Event().wait(0.1)
        before = sum(map(_cpu_ns, readers))
        threading.Event().wait(IDLE_SECONDS)
        used = sum(map(_cpu_ns, readers)) - before
        queue.enqueue(time.monotonic_ns())
        slowest = max(here.recv() for _ in readers)
    for reader in readers:
        reader.join()
    return used / (IDLE_SECONDS * 1e9) * 100, slowest / 1e3


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


def _attach_and_wait(handle: Handle) -> None:
    reader = MessageQueue.create_from_handle(handle, 0)
    reader.wait_until_ready(timeout=30)
    signal.pause()


def _create_and_wait(handles: Connection) -> None:
    queue = MessageQueue(1, 1, max_chunk_bytes=64, max_chunks=1)
    handles.send(queue.export_handle())
    queue.wait_until_ready(timeout=30)
    signal.pause()


def _kill_when_asleep(victim: BaseProcess, sleeper: int) -> list[int]:
    """Kills `victim` once thread `sleeper` blocks; the time is then appended to the result."""
    killed_at: list[int] = []
    state = Path(f"/proc/self/task/{sleeper}/stat")

    def kill() -> None:
        while state.read_text().rpartition(")")[2].split()[0] != "S":
            pass
        killed_at.append(time.monotonic_ns())
        os.kill(victim.pid or 0, signal.SIGKILL)

    threading.Thread(target=kill).start()
    return killed_at


def _reader_death_ms() -> float:
    with MessageQueue(1, 1, max_chunk_bytes=64, max_chunks=1) as queue:
        victim = FORK.Process(target=_attach_and_wait, args=(queue.export_handle(),))
        victim.start()
        queue.wait_until_ready(timeout=30)
        queue.enqueue(0)
        killed_at = _kill_when_asleep(victim, threading.get_native_id())
        try:
            queue.enqueue(1)
        except ReaderDied:
            noticed = time.monotonic_ns()
        victim.join()
    return (noticed - killed_at[0]) / 1e6


def _writer_death_ms() -> float:
    here, there = FORK.Pipe()
    victim = FORK.Process(target=_create_and_wait, args=(there,))
    victim.start()
    with MessageQueue.create_from_handle(here.recv(), 0) as queue:
        queue.wait_until_ready(timeout=30)
        killed_at = _kill_when_asleep(victim, threading.get_native_id())
        try:
            queue.dequeue()
        except WriterDied:
            noticed = time.monotonic_ns()
    victim.join()
    return (noticed - killed_at[0]) / 1e6


def deaths() -> tuple[float, float]:
    """p50 and p100 in ms from kill -9 to the exception in a call that blocks without timeout."""
    times = [_reader_death_ms() for _ in range(KILLS // 2)]
    times += [_writer_death_ms() for _ in range(KILLS // 2)]
    return statistics.median(times), max(times)


def import_ms() -> float:
    """Median ms of `import memlane` after numpy and zmq, in fresh interpreters."""
    program = (
        "import numpy, zmq, time; t = time.perf_counter(); import memlane; "
        "print(time.perf_counter() - t)"
    )
    command = [sys.executable, "-c", program]
    return 1e3 * statistics.median(
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(IMPORTS)
    )


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.foundation", description=__doc__
    ).parse_args()
    needs.native_program("enqueue_latency")
    print(describe())
    percent, slowest = idle_readers()
    print(
        f"{IDLE_READERS} readers blocked for {IDLE_SECONDS:.0f} s: together {percent:.3f} % of one "
        f"core; the next message reached the slowest of them after {slowest:.0f} us"
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
    print(f"import memlane, beyond numpy and zmq: {import_ms():.1f} ms")


if __name__ == "__main__":
    main()
