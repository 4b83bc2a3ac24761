"""`python -m benchmarks.figures.stuck`: records `memlane stuck` as a picture of a terminal.

A scheduler and three workers; worker 1 hangs in its model. The output is as it is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import threading
import time
from contextlib import suppress

from benchmarks.figures.terminal import picture
from memlane import Handle, MemlaneError, MessageQueue

WORKERS = 3
CULPRIT = 1
BLOCKED = 3.0  # seconds


def all_reduce() -> None:
    """A collective that never ends."""
    threading.Event().wait()


def forward(step: int, rank: int) -> None:
    if rank == CULPRIT and step == 2:
        all_reduce()


def worker(handle: Handle, rank: int) -> None:
    with MessageQueue.create_from_handle(handle, rank) as queue:
        for step in queue:
            forward(step, rank)


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.figures.stuck", description=__doc__
    ).parse_args()
    fork = multiprocessing.get_context("fork")
    with MessageQueue(WORKERS, WORKERS) as queue:
        workers = [
            fork.Process(target=worker, args=(queue.export_handle(), rank), daemon=True)
            for rank in range(WORKERS)
        ]
        for process in workers:
            process.start()
        queue.wait_until_ready(timeout=60)
        scheduler = threading.Thread(target=_schedule, args=(queue,), daemon=True)
        scheduler.start()
        time.sleep(BLOCKED)
        done = subprocess.run(
            [sys.executable, "-m", "memlane", "stuck"], stdout=subprocess.PIPE, text=True
        )
        for process in workers:
            process.kill()
        scheduler.join()
    print(picture("stuck", "memlane stuck", 112, [("memlane stuck", done.stdout)]))


def _schedule(queue: MessageQueue) -> None:
    with suppress(MemlaneError):  # the workers are killed at the end
        for step in range(1000):
            queue.enqueue(step)


if __name__ == "__main__":
    main()
