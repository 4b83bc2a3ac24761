"""Eight readers on one host, behind a relay and with a connection each, in one run.

`python -m benchmarks.remote.relayed` prints how many messages per second the last reader receives,
with a window of 64 messages. All processes share this machine, so eight connections cost it eight
encryptions and decryptions per message; a relay costs it one of each, and a hop through a ring.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

from benchmarks.machine import describe
from memlane import Handle, MessageQueue

FORK = multiprocessing.get_context("fork")
READERS = 8
WINDOW = 64
SIZES = {"256 B": (256, 4000), "20000 B": (20_000, 1500), "1 MiB": (1 << 20, 100)}
PATIENCE = 60.0


def _read(handle: Handle, rank: int, pipe: Connection, count: int) -> None:
    with MessageQueue.create_from_handle(handle, rank) as reader:
        pipe.send(rank)
        reader.wait_until_ready(timeout=PATIENCE)
        for _ in range(count):
            reader.dequeue(timeout=PATIENCE)
        pipe.send(time.monotonic())
        pipe.recv()


def rate(nbytes: int, count: int, *, relayed: bool) -> float:
    """Messages per second, until every reader has the last one."""
    payload = os.urandom(nbytes)
    with MessageQueue(
        READERS, 0, connect_ip="127.0.0.1", relay=relayed, remote_window=WINDOW
    ) as writer:
        pipes, readers = [], []
        for rank in range(READERS):
            here, there = FORK.Pipe()
            pipes.append(here)
            handle = writer.export_handle(rank)
            readers.append(FORK.Process(target=_read, args=(handle, rank, there, count)))
            readers[-1].start()
            here.recv()
        writer.wait_until_ready(timeout=PATIENCE)
        begun = time.monotonic()
        for _ in range(count):
            writer.enqueue(payload, timeout=PATIENCE)
        ended: float = max(pipe.recv() for pipe in pipes)
        for pipe in pipes:
            pipe.send(None)
        for reader in readers:
            reader.join()
    return count / (ended - begun)


def main() -> None:
    words = argparse.ArgumentParser(prog="python -m benchmarks.remote.relayed", description=__doc__)
    words.add_argument("--rounds", type=int, default=5, help="turns of both")
    rounds = words.parse_args().rounds
    print(describe())
    print("\n| messages of | one connection each, messages/s | relay, messages/s | ratio |")
    print("|---|---|---|---|")
    for name, (nbytes, count) in SIZES.items():
        pairs = [
            [rate(nbytes, count, relayed=relayed) for relayed in (False, True)]
            for _ in range(rounds)
        ]
        alone, behind = (statistics.median(found) for found in zip(*pairs, strict=True))
        ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
        print(f"| {name} | {alone:,.0f} | {behind:,.0f} | {ratio:.2f} |", flush=True)
    print(f"\nload after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
