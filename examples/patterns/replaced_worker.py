"""A worker is killed and replaced, and gets its state before the next call."""

import os
import signal

from memlane import WorkerDied, WorkerGroup


class Counter:
    def __init__(self, rank: int, world: int) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def recover(group: WorkerGroup[Counter], ranks: list[int]) -> None:
    group[ranks].call(Counter.add, done)


if __name__ == "__main__":
    done = 0
    with WorkerGroup(Counter, 2, on_death="replace", recover=recover) as group:
        for number in range(1, 6):
            totals = group.call(Counter.add, number)
            done += number
            if number == 3:
                try:
                    group[1].call(Counter.crash)
                except WorkerDied as death:
                    print(f"worker {death.rank} died after step {number}")
        print(totals)  # [15, 15]
