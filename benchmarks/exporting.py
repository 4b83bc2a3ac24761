"""Measures what `memlane export` and `memlane trace` cost: a scrape, and a queue beside them.

`python -m benchmarks.exporting`: three minutes. Scrapes of 20 queues with 8 readers each, which are
processes of this run, over one connection each, as Prometheus makes them; then a queue with two
readers beside an exporter that is scraped every second, and beside a trace, and alone, in turns.
"""

from __future__ import annotations

import argparse
import http.client
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.turns import SPAWN, aside
from benchmarks.watching import MEMLANE, READERS, cpu_seconds, show_ratios
from memlane import Handle, MessageQueue
from memlane.inspect import segments

QUEUES, ROUNDS = 20, 5


def attach(pipe: Connection, handles: list[Handle], rank: int) -> None:
    """A process with a reader of each queue."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(MessageQueue.create_from_handle(handle, rank))
        pipe.send(None)
        pipe.recv()


@contextmanager
def queues(count: int) -> Iterator[None]:
    with ExitStack() as stack:
        writers = [
            stack.enter_context(MessageQueue(READERS, READERS, max_chunk_bytes=65536))
            for _ in range(count)
        ]
        readers = []
        for rank in range(READERS):
            handles = [writer.export_handle(rank) for writer in writers]
            readers.append(stack.enter_context(aside(attach, handles, rank, context=SPAWN)))
        for reader in readers:
            reader.hear()
        for writer in writers:
            writer.wait_until_ready(30)
            writer.enqueue("a message")
        yield
        for reader in readers:
            reader.pipe.send(None)


@contextmanager
def exporter() -> Iterator[tuple[int, int]]:
    """Its pid and its port."""
    command = [*MEMLANE, "export", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            yield process.pid, int(line.partition("127.0.0.1:")[2].partition("/")[0])
        finally:
            process.kill()


def scrape(port: int) -> int:
    """Returns the number of lines."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read()
    connection.close()
    return text.count(b"\n")


def resident(pid: int) -> float:
    """MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / (1 << 20)


def show_scrapes(count: int) -> None:
    with queues(QUEUES), exporter() as (pid, port):
        for _ in range(50):
            lines = scrape(port)
        before, used, taken = resident(pid), cpu_seconds(pid), []
        for _ in range(count):
            time.sleep(0.21)  # a look serves for 0.2 s
            begun = time.perf_counter()
            scrape(port)
            taken.append(1e3 * (time.perf_counter() - begun))
        used = cpu_seconds(pid) - used
        taken.sort()
        print(
            f"{count} scrapes of {QUEUES} queues of {READERS} readers, {lines} lines: median "
            f"{statistics.median(taken):.1f} ms, p99 {taken[int(0.99 * count)]:.1f}, longest "
            f"{taken[-1]:.1f}; {1e3 * used / count:.1f} ms of processor time each; resident "
            f"{before:.1f} MiB before, {resident(pid):.1f} after",
            flush=True,
        )


@contextmanager
def scraped() -> Iterator[None]:
    """An exporter that is scraped every second."""
    with exporter() as (_, port):
        loop = [sys.executable, "-c", _LOOP, str(port)]
        process = subprocess.Popen(loop)
        try:
            yield
        finally:
            process.kill()
            process.wait()


_LOOP = """
import sys, time, urllib.request
while True:
    urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/metrics").read()
    time.sleep(1)
"""


@contextmanager
def traced() -> Iterator[None]:
    """A trace of whoever takes part in a queue, from the moment that there is one."""
    over = threading.Event()

    def trace() -> None:
        while not over.wait(0.1):
            people = [who for segment in segments() for who in segment.participants]
            pids = [who.pid for who in people if who.pid is not None and who.state == "running"]
            if not pids:
                continue
            command = [*MEMLANE, "trace", str(pids[0]), "--seconds", "60", "-o", "/dev/null"]
            silent = subprocess.DEVNULL
            with subprocess.Popen(command, stdout=silent, stderr=silent) as child:
                over.wait()
                child.kill()

    thread = threading.Thread(target=trace)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> None:
    words = argparse.ArgumentParser(prog="python -m benchmarks.exporting", description=__doc__)
    words.add_argument("--scrapes", type=int, default=200)
    words.add_argument("--rounds", type=int, default=ROUNDS)
    options = words.parse_args()
    print(describe())
    show_scrapes(options.scrapes)
    for name, watching in (("export", scraped), ("trace", traced)):
        print(f"a queue beside memlane {name}:")
        show_ratios(watching, options.rounds)


if __name__ == "__main__":
    main()
