"""Many writers, one reader: messages a second of 8 processes that send dicts back to back.

`python -m benchmarks.gathering`: a minute. Every way has the same processes; ways alternate. The
clock runs from the first message that the reader has to the last.

memlane: `Gather`
mp.Queue: `multiprocessing.Queue`
zmq: PUSH sockets on ipc://, one PULL socket, pickle
faster-fifo: one queue, in batches (`put_many`, `get_many`), its own way to be fast, and one by one
"""

from __future__ import annotations

import argparse
import importlib
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import zmq

from benchmarks import needs
from benchmarks.machine import describe
from benchmarks.turns import aside, in_turns
from memlane import Gather, GatherHandle
from memlane.cli.bench.processes import FORK

Receive = Callable[[], int]
"""Takes messages; returns how many."""
Start = Callable[..., None]
"""Starts a process with a role and its arguments."""
Peer = Callable[[Start, int, int, Any], AbstractContextManager[Receive]]
BATCH = 32


def message(rank: int) -> dict[str, Any]:
    """A worker's answer, some 225 bytes."""
    return {
        "rank": rank,
        "step": 0,
        "requests": [f"request-{each:04}" for each in range(8)],
        "tokens": list(range(8)),
    }


def send_all(rank: int, count: int, gate: Any, send: Callable[[dict[str, Any]], object]) -> None:
    step = message(rank)
    gate.wait()
    for number in range(count):
        step["step"] = number
        send(step)


def memlane_writer(_: Any, handle: GatherHandle, count: int, gate: Any) -> None:
    with Gather.create_from_handle(handle, handle.rank) as writer:
        send_all(handle.rank, count, gate, writer.enqueue)


@contextmanager
def memlane(start: Start, writers: int, count: int, gate: Any) -> Iterator[Receive]:
    with Gather(writers) as reader:
        for rank in range(writers):
            start(memlane_writer, reader.export_handle(rank), count, gate)
        reader.wait_until_ready(60)

        def receive() -> int:
            reader.dequeue()
            return 1

        yield receive


def queue_writer(_: Any, queue: Any, rank: int, count: int, gate: Any) -> None:
    send_all(rank, count, gate, queue.put)


@contextmanager
def mp_queue(start: Start, writers: int, count: int, gate: Any) -> Iterator[Receive]:
    queue = FORK.Queue()
    for rank in range(writers):
        start(queue_writer, queue, rank, count, gate)

    def receive() -> int:
        queue.get()
        return 1

    yield receive


def zmq_writer(_: Any, address: str, rank: int, count: int, gate: Any) -> None:
    socket = zmq.Context().socket(zmq.PUSH)
    socket.connect(address)
    send_all(rank, count, gate, lambda step: socket.send(pickle.dumps(step, 5)))
    socket.close()
    socket.context.term()


@contextmanager
def zmq_push(start: Start, writers: int, count: int, gate: Any) -> Iterator[Receive]:
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as zeromq:
        address = f"ipc://{folder}/pull"
        with zeromq.socket(zmq.PULL) as socket:
            socket.bind(address)
            for rank in range(writers):
                start(zmq_writer, address, rank, count, gate)

            def receive() -> int:
                pickle.loads(socket.recv())
                return 1

            yield receive


def fifo_writer(_: Any, queue: Any, rank: int, count: int, gate: Any, batch: int) -> None:
    if batch == 1:
        send_all(rank, count, gate, lambda step: queue.put(step, timeout=60))
        return
    step = message(rank)
    gate.wait()
    for first in range(0, count, batch):
        steps = [{**step, "step": n} for n in range(first, min(count, first + batch))]
        queue.put_many(steps, timeout=60)


def faster_fifo(batch: int) -> Peer:
    @contextmanager
    def peer(start: Start, writers: int, count: int, gate: Any) -> Iterator[Receive]:
        queue = importlib.import_module("faster_fifo").Queue(max_size_bytes=16 << 20)
        for rank in range(writers):
            start(fifo_writer, queue, rank, count, gate, batch)

        def receive() -> int:
            if batch == 1:
                queue.get(timeout=60)
                return 1
            return len(queue.get_many(timeout=60))

        yield receive

    return peer


PEERS: dict[str, Peer] = {
    "memlane": memlane,
    "mp.Queue": mp_queue,
    "zmq PUSH/PULL": zmq_push,
    "faster-fifo": faster_fifo(1),
    "faster-fifo, batches": faster_fifo(BATCH),
}


def rate(name: str, writers: int, count: int) -> float:
    """Messages a second."""
    gate = FORK.Barrier(writers + 1)
    with ExitStack() as stack:

        def start(role: Callable[..., None], *arguments: Any) -> None:
            stack.enter_context(aside(role, *arguments))

        receive: Receive = stack.enter_context(PEERS[name](start, writers, count, gate))
        gate.wait()
        got = receive()
        begun, first = time.perf_counter(), got
        while got < writers * count:
            got += receive()
        seconds: float = time.perf_counter() - begun
    return (got - first) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--messages", type=int, default=20_000, help="of each writer")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    needs.package("faster_fifo", "the comparison with faster-fifo")
    print(f"{arguments.writers} writers, {arguments.messages} messages each; {describe()}")
    found = in_turns(
        arguments.rounds, PEERS, lambda name: rate(name, arguments.writers, arguments.messages)
    )
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    for name, median in medians.items():
        low, high = min(found[name]), max(found[name])
        print(f"{name:21} {median:10,.0f} messages/s ({low:,.0f} to {high:,.0f})")
    best = max(median for name, median in medians.items() if name != "memlane")
    print(f"memlane {medians['memlane'] / best:.2f} x the best other")


if __name__ == "__main__":
    main()
