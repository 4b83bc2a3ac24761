"""A queue from a driver to Ray actors: python examples/ray_workers.py (pip install memlane ray)

The driver sends every step to two workers, by one write into shared memory; each worker answers
through a queue of its own. Handles travel as arguments and results of actor calls. Then one worker
is killed: the driver hears who died, and goes on with the other.

With workers on several nodes place the actors first, ask each for its node
(`ray.get_runtime_context().get_node_id()`), and give the ranks on the driver's own node as
`local_reader_ranks`:

    queue = MessageQueue(len(workers), len(local), local, relay=True)

The others are then reached over TCP, by one stream for each node, with the same calls. Their
answers come back by a `MessageQueue(1, 0)` each. Such a handle carries a key; it travels with Ray's
own traffic, so protect that (`RAY_USE_TLS`).
"""

from __future__ import annotations

import os
import signal

import numpy as np
import ray

from memlane import Handle, MessageQueue, ReaderDied, WriterClosed, WriterDied

WORKERS, STEPS, SECONDS = 2, 6, 60.0


class Worker:
    """One actor; `ray.remote` makes it one."""

    def __init__(self, handle: Handle, rank: int) -> None:
        self.rank = rank
        self.steps = MessageQueue.create_from_handle(handle, rank)
        self.answers = MessageQueue(1, 1)

    def about(self) -> tuple[int, Handle]:
        """This worker's process, and what the driver reads its answers by."""
        return os.getpid(), self.answers.export_handle(0)

    def run(self) -> int:
        """Works until the driver closes its queue. Ray runs nothing else in here meanwhile."""
        count = 0
        with self.steps, self.answers:
            self.answers.wait_until_ready(SECONDS)
            while True:
                try:
                    with self.steps.dequeue_view() as step:  # its arrays are not copied
                        total = int(step["tokens"][self.rank :: WORKERS].sum())
                        number = step["number"]
                except WriterClosed:
                    return count
                self.answers.enqueue({"step": number, "total": total})
                count += 1


class Driver:
    """The writer of the steps, and the readers of the answers of all workers that live."""

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        make = ray.remote(Worker)
        self.workers = [make.remote(queue.export_handle(rank), rank) for rank in range(WORKERS)]
        about = ray.get([worker.about.remote() for worker in self.workers])
        self.pids = [pid for pid, _ in about]
        self.answers = {
            rank: MessageQueue.create_from_handle(handle, 0)
            for rank, (_, handle) in enumerate(about)
        }
        queue.wait_until_ready(SECONDS)  # from here on it leaves nothing behind, whoever is killed
        self.running = [worker.run.remote() for worker in self.workers]

    def step(self, number: int) -> dict[int, int]:
        """Sends one step, and waits for what the workers make of it."""
        step = {"number": number, "tokens": np.arange(1000) + 1000 * number}
        while True:
            try:
                self.queue.enqueue(step, SECONDS)
                break
            except ReaderDied as error:  # nothing was sent
                self.go_on_without(error.rank, error)
        totals = {}
        for rank, answers in list(self.answers.items()):
            try:
                totals[rank] = answers.dequeue(SECONDS)["total"]
            except WriterDied as error:
                self.go_on_without(rank, error)
        return totals

    def go_on_without(self, rank: int, error: Exception) -> None:
        """Nobody waits for that worker any more."""
        print(f"worker {rank}: {error}")
        self.answers.pop(rank).close()
        self.queue.release_reader(rank)

    def close(self) -> None:
        """The workers read what is left, and end."""
        self.queue.close()
        for rank, answers in self.answers.items():
            steps = ray.get(self.running[rank], timeout=SECONDS)
            print(f"worker {rank} took {steps} of {STEPS} steps")
            answers.close()


def main() -> None:
    """Some steps with all workers, some after the death of one, and the end."""
    ray.init(num_cpus=WORKERS, include_dashboard=False, object_store_memory=100 << 20)
    with MessageQueue(WORKERS, WORKERS) as queue:
        driver = Driver(queue)
        for number in range(STEPS):
            if number == STEPS // 2:
                # As the kernel does where memory is short; `ray.kill` takes effect a moment later.
                os.kill(driver.pids[1], signal.SIGKILL)
            print(f"step {number}: {driver.step(number)}")
        driver.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
