"""A driver and its Ray actors: python examples/ray_workers.py (pip install . ray)

The driver sends each step to the actors on its node by one write into shared memory, and to each
actor on another node by a stream; each actor answers through its own queue. Then an actor is
killed: the driver learns which one died, and continues with the others.

On a cluster, set RAY_ADDRESS; `--workers 8` then spreads eight actors over its nodes, and none is
killed.
"""

from __future__ import annotations

import argparse
import os
import signal

import numpy as np
import ray

from memlane import ReaderDied, WriterClosed
from memlane.engines.ray import Crew, Place

STEPS, SECONDS = 6, 60.0


class Worker:
    """One actor."""

    memlane: Place  # set by the driver's crew

    def pid(self) -> int:
        """The actor's process id."""
        return os.getpid()

    def run(self, workers: int) -> int:
        """Works until the driver closes; Ray calls no other method of this actor meanwhile."""
        place = self.memlane
        count = 0
        with place.steps as steps, place.answers as answers:
            while True:
                try:
                    with steps.dequeue_view() as step:  # its arrays are not copied
                        total = int(step["tokens"][place.rank :: workers].sum())
                except WriterClosed:
                    return count
                answers.enqueue(total)
                count += 1


def totals(crew: Crew, number: int) -> dict[int, int]:
    """Sends one step, and waits for the totals of the workers that are alive."""
    step = {"number": number, "tokens": np.arange(1000) + 1000 * number}
    is_sent = False
    while True:
        try:
            if not is_sent:
                crew.send(step, SECONDS)
                is_sent = True
            return crew.receive(SECONDS)
        except ReaderDied as error:
            print(f"worker {error.rank}: {error}")
            crew.go_on_without(error.rank)


def main() -> None:
    """Runs some steps with all workers, then some after the death of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    count = parser.parse_args().workers
    here = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": count, "include_dashboard": False}
    ray.init(**here)
    make = ray.remote(scheduling_strategy="SPREAD")(Worker)
    workers = [make.remote() for _ in range(count)]
    pids = ray.get([worker.pid.remote() for worker in workers])
    with Crew(workers) as crew:
        running = [worker.run.remote(count) for worker in workers]
        for number in range(STEPS):
            if number == STEPS // 2 and not os.environ.get("RAY_ADDRESS"):
                # As the kernel does when memory is short; `ray.kill` takes effect a moment later.
                os.kill(pids[-1], signal.SIGKILL)
            print(f"step {number}: {totals(crew, number)}")
    for rank in range(count - 1):
        print(f"worker {rank} took {ray.get(running[rank])} of {STEPS} steps")
    ray.shutdown()


if __name__ == "__main__":
    main()
