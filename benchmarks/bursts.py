"""Bursts: 64 dicts of some 225 bytes to a reader that sleeps, by calls for each or by one call.

`python -m benchmarks.bursts`: half a minute. Ways alternate; medians of the rounds' medians.

calls: `enqueue` of each, `dequeue` of each
enqueue_many: one call of the writer, `dequeue` of each
both: one call of the writer, `dequeue_many` of the reader
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks.gathering import message
from benchmarks.machine import describe
from benchmarks.turns import aside, in_turns
from memlane import Handle, MessageQueue, WriterClosed

BURST = 64
PAUSE = 0.002  # seconds, in which the reader falls asleep
WAYS = {"calls": (False, False), "enqueue_many": (True, False), "both": (True, True)}


def reader(pipe: Any, handle: Handle, takes_many: bool) -> None:
    """Answers each burst once it has all of it."""
    with MessageQueue.create_from_handle(handle, 0) as queue:
        try:
            while True:
                taken = 0
                while taken < BURST:
                    if takes_many:
                        taken += len(queue.dequeue_many(BURST - taken))
                    else:
                        queue.dequeue()
                        taken += 1
                pipe.send(time.perf_counter())
        except WriterClosed:
            pass


def measure(way: str, bursts: int) -> tuple[float, float]:
    """Median seconds of the writer's calls, and until the reader has the burst."""
    sends_many, takes_many = WAYS[way]
    steps = [message(rank) for rank in range(BURST)]
    sent, got = [], []
    with (
        MessageQueue(1, max_chunk_bytes=4096, max_chunks=2 * BURST) as queue,
        aside(reader, queue.export_handle(0), takes_many) as peer,
    ):
        queue.wait_until_ready(60)
        for _ in range(bursts):
            time.sleep(PAUSE)
            begun = time.perf_counter()
            if sends_many:
                queue.enqueue_many(steps)
            else:
                for step in steps:
                    queue.enqueue(step)
            sent.append(time.perf_counter() - begun)
            got.append(peer.hear() - begun)
        queue.close()
    return statistics.median(sent), statistics.median(got)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bursts", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print(f"{arguments.rounds} rounds of {arguments.bursts} bursts of {BURST}; {describe()}")
    found = in_turns(arguments.rounds, WAYS, lambda way: measure(way, arguments.bursts))
    for way, rounds in found.items():
        row = [statistics.median(column) for column in zip(*rounds, strict=True)]
        beside = [
            statistics.median(a / b for a, b in zip(*pair, strict=True))
            for pair in zip(
                zip(*found["calls"], strict=True), zip(*rounds, strict=True), strict=True
            )
        ]
        print(
            f"{way:13} sent in {1e6 * row[0]:6.0f} us ({beside[0]:.2f} x), "
            f"received in {1e6 * row[1]:6.0f} us ({beside[1]:.2f} x)"
        )


if __name__ == "__main__":
    main()
