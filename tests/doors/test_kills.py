"""Both sides die at any moment, again and again; and servers race for a name."""

import os
import random
import time
from pathlib import Path

import pytest

from memlane import MessageQueue, NameTaken, ReaderDied, WriterClosed, WriterDied
from tests.support import PATIENCE, Link, start

STARTS = int(os.environ.get("MEMLANE_SOAK_NAMES", "200"))
RACES = int(os.environ.get("MEMLANE_SOAK_NAME_RACES", "100"))


def serves(link: Link, name: str) -> None:
    """Role: serves until it is killed, and replaces its readers as the manual shows."""
    with MessageQueue(2, max_chunks=4, name=name, serve=True) as queue:
        link.tell(queue.handle.queue_id)
        number = 0
        while True:
            try:
                queue.enqueue((queue.handle.queue_id, number), timeout=0.05)
                number += 1
            except ReaderDied as died:
                queue.release_reader(died.rank or 0)
            except TimeoutError:
                pass


def reads_on(link: Link, name: str) -> None:
    """Role: reads from whoever serves the name, as the manual shows; tells the first of each."""
    while True:
        try:
            with MessageQueue.open(name, timeout=PATIENCE) as queue:
                owner, last = queue.dequeue(PATIENCE)
                if owner != queue.handle.queue_id:
                    raise AssertionError("a message of another queue's")
                link.tell(owner)
                for owner, number in queue:
                    if (owner, number) != (queue.handle.queue_id, last + 1):
                        raise AssertionError(f"{number} after {last}")
                    last = number
        except (WriterDied, WriterClosed):
            pass


@pytest.mark.soak(seconds=3600)
def test_both_sides_are_killed_and_come_again(run: Path) -> None:
    """A reader always finds the queue that is served now, and nothing of another's is read."""
    chance = random.Random(STARTS)
    server, readers = start(serves, "steps"), [start(reads_on, "steps") for _ in range(2)]
    served = server.hear()
    for _ in range(STARTS):
        at = chance.randrange(3)
        if chance.random() < 0.5:
            time.sleep(chance.random() * 0.02)  # the moment of a kill is any
        if at == 2:
            server.kill()
            server = start(serves, "steps")
            served = server.hear()
        else:
            readers[at].kill()
            readers[at] = start(reads_on, "steps")
    for reader in readers:
        while reader.hear() != served:
            pass
    server.kill()
    for reader in readers:
        reader.kill()
    with MessageQueue(1, name="steps", serve=True):
        assert [path.name for path in run.iterdir()] == ["steps.sock"]


def races(link: Link, name: str) -> list[bool]:
    """Role: serves at each cue, and closes at the next; returns which of the races it has won."""
    won = []
    for _ in range(RACES):
        link.tell()
        link.hear()
        try:
            queue = MessageQueue(1, name=name, serve=True, max_chunk_bytes=64, max_chunks=1)
        except NameTaken:
            won.append(False)
        else:
            won.append(True)
            link.tell()
            link.hear()
            queue.close()
            continue
        link.tell()
        link.hear()
    return won


@pytest.mark.soak(seconds=3600)
def test_of_two_servers_one_wins() -> None:
    racers = [start(races, "steps") for _ in range(2)]
    for _ in range(RACES):
        for word in range(2):
            for racer in racers:
                racer.hear()
            if word == 1:
                MessageQueue.open("steps", timeout=PATIENCE).close()
            for racer in racers:
                racer.tell()
    first, second = (racer.result() for racer in racers)
    assert all(one != other for one, other in zip(first, second, strict=True))
    assert {*first, *second} == {True, False}
