"""Random calls, streams, cancellations, kills, stops and replacements against a model that counts
how often each worker ran each call: never twice, always if it has answered, never if it has skipped
it, and in the order in which they were sent. Each gets an object of the group's store, which holds
few of them."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import CallTimedOut, Cancelled, Stored, WorkerDied, WorkerGroup
from tests.support import PATIENCE, until

STEPS = int(os.environ.get("MEMLANE_SOAK_WORKERS", "60"))
WORLD = 3
KEYS, SIZE = 40, 1000  # of the objects; a third of them find room


class Noting:
    """It notes each call in a file of its own, before it runs."""

    def __init__(self, rank: int, world: int, folder: str) -> None:
        self.rank = rank
        self.notes = f"{folder}/{rank}-{os.getpid()}"

    def step(self, number: int, fault: str, image: np.ndarray) -> tuple[int, int]:
        if len(image) != SIZE or (image != image[0]).any():
            raise AssertionError(f"call {number} has the bytes of several objects")
        with open(self.notes, "a") as notes:
            notes.write(f"{number}\n")
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raises":
            raise ValueError(number)
        return self.rank, number

    def counts(self, number: int, image: np.ndarray) -> Iterator[tuple[int, int]]:
        value = image[0]
        yield self.step(number, "", image)
        for _ in range(3):
            if (image != value).any():
                raise AssertionError(f"stream {number} has lost its object")
            yield self.rank, number


def step_of(worker: Noting, item: tuple[int, str, Stored]) -> tuple[int, int]:
    number, fault, image = item
    return worker.step(number, fault, image.get())


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has died, and was reaped
        os.kill(pid, number)


@pytest.mark.soak(seconds=120 + STEPS)
@pytest.mark.parametrize("on_death", ["replace", "restart"])
def test_each_call_is_run_once_at_most(on_death: Any, tmp_path: Path) -> None:
    dice = random.Random(STEPS if on_death == "replace" else -STEPS)
    answered: dict[int, set[int]] = {rank: set() for rank in range(WORLD)}
    skipped: dict[int, set[int]] = {rank: set() for rank in range(WORLD)}
    unsent: set[int] = set()
    stopped: list[int] = []
    pending: list[Any] = []
    with WorkerGroup(
        Noting,
        WORLD,
        args=[str(tmp_path)],
        start_method="fork",
        on_death=on_death,
        max_in_flight=4,
        store=KEYS * SIZE // 3,
    ) as group:

        def image_of(key: int) -> Stored:
            image = np.full(SIZE, key, np.uint8)
            return group.store.find(key) or group.store.put(key, image, PATIENCE)

        def settle(call: Any, number: int) -> None:
            try:
                outcomes = call.outcomes(dice.choice([0, 0.001, PATIENCE, PATIENCE]))
            except CallTimedOut:
                pending.append((call, number))
                return
            for rank, outcome in zip(call.ranks, outcomes, strict=True):
                if isinstance(outcome, Cancelled):
                    skipped[rank].add(number)
                elif not isinstance(outcome, WorkerDied):
                    expected = outcome.args if isinstance(outcome, ValueError) else outcome[1:]
                    assert expected == (number,)
                    answered[rank].add(number)

        for number in range(STEPS):
            workers = dice.choice([group, group, group[dice.randrange(WORLD)], group[1:]])
            fault = dice.choices(["", "raises", "dies"], [90, 5, 5])[0]
            if dice.random() < 0.1:
                with suppress(WorkerDied):
                    image = image_of(dice.randrange(KEYS))
                    for at, items in enumerate(workers.stream(Noting.counts, number, image)):
                        assert items == [(rank, number) for rank in workers.ranks]
                        if at == dice.randrange(6):
                            break
                continue
            image = image_of(dice.randrange(KEYS))
            try:
                if dice.random() < 0.2:
                    call = workers.scatter(step_of, [(number, fault, image)] * len(workers))
                else:
                    call = workers.submit(Noting.step, number, fault, image)
            except WorkerDied:
                unsent.add(number)
                continue
            pending.append((call, number))
            if dice.random() < 0.04:
                stopped.append(group.pids[dice.randrange(WORLD)])
                send(stopped[0], signal.SIGSTOP)
            if dice.random() < 0.1:
                call.cancel(kill=dice.random() < 0.1)
            if dice.random() < 0.06:
                send(group.pids[dice.randrange(WORLD)], signal.SIGKILL)
            if dice.random() < 0.02:
                group.replace(dice.randrange(WORLD))
            while stopped:
                send(stopped.pop(), signal.SIGCONT)
            if dice.random() < 0.6:
                due, pending = pending, []
                for each in due:
                    settle(*each)
        while pending:
            settle(*pending.pop())
    ran: dict[int, list[int]] = {rank: [] for rank in range(WORLD)}
    for notes in tmp_path.iterdir():
        numbers = [int(line) for line in notes.read_text().split()]
        assert numbers == sorted({*numbers})
        ran[int(notes.name.partition("-")[0])] += numbers
    for rank in range(WORLD):
        assert len(ran[rank]) == len({*ran[rank]}), "a call was run twice"
        assert answered[rank] <= {*ran[rank]}
        assert not skipped[rank] & {*ran[rank]}
        assert not unsent & {*ran[rank]}
    until(lambda: not [pid for pid in group.pids if Path(f"/proc/{pid}").exists()], "all ended")
