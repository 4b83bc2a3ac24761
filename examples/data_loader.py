"""A data loader whose workers may die: python examples/data_loader.py (pip install .)

The trainer tells its workers by one queue which samples each of them loads next, and gathers the
samples. One worker is killed in the middle of an epoch. The trainer learns it, starts another one
in its place, and has it load what the dead one owed: every sample arrives, and arrives once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from memlane import Gather, GatherHandle, Handle, MessageQueue, ReaderDied, WriterDied

Sample = tuple[int, np.ndarray]
Plan = dict[int, list[int]]
"""Which samples each worker loads."""
SHAPE = (3, 224, 224)


def load(folder: str, plans: Handle, rank: int, samples: GatherHandle) -> None:
    """Role: a worker. Loads what the trainer wants, until it closes."""
    with (
        # In this order: whoever has a plan can say that it has died.
        Gather[Sample].create_from_handle(samples, rank) as out,
        MessageQueue[Plan].create_from_handle(plans, rank) as todo,
    ):
        for plan in todo:
            for number in plan.get(rank, []):
                image = np.load(f"{folder}/{number}.npy")
                out.enqueue((number, (image.astype(np.float32) / 255 - 0.5) / 0.25))


class Loader:
    """The trainer's side: its workers, and what each of them owes."""

    def __init__(self, folder: str, workers: int) -> None:
        self._folder = folder
        self._plans = MessageQueue[Plan](workers, workers)
        self._samples = Gather[Sample](workers)
        self._owed: dict[int, set[int]] = {rank: set() for rank in range(workers)}
        self.processes = {
            rank: self._start(
                rank, self._plans.export_handle(rank), self._samples.export_handle(rank)
            )
            for rank in range(workers)
        }
        self._plans.wait_until_ready(60, processes=self.processes.values())

    def _start(self, rank: int, plans: Handle, samples: GatherHandle) -> BaseProcess:
        process = multiprocessing.get_context("spawn").Process(
            target=load, args=(self._folder, plans, rank, samples), daemon=True
        )
        process.start()
        return process

    def want(self, numbers: list[int]) -> None:
        """Has these samples loaded, by whoever owes least."""
        plan: Plan = {rank: [] for rank in self._owed}
        for number in numbers:
            rank = min(plan, key=lambda rank: len(self._owed[rank]))
            plan[rank].append(number)
            self._owed[rank].add(number)
        self._send(plan)

    def _send(self, plan: Plan) -> None:
        try:
            self._plans.enqueue(plan)
        except ReaderDied as death:  # nobody has got it; `take` replaces that worker
            self._plans.release_reader(death.rank or 0)
            self._send(plan)

    def take(self) -> Sample:
        """The next sample, of whichever worker."""
        while True:
            try:
                number, image = self._samples.dequeue(timeout=60)
            except WriterDied as death:  # after all that it had sent
                self._replace(death.rank or 0, death.pid)
                continue
            for owed in self._owed.values():
                if number in owed:
                    owed.remove(number)
                    return number, image

    def _replace(self, rank: int, pid: int) -> None:
        self._samples.release_writer(rank)
        self._plans.release_reader(rank)
        handles = self._plans.readmit(rank), self._samples.readmit(rank)
        self.processes[rank] = self._start(rank, *handles)
        owed = sorted(self._owed[rank])
        self._send({rank: owed})  # the first that the new one gets
        print(
            f"worker {rank} (pid {pid}) died and owed {len(owed)} samples; replaced by pid "
            f"{self.processes[rank].pid}"
        )

    def close(self) -> None:
        self._plans.close()
        for process in self.processes.values():
            process.join()
        self._samples.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=3)
    arguments = parser.parse_args()
    dice = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.samples):
            np.save(Path(folder) / f"{number}.npy", dice.integers(0, 256, SHAPE, np.uint8))
        loader = Loader(folder, arguments.workers)
        order = [int(number) for number in dice.permutation(arguments.samples)]
        batches = [order[at : at + arguments.batch] for at in range(0, len(order), arguments.batch)]
        seen: list[int] = []
        mean = 0.0
        loader.want(order[: arguments.batch])
        for step, batch in enumerate(batches):
            if step + 1 < len(batches):
                loader.want(batches[step + 1])  # is loaded while this one is trained on
            if step == len(batches) // 2:
                os.kill(
                    loader.processes[arguments.workers - 1].pid or 0, signal.SIGKILL
                )  # an accident
            images = [loader.take() for _ in batch]
            seen += [number for number, _ in images]
            mean += float(np.stack([image for _, image in images]).mean()) / len(batches)
        loader.close()
    missing, twice = set(order) - set(seen), len(seen) - len(set(seen))
    counts = f"{len(missing)} missing, {twice} twice"
    print(f"{len(seen)} samples in {len(batches)} batches, {counts}; mean {mean:.3f}")


if __name__ == "__main__":
    main()
