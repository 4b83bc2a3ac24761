"""Measures what awaiting costs: the latency of `adequeue`, and the processor time of many idle
queues.

`python -m benchmarks.awaiting`: two minutes. A process sends a dict of 225 bytes every millisecond
with the time in it; this one receives in an event loop. Ways alternate, each round with a process
of its own:

adequeue: `await queue.adequeue()`
pipe: a callback that is registered once on a pipe, for what `pickle.dumps` of the sender wrote
zmq.asyncio: `await socket.recv()` of a PULL on ipc://, unpickled
dequeue: the blocking call, for comparison
remote adequeue: the same of a reader on "another host", by the loopback and encrypted
tcp zmq.asyncio: by the loopback, not encrypted
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import resource
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import zmq
import zmq.asyncio

from benchmarks.machine import describe
from benchmarks.turns import SPAWN, aside, in_turns
from memlane import Handle, MessageQueue
from memlane.testing import local_queue

PACE = 1e-3
IDLE_SECONDS = 10.0
Latencies = list[float]


def message() -> dict[str, Any]:
    """A scheduler's step, some 225 bytes, with the time at which it was sent."""
    return {
        "at": time.perf_counter(),
        "requests": [f"request-{number:04}" for number in range(8)],
        "tokens": list(range(8)),
        "step": 12345,
    }


def paced(count: int, send: Callable[[dict[str, Any]], object]) -> None:
    """Sends so many, one every `PACE`, on time."""
    due = time.perf_counter() + 0.2
    for _ in range(count):
        time.sleep(max(0.0, due - time.perf_counter()))
        send(message())
        due += PACE


def memlane_sender(pipe: Connection, count: int, n_local: int = 1) -> None:
    with MessageQueue(1, n_local, connect_ip=None if n_local else "127.0.0.1") as queue:
        pipe.send(queue.export_handle())
        queue.wait_until_ready(30)
        paced(count, queue.enqueue)
        pipe.recv()


def pipe_sender(pipe: Connection, count: int) -> None:
    def send(step: dict[str, Any]) -> None:
        text = pickle.dumps(step, 5)
        os.write(pipe.fileno(), struct.pack("<I", len(text)) + text)

    paced(count, send)
    pipe.recv()


def zmq_sender(pipe: Connection, address: str, count: int) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(address)
        paced(count, lambda step: socket.send(pickle.dumps(step, 5)))
        pipe.recv()


def latency_of(step: dict[str, Any]) -> float:
    sent: float = step["at"]
    return time.perf_counter() - sent


def attached(handle: Handle) -> MessageQueue:
    queue = MessageQueue.create_from_handle(handle, 0)
    queue.wait_until_ready(30)
    return queue


def by_adequeue(pipe: Connection, count: int) -> Latencies:
    async def receive(queue: MessageQueue) -> Latencies:
        return [latency_of(await queue.adequeue()) for _ in range(count)]

    with attached(pipe.recv()) as queue:
        return asyncio.run(receive(queue))


def by_dequeue(pipe: Connection, count: int) -> Latencies:
    with attached(pipe.recv()) as queue:
        return [latency_of(queue.dequeue()) for _ in range(count)]


def by_pipe(pipe: Connection, count: int) -> Latencies:
    async def receive() -> Latencies:
        loop, latencies = asyncio.get_running_loop(), Latencies()
        done = loop.create_future()

        def readable() -> None:
            text = os.read(pipe.fileno(), 65536)
            while text:  # mostly one
                (size,) = struct.unpack_from("<I", text)
                latencies.append(latency_of(pickle.loads(text[4 : 4 + size])))
                text = text[4 + size :]
            if len(latencies) == count:
                done.set_result(None)

        loop.add_reader(pipe.fileno(), readable)
        await done
        loop.remove_reader(pipe.fileno())
        return latencies

    return asyncio.run(receive())


def by_zmq(socket: zmq.asyncio.Socket, count: int) -> Latencies:
    async def receive() -> Latencies:
        return [latency_of(pickle.loads(await socket.recv())) for _ in range(count)]

    return asyncio.run(receive())


def run(way: str, count: int) -> Latencies:
    """One round of that way, with a sender of its own; the first tenth is warm-up."""
    source: Any = None
    with ExitStack() as stack:
        if way.endswith("zmq.asyncio"):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            zmq_context = stack.enter_context(zmq.asyncio.Context())
            source = socket = stack.enter_context(zmq_context.socket(zmq.PULL))
            socket.bind("tcp://127.0.0.1:*" if "tcp" in way else f"ipc://{folder}/socket")
            address = str(socket.get(zmq.LAST_ENDPOINT), "utf-8")  # type: ignore[arg-type]
            call: tuple[Any, ...] = (zmq_sender, by_zmq, address, count)
        else:
            role, receive, *more = MEMLANE_AND_PIPE[way]
            call = (role, receive, count, *more)
        role, receive, *args = call
        sender = stack.enter_context(aside(role, *args, context=SPAWN))
        latencies: Latencies = receive(source or sender.pipe, count)
        sender.pipe.send(None)
    return latencies[count // 10 :]


MEMLANE_AND_PIPE: dict[str, Any] = {
    "adequeue": (memlane_sender, by_adequeue, 1),
    "pipe": (pipe_sender, by_pipe),
    "dequeue": (memlane_sender, by_dequeue, 1),
    "remote adequeue": (memlane_sender, by_adequeue, 0),
}
WAYS = ("adequeue", "pipe", "zmq.asyncio", "dequeue", "remote adequeue", "tcp zmq.asyncio")


def show_latencies(rounds: int, count: int) -> None:
    medians = in_turns(rounds, WAYS, lambda way: statistics.median(run(way, count)))
    reference = statistics.median(medians["pipe"])
    print(f"p50 of {count} messages, one every {PACE * 1e3:g} ms, median of {rounds} rounds")
    for way in WAYS:
        middle = statistics.median(medians[way])
        every = " ".join(f"{1e6 * each:.0f}" for each in medians[way])
        print(f"  {way:15} {1e6 * middle:6.1f} us  {middle / reference:5.2f} of pipe   ({every})")


def show_idle(count: int) -> None:
    """So many queues in one process, whose readers are all awaited."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)

    async def wait(readers: list[MessageQueue]) -> tuple[float, int]:
        tasks = [asyncio.create_task(reader.adequeue()) for reader in readers]
        await asyncio.sleep(2.0)
        began, threads = time.process_time(), len(os.listdir("/proc/self/task"))
        await asyncio.sleep(IDLE_SECONDS)
        used = time.process_time() - began
        for task in tasks:
            task.cancel()
        return used / IDLE_SECONDS, threads

    with ExitStack() as stack:
        before = len(os.listdir("/proc/self/task")) - threading.active_count()
        readers = [
            stack.enter_context(local_queue(1, max_chunk_bytes=4096, max_chunks=2))[1][0]
            for _ in range(count)
        ]
        share, threads = asyncio.run(wait(readers))
    own = threads - before - 1
    print(f"{count} queues awaited, idle: {100 * share:.2f} % of a core, {own} threads")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.awaiting", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=3000)
    parser.add_argument("--queues", type=int, default=1000)
    options = parser.parse_args()
    print(describe())
    show_latencies(options.rounds, options.messages)
    show_idle(options.queues)


if __name__ == "__main__":
    main()
