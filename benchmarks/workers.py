"""A scheduler and its workers: calls of all, arrays to all and back, calls in flight.

`python -m benchmarks.workers`: some minutes. Ways alternate; medians. All start by fork, but Ray's.

group: `memlane.WorkerGroup`
queues: a `MessageQueue` to all workers and a `Gather` back, by hand: no deaths, names, timeouts
pipes: a `multiprocessing.Pipe` for each worker
pool, executor: of multiprocessing and of concurrent.futures, a task for each worker
loky, ray: its executor; an actor for each worker; where they are installed
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from benchmarks.machine import describe
from benchmarks.turns import aside, in_turns
from memlane import Gather, GatherHandle, Handle, MessageQueue, WorkerGroup
from memlane.cli.bench.processes import FORK

Collect = Callable[[], list[Any]]
"""Returns the answers of all workers to a call."""
Submit = Callable[[str, Any], Collect]
"""Begins a call of a method, with an argument."""
MIB = 1 << 20
STEP = {"step": 1, "requests": [7, 8, 9], "stop": False}
IN_FLIGHT = 8


class Model:
    """The calls that each worker answers."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.result = np.ones(MIB, dtype=np.uint8)

    def step(self, batch: object) -> object:
        return batch

    def size(self, array: np.ndarray) -> int:
        return array.nbytes

    def array(self, _: object) -> np.ndarray:
        return self.result


_MODEL = Model()  # of a process of a pool


def run(method: str, argument: object) -> object:
    return getattr(_MODEL, method)(argument)


@contextmanager
def group(workers: int) -> Iterator[Submit]:
    with WorkerGroup(Model, workers, start_method="fork", max_in_flight=IN_FLIGHT) as made:
        yield lambda method, argument: made.submit(method, argument).result


def queue_worker(_: Any, calls: Handle, answers: GatherHandle) -> None:
    model = Model()
    with (
        Gather.create_from_handle(answers, answers.rank) as back,
        MessageQueue.create_from_handle(calls, answers.rank) as queue,
    ):
        for method, argument in queue:
            back.enqueue([answers.rank, getattr(model, method)(argument)])


@contextmanager
def queues(workers: int) -> Iterator[Submit]:
    with ExitStack() as stack:
        back: Gather[Any] = stack.enter_context(Gather(workers))
        with MessageQueue[Any](workers, workers) as calls:
            for rank in range(workers):
                handles = calls.export_handle(rank), back.export_handle(rank)
                stack.enter_context(aside(queue_worker, *handles))
            calls.wait_until_ready(60)
            back.wait_until_ready(60)
            found: list[deque[Any]] = [deque() for _ in range(workers)]

            def collect() -> list[Any]:
                while not all(found):
                    rank, value = back.dequeue()
                    found[rank].append(value)
                return [each.popleft() for each in found]

            def submit(method: str, argument: object) -> Collect:
                calls.enqueue([method, argument])
                return collect

            yield submit


def pipe_worker(pipe: Any) -> None:
    model = Model()
    while (call := pipe.recv()) is not None:
        pipe.send(getattr(model, call[0])(call[1]))


@contextmanager
def pipes(workers: int) -> Iterator[Submit]:
    with ExitStack() as stack:
        ends = [stack.enter_context(aside(pipe_worker)).pipe for _ in range(workers)]

        def submit(method: str, argument: object) -> Collect:
            for end in ends:
                end.send((method, argument))
            return lambda: [end.recv() for end in ends]

        yield submit
        for end in ends:
            end.send(None)


@contextmanager
def pool(workers: int) -> Iterator[Submit]:
    with FORK.Pool(workers) as made:

        def submit(method: str, argument: object) -> Collect:
            tasks = [made.apply_async(run, (method, argument)) for _ in range(workers)]
            return lambda: [task.get() for task in tasks]

        yield submit


def _submitted(executor: Any, workers: int, method: str, argument: object) -> Collect:
    tasks = [executor.submit(run, method, argument) for _ in range(workers)]
    return lambda: [task.result() for task in tasks]


@contextmanager
def executor(workers: int) -> Iterator[Submit]:
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as made:
        yield partial(_submitted, made, workers)


@contextmanager
def loky(workers: int) -> Iterator[Submit]:
    made = importlib.import_module("loky").get_reusable_executor(workers)
    yield partial(_submitted, made, workers)
    made.shutdown()


@contextmanager
def ray(workers: int) -> Iterator[Submit]:
    ray = importlib.import_module("ray")
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    actors = [ray.remote(Model).remote(rank, workers) for rank in range(workers)]

    def submit(method: str, argument: object) -> Collect:
        if isinstance(argument, np.ndarray):
            argument = ray.put(argument)
        tasks = [getattr(actor, method).remote(argument) for actor in actors]
        return lambda: ray.get(tasks)

    yield submit
    ray.shutdown()


WAYS = {each.__name__: each for each in (group, queues, pipes, pool, executor, loky, ray)}
ROWS = {  # the method, the argument's bytes (None: a small dict), calls, and how many are under way
    "call of all, small dict, us": ("step", None, 1000, 1),
    "1 MiB to all, us": ("size", MIB, 200, 1),
    "64 MiB to all, us": ("size", 64 * MIB, 5, 1),
    "1 MiB back from each, us": ("array", None, 200, 1),
    f"small dict, {IN_FLIGHT} in flight, us": ("step", None, 2000, IN_FLIGHT),
}


def microseconds(submit: Submit, row: str, share: float) -> float:
    """Time of a call."""
    method, size, calls, most = ROWS[row]
    argument = STEP if size is None else np.ones(size, dtype=np.uint8)
    count = max(2, int(calls * share))
    under_way: deque[Collect] = deque()
    submit(method, argument)()
    begun = time.perf_counter()
    for _ in range(count):
        if len(under_way) == most:
            under_way.popleft()()
        under_way.append(submit(method, argument))
    while under_way:
        under_way.popleft()()
    return (time.perf_counter() - begun) / count * 1e6


def measured(way: str, workers: int, share: float) -> dict[str, float]:
    with WAYS[way](workers) as submit:
        return {row: microseconds(submit, row, share) for row in ROWS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the calls of each row")
    parser.add_argument("--way", action="append", choices=WAYS, default=[])
    arguments = parser.parse_args()
    there = [way for way in WAYS if way not in ("loky", "ray") or importlib.util.find_spec(way)]
    ways = arguments.way or there
    print(f"{arguments.workers} workers, {arguments.rounds} rounds; {describe()}")
    found = in_turns(
        arguments.rounds, ways, lambda way: measured(way, arguments.workers, arguments.share)
    )
    print(f"{'':32}" + "".join(f"{way:>11}" for way in ways) + "   group / queues")
    for row in ROWS:
        medians = {way: statistics.median(each[row] for each in found[way]) for way in ways}
        ratio = medians.get("group", 0) / medians.get("queues", 1)
        print(f"{row:32}" + "".join(f"{medians[way]:11,.0f}" for way in ways) + f"{ratio:11.2f}")


if __name__ == "__main__":
    main()
