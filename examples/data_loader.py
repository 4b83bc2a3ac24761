"""A data loader whose workers may die: python examples/data_loader.py (pip install .)

The trainer has its workers load a part of the next batch each while it trains on one. A worker is
killed in the middle of an epoch: another process takes its place, and loads what it owed. Every
sample arrives, and arrives once.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from pathlib import Path

import numpy as np

from memlane import WorkerDied, WorkerGroup

Sample = tuple[int, np.ndarray]
SHAPE = (3, 224, 224)


class Worker:
    """A process that loads samples."""

    def __init__(self, rank: int, world: int, folder: str) -> None:
        self._folder = folder

    def load(self, numbers: list[int]) -> list[Sample]:
        images = ((number, np.load(f"{self._folder}/{number}.npy")) for number in numbers)
        return [(number, (image.astype(np.float32) / 255 - 0.5) / 0.25) for number, image in images]


class Batch:
    """Samples that workers load, a part each."""

    def __init__(self, group: WorkerGroup[Worker], numbers: list[int]) -> None:
        self._group = group
        self._parts = [numbers[rank :: group.world] for rank in group.ranks]
        self._call = group.scatter(Worker.load, self._parts)

    def samples(self) -> list[Sample]:
        """Waits for them. What a dead worker owes is loaded by the process that replaces it."""
        samples: list[Sample] = []
        for rank, loaded in enumerate(self._call.outcomes(timeout=60)):
            if isinstance(loaded, WorkerDied):
                owed = self._parts[rank]
                samples += self._group[rank].call(Worker.load, owed)[0]
                print(
                    f"worker {rank} (pid {loaded.pid}) died and owed {len(owed)} samples; "
                    f"replaced by pid {self._group.pids[rank]}"
                )
            elif isinstance(loaded, BaseException):
                raise loaded
            else:
                samples += loaded
        return samples


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
        order = [int(number) for number in dice.permutation(arguments.samples)]
        batches = [order[at : at + arguments.batch] for at in range(0, len(order), arguments.batch)]
        seen: list[int] = []
        mean = 0.0
        with WorkerGroup(Worker, arguments.workers, args=[folder], on_death="replace") as group:
            following = Batch(group, batches[0])
            for step in range(len(batches)):
                batch, victim = following, group.pids[-1]
                if step == len(batches) // 2:
                    os.kill(victim, signal.SIGSTOP)  # so that it owes something when it dies
                if step + 1 < len(batches):
                    following = Batch(group, batches[step + 1])  # loaded while this one is used
                if step == len(batches) // 2:
                    os.kill(victim, signal.SIGKILL)  # an accident
                samples = batch.samples()
                seen += [number for number, _ in samples]
                mean += float(np.stack([image for _, image in samples]).mean()) / len(batches)
    missing, twice = set(order) - set(seen), len(seen) - len(set(seen))
    counts = f"{len(missing)} missing, {twice} twice"
    print(f"{len(seen)} samples in {len(batches)} batches, {counts}; mean {mean:.3f}")


if __name__ == "__main__":
    main()
