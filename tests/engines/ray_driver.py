"""A driver of Ray actors on two nodes; it loses an actor, and then a whole node.

It prints what it observes as lines of JSON; the test cuts off the far node when it asks for that.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import ray

from memlane import ReaderDied, WriterClosed
from memlane.engines.ray import Crew, Place

LIVENESS, SECONDS = 2.0, 200.0


class Worker:
    memlane: Place  # which the driver's crew sets

    def pid(self) -> int:
        return os.getpid()

    def run(self) -> int:
        rank, steps, answers = self.memlane
        try:
            while True:
                answers.enqueue(int(steps.dequeue().sum()) + rank)
        except WriterClosed:
            return rank


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    make = ray.remote(num_cpus=0)(Worker)
    places = ["near", "near", "far", "far", "far"]
    workers = [make.options(resources={place: 1}).remote() for place in places]
    pids = ray.get([worker.pid.remote() for worker in workers])
    with Crew(workers, remote_liveness=LIVENESS, max_chunk_bytes=1 << 16, max_chunks=4) as crew:
        say(local=crew._steps.handle.local_reader_ranks)
        running = [worker.run.remote() for worker in workers]
        say(step=step(crew))
        for rank in (1, 2):
            os.kill(pids[rank], signal.SIGKILL)
            say(killed=rank, named=named(crew))
            crew.go_on_without(rank)
            say(step=step(crew))
        say(take="the far node")
        sys.stdin.readline()
        for _ in range(2):
            name = named(crew)
            say(lost=name)
            crew.go_on_without(name[0])
        say(step=step(crew))
    say(ended=ray.get(running[0], timeout=SECONDS))


def step(crew: Crew) -> dict[int, int]:
    crew.send(np.arange(10), SECONDS)
    return crew.receive(SECONDS)


def named(crew: Crew) -> tuple[int, float, float]:
    """Returns who is reported dead, since when it was waited for, and when it was reported, while
    all steps go on."""
    began = time.monotonic()
    while time.monotonic() - began < SECONDS:
        try:
            step(crew)
        except ReaderDied as error:
            return error.rank, began, time.monotonic()
    raise TimeoutError("nobody is said to have died")


main()
