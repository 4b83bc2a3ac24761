"""Eight readers on one host, behind a relay and with a connection each, in one run.

`python -m benchmarks.remote.relayed` prints how many messages per second the last reader receives,
with a window of 64 messages. All processes share this machine, so eight connections cost it eight
encryptions and decryptions per message; a relay costs it one of each, and a hop through a ring.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection

from benchmarks.machine import describe
from benchmarks.turns import aside, in_turns
from memlane import Handle, MessageQueue

READERS = 8
WINDOW = 64
SIZES = {"256 B": (256, 4000), "20000 B": (20_000, 1500), "1 MiB": (1 << 20, 100)}
PATIENCE = 60.0


def _read(pipe: Connection, handle: Handle, rank: int, count: int) -> None:
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
    with ExitStack() as stack:
        writer = MessageQueue(
            READERS, 0, connect_ip="127.0.0.1", relay=relayed, remote_window=WINDOW
        )
        stack.enter_context(writer)
        readers = []
        for rank in range(READERS):
            role = aside(_read, writer.export_handle(rank), rank, count)
            readers.append(stack.enter_context(role))
            readers[-1].hear()
        writer.wait_until_ready(timeout=PATIENCE)
        begun = time.monotonic()
        for _ in range(count):
            writer.enqueue(payload, timeout=PATIENCE)
        ended: float = max(reader.hear() for reader in readers)
        for reader in readers:
            reader.pipe.send(None)
    return count / (ended - begun)


def main() -> None:
    words = argparse.ArgumentParser(prog="python -m benchmarks.remote.relayed", description=__doc__)
    words.add_argument("--rounds", type=int, default=5, help="turns of both")
    rounds = words.parse_args().rounds
    print(describe())
    print("\n| messages of | one connection each, messages/s | relay, messages/s | ratio |")
    print("|---|---|---|---|")
    for name, (nbytes, count) in SIZES.items():

        def measure(relayed: bool, nbytes: int = nbytes, count: int = count) -> float:
            return rate(nbytes, count, relayed=relayed)

        found = in_turns(rounds, (False, True), measure)
        alone, behind = (statistics.median(rates) for rates in found.values())
        pairs = zip(found[True], found[False], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        print(f"| {name} | {alone:,.0f} | {behind:,.0f} | {ratio:.2f} |", flush=True)
    print(f"\nload after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
