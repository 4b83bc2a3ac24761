"""A camera and what looks at it: python examples/camera.py (pip install .)

The camera never waits. A controller sees every frame in time; a viewer needs three frames' time for
one, and always shows the latest; a recorder keeps its last frames without copying them. Then the
viewer is killed: the camera learns it, goes on, and a new viewer takes the place.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import time
from collections import deque
from multiprocessing.process import BaseProcess

import numpy as np

from memlane import Handle, MessageQueue, ReaderDied

FRAME = np.dtype([("number", "<u8"), ("taken_ns", "<u8"), ("pixels", np.uint8, (720, 1280, 3))])
CONTROLLER, VIEWER, RECORDER = range(3)
WORK = {CONTROLLER: 0.0, VIEWER: 3.0, RECORDER: 0.0}  # on each frame, in times of the camera's
NAMES = {CONTROLLER: "controller", VIEWER: "viewer", RECORDER: "recorder"}


def look(handle: Handle, rank: int, interval: float) -> None:
    """Looks at frames until the camera closes."""
    kept: deque[np.ndarray] = deque(maxlen=10 if rank == RECORDER else 1)
    ages = []
    with MessageQueue[np.ndarray].create_from_handle(handle, rank) as camera:
        for frame in camera:
            ages.append(time.monotonic_ns() - int(frame["taken_ns"]))
            kept.append(frame)  # memory that the camera leaves alone until it is dropped
            time.sleep(WORK[rank] * interval)
        numbers = [int(frame["number"]) for frame in kept]
        whole = all((frame["pixels"] == frame["number"] % 251).all() for frame in kept)
        print(
            f"{NAMES[rank]:10} saw {len(ages)} frames, skipped {camera.skipped}; median age "
            f"{np.median(ages) / 1e6:.1f} ms; keeps {len(numbers)}, the last is {numbers[-1]}"
            f"{'' if whole else ', and they are torn'}",
            flush=True,
        )


def start(handle: Handle, rank: int, interval: float) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(
        target=look, args=(handle, rank, interval), daemon=True
    )
    process.start()
    return process


class Camera:
    """The writer, and the processes that look at its frames."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._queue = MessageQueue[np.ndarray](n_reader=3, n_local_reader=3, mode="latest")
        self.seers = [start(self._queue.export_handle(rank), rank, interval) for rank in WORK]
        self._queue.wait_until_ready(timeout=60, processes=self.seers)
        self.slowest = 0.0

    def send(self, frame: np.ndarray) -> None:
        before = time.monotonic()
        try:
            self._queue.enqueue(frame)
        except ReaderDied as death:  # nobody has got it
            self._replace(death)
            self.send(frame)
        else:
            self.slowest = max(self.slowest, time.monotonic() - before)

    def wait_for_all(self) -> None:
        try:
            self._queue.wait_until_ready(timeout=60, processes=self.seers)
        except ReaderDied as death:
            self._replace(death)
            self.wait_for_all()

    def _replace(self, death: ReaderDied) -> None:
        rank = death.rank
        if rank is None:  # it died before it had attached
            raise death
        print(f"{NAMES[rank]} (pid {death.pid}) died; another takes its place")
        self._queue.release_reader(rank)
        self.seers[rank] = start(self._queue.readmit(rank), rank, self._interval)

    def close(self) -> None:
        self._queue.close()
        for process in self.seers:
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--frames", type=int, default=120)
    parser.add_argument("--rate", type=float, default=60.0, help="frames a second")
    arguments = parser.parse_args()
    interval = 1 / arguments.rate
    frame = np.zeros((), FRAME)
    camera = Camera(interval)
    begun = time.monotonic()
    for number in range(arguments.frames + 1):
        time.sleep(max(0.0, begun + number * interval - time.monotonic()))
        if number == arguments.frames // 2:
            os.kill(camera.seers[VIEWER].pid or 0, signal.SIGKILL)  # an accident
        if number == arguments.frames:
            camera.wait_for_all()  # the last frame is for all
        frame["pixels"] = number % 251
        frame["number"], frame["taken_ns"] = number, time.monotonic_ns()
        camera.send(frame)
    camera.close()
    sent = arguments.frames + 1
    print(f"the camera sent {sent} frames; its slowest call took {camera.slowest * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
