"""Round trips: one object to all actors, and a number back from each.

Through memlane's queues and through the channels of Ray's compiled graphs, in turns.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from ray.dag import InputNode, MultiOutputNode

from benchmarks.machine import describe
from benchmarks.turns import in_turns
from memlane import WriterClosed
from memlane.cli.bench.worker import cpu_ns
from memlane.engines.ray import Crew, Place

OBJECTS: dict[str, Any] = {
    "dict of 225 bytes": {f"request-{number}": [number, number + 1] for number in range(8)},
    "array of 1 MiB": np.zeros(1 << 20, np.uint8),
}
TIMES, WARM, IDLE_SECONDS = 500, 50, 5.0
Step = Callable[[Any], None]


class Worker:
    memlane: Place

    def pid(self) -> int:
        return os.getpid()

    def step(self, given: Any) -> int:
        return len(given)

    def run(self) -> None:
        _, steps, answers = self.memlane
        try:
            while True:
                answers.enqueue(self.step(steps.dequeue()))
        except WriterClosed:
            return


def measure(step: Step, pids: list[int]) -> dict[str, float]:
    """Median round trips in us, and what all idle processes use, in % of one core."""
    found = {}
    for name, given in OBJECTS.items():
        times = []
        for _ in range(WARM + TIMES):
            began = time.perf_counter_ns()
            step(given)
            times.append(time.perf_counter_ns() - began)
        found[f"{name}, us"] = statistics.median(times[WARM:]) / 1e3
    before = sum(map(cpu_ns, pids))
    time.sleep(IDLE_SECONDS)
    found["idle, % of a core"] = (sum(map(cpu_ns, pids)) - before) / (IDLE_SECONDS * 1e7)
    return found


def through_memlane(count: int) -> dict[str, float]:
    workers = [ray.remote(Worker).remote() for _ in range(count)]
    pids = ray.get([worker.pid.remote() for worker in workers])
    with Crew(workers) as crew:
        running = [worker.run.remote() for worker in workers]

        def step(given: Any) -> None:
            crew.send(given)
            crew.receive()

        found = measure(step, [os.getpid(), *pids])
    ray.get(running)
    for worker in workers:
        ray.kill(worker)
    return found


def through_ray(count: int) -> dict[str, float]:
    workers = [ray.remote(Worker).remote() for _ in range(count)]
    pids = ray.get([worker.pid.remote() for worker in workers])
    with InputNode() as given_to_all:
        graph = MultiOutputNode([worker.step.bind(given_to_all) for worker in workers])
    compiled = graph.experimental_compile(_buffer_size_bytes=4 << 20)
    found = measure(lambda given: ray.get(compiled.execute(given)), [os.getpid(), *pids])
    compiled.teardown()
    for worker in workers:
        ray.kill(worker)
    return found


def compare(counts: Sequence[int], rounds: int) -> None:
    """Prints a table of medians."""
    ray.init(num_cpus=max(counts), include_dashboard=False, log_to_driver=False)
    sides = {"memlane": through_memlane, "compiled graph": through_ray}
    print(f"Ray {ray.__version__}, {describe()}\n\n| actors | what | {' | '.join(sides)} | ratio |")
    print("|---|---|---|---|---|")
    for count in counts:
        found = in_turns(rounds, sides, lambda side, count=count: sides[side](count))  # type: ignore[misc]
        for what in found["memlane"][0]:
            ours, theirs = (statistics.median(run[what] for run in found[side]) for side in sides)
            print(
                f"| {count} | {what} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |",
                flush=True,
            )
    ray.shutdown()
