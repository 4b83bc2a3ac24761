"""Measures what many hosts cost the writer: `python -m benchmarks.remote.scale`.

Measures a few constants on the loopback. From these it computes what more hosts would cost, and
simulates 64 readers. Only the constants are measured, nothing else in the tables.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.machine import describe
from benchmarks.turns import all_aside
from memlane import Handle, MessageQueue

READERS_PER_HOST = 8
HOSTS = (1, 8, 64, 1024)
SMALL, LARGE = 256, 1 << 20
NETWORK_BYTES_PER_US = 3125.0  # 25 Gbit/s
NETWORK_US = 20.0  # one way between two hosts of a rack
FAN_OUT = 32
REPORT_SECONDS = 0.02
RING_CHUNKS = 10
ROUNDS = 5
SIMULATED_HOSTS = 8


@dataclass(frozen=True)
class Constants:
    """In microseconds, each on one core."""

    call: float  # enqueue without readers
    call_per_connection: float
    call_per_byte: float
    io: float  # libzmq's thread, per message and connection
    io_per_byte: float
    relay: float  # one-way delay that a relay adds


def _read(ready: Connection, handle: Handle, rank: int) -> None:
    with MessageQueue.create_from_handle(handle, rank) as reader:
        ready.send(None)
        for _ in reader:
            pass


def writer_cost(connections: int, nbytes: int, messages: int) -> tuple[float, float]:
    """Per message: microseconds of the calling thread, and of all other threads."""
    with ExitStack() as stack:
        writer = MessageQueue(connections, 0, connect_ip="127.0.0.1")
        roles = [(_read, writer.export_handle(rank), rank) for rank in range(connections)]
        readers = stack.enter_context(all_aside(roles))
        stack.callback(writer.close)
        for reader in readers:
            reader.hear()
        writer.wait_until_ready(timeout=60)
        payload = bytes(nbytes)
        call, process = time.thread_time(), time.process_time()
        for _ in range(messages):
            writer.enqueue(payload)
        while any(row.behind > messages // 2 for row in writer.statistics().readers):
            time.sleep(0.001)
        call, process = time.thread_time() - call, time.process_time() - process
    return call / messages * 1e6, (process - call) / messages * 1e6


def relay_delay(messages: int) -> float:
    """Returns how many us later a message arrives through a relay; medians, in one process."""

    def one_way(*, relayed: bool) -> float:
        with ExitStack() as stack:
            writer = stack.enter_context(
                MessageQueue(2, 0, max_chunk_bytes=1 << 16, connect_ip="127.0.0.1", relay=relayed)
            )
            writer.release_reader(1)
            reader = MessageQueue.create_from_handle(writer.export_handle(0), 0)
            stack.callback(reader.close)
            reader.wait_until_ready(timeout=60)
            times: list[float] = []
            for _ in range(messages):
                writer.enqueue(time.perf_counter())
                times.append(time.perf_counter() - reader.dequeue(timeout=60))
        return statistics.median(times) * 1e6

    return one_way(relayed=True) - one_way(relayed=False)


def measure() -> Constants:
    """From one and eight connections, small and large messages; each the minimum of all rounds."""

    def least(connections: int, nbytes: int, messages: int) -> tuple[float, float]:
        costs = [writer_cost(connections, nbytes, messages) for _ in range(ROUNDS)]
        return min(call for call, _ in costs), min(io for _, io in costs)

    call_1, io_1 = least(1, SMALL, 800)
    call_8, io_8 = least(8, SMALL, 800)
    call_large, io_large = least(1, LARGE, 50)
    per_connection = max(0.0, (call_8 - call_1) / 7)
    return Constants(
        call=max(0.0, call_1 - per_connection),
        call_per_connection=per_connection,
        call_per_byte=max(0.0, (call_large - call_1) / (LARGE - SMALL)),
        io=max(0.0, (io_8 - io_1) / 7),
        io_per_byte=max(0.0, (io_large - io_1) / (LARGE - SMALL)),
        relay=relay_delay(1000),
    )


@dataclass(frozen=True)
class Shape:
    """The number of connections of the writer and the relays, and the longest way to a reader."""

    name: str
    connections: int  # of the writer
    relays: int  # between the writer and the last reader
    most_connections: int  # of any relay


def shapes(hosts: int) -> list[Shape]:
    tree, levels = hosts, 1
    while tree > FAN_OUT:
        tree, levels = -(-tree // FAN_OUT), levels + 1
    return [
        Shape("star", hosts * READERS_PER_HOST, 0, 0),
        Shape("one relay a host", hosts, 1, 0),
        Shape(f"tree of relays, {FAN_OUT} each", tree, levels, FAN_OUT if levels > 1 else 0),
    ]


def table(c: Constants, nbytes: int) -> list[str]:
    """The cost of a message of that size, by hosts and shape."""
    lines = [
        "| hosts x 8 | shape | connections | calling thread, us | I/O thread, us | most messages/s "
        "| on the wire | last reader after, us |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for hosts in HOSTS:
        for shape in shapes(hosts):
            n = shape.connections
            call = c.call + n * c.call_per_connection + nbytes * c.call_per_byte
            io = n * (c.io + nbytes * c.io_per_byte)
            wire = n * nbytes / NETWORK_BYTES_PER_US
            relay_io = shape.most_connections * (c.io + nbytes * c.io_per_byte)
            hop = c.relay + relay_io + NETWORK_US
            last = call + max(io, wire) + NETWORK_US + (shape.relays and c.relay)
            last += max(0, shape.relays - 1) * hop
            most = 1e6 / max(call, io, wire, relay_io)
            lines.append(
                f"| {hosts} | {shape.name} | {n} | {call:.0f} | {io:.0f} | {most:,.0f} "
                f"| {n * nbytes / 1e3:,.1f} kB | {last:,.0f} |"
            )
    return lines


def windows() -> list[str]:
    """Returns how many bytes must be in flight to keep a connection busy."""
    lines = ["| round trip | 10 Gbit/s | 25 Gbit/s | 100 Gbit/s |", "|---|---|---|---|"]
    for name, seconds in (("50 us", 50e-6), ("1 ms", 1e-3), ("10 ms", 10e-3), ("80 ms", 0.08)):
        cells = []
        for gbit in (10, 25, 100):
            rate = gbit * 1e9 / 8 / 2**20
            direct, relayed = rate * seconds * 4 / 3, rate * (seconds + REPORT_SECONDS)
            cells.append(f"{direct:,.1f} / {relayed:,.0f} MiB")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def simulate(c: Constants, relayed: bool, window: int, messages: int = 20_000) -> dict[str, float]:
    """64 readers that work 50 us on each 256-byte message, and rarely pause for 20 ms.

    Computes for each message when the writer may send it, when each connection has carried it,
    when each relay's ring has room for it, and when each reader has taken it. Acknowledgements
    are sent back at once.
    """
    random.seed(1)
    readers = SIMULATED_HOSTS * READERS_PER_HOST
    connections = SIMULATED_HOSTS if relayed else readers
    call = c.call + connections * c.call_per_connection
    io = c.io + SMALL * c.io_per_byte
    taken: list[list[float]] = [[0.0] * readers]
    free = io_free = 0.0
    late, waited = [], 0.0
    for number in range(messages):
        room = max(taken[number + 1 - window]) + NETWORK_US if number >= window else 0.0
        waited += max(0.0, room - free)
        sent = max(free, room) + call
        free = sent
        row: list[float] = []
        arrived = 0.0
        for reader in range(readers):
            if not relayed or reader % READERS_PER_HOST == 0:
                io_free = max(io_free, sent) + io
                arrived = io_free + NETWORK_US
                if relayed and number >= RING_CHUNKS:
                    host = slice(reader, reader + READERS_PER_HOST)
                    arrived = max(arrived, *taken[number + 1 - RING_CHUNKS][host])
                arrived += c.relay if relayed else 0.0
            work = 50.0 + (20_000.0 if random.random() < 1e-4 else 0.0)
            row.append(max(arrived, taken[-1][reader]) + work)
        taken.append(row)
        late.append(max(row) - sent)
    return {
        "messages/s": messages / (max(taken[-1]) / 1e6),
        "writer waited, %": 100 * waited / max(taken[-1]),
        "last reader, median us": statistics.median(late),
        "last reader, p99 us": sorted(late)[int(0.99 * messages)],
    }


def main() -> None:
    words = argparse.ArgumentParser(prog="python -m benchmarks.remote.scale", description=__doc__)
    words.parse_args()
    print(describe())
    c = measure()
    print(
        f"\nconstants: a call {c.call:.1f} us, {c.call_per_connection:.2f} us per connection and "
        f"{1e3 * c.call_per_byte:.2f} ns per byte; "
        f"I/O thread {c.io:.1f} us per message and connection and {1e3 * c.io_per_byte:.2f} ns per "
        f"byte; a relay adds {c.relay:.0f} us\n"
    )
    for nbytes in (SMALL, LARGE):
        print(f"messages of {nbytes} bytes:\n")
        print("\n".join(table(c, nbytes)), "\n")
    print("window for a bandwidth and a round trip, direct / behind a relay:\n")
    print("\n".join(windows()), "\n")
    rows: list[tuple[str, dict[str, Any]]] = [
        (f"{'relays' if relayed else 'star'}, window {window}", simulate(c, relayed, window))
        for relayed in (False, True)
        for window in (4, 64, 1024)
    ]
    print(f"| 64 readers, simulated | {' | '.join(rows[0][1])} |\n|---|---|---|---|---|")
    for name, values in rows:
        print(f"| {name} | {' | '.join(f'{value:,.0f}' for value in values.values())} |")
    print("\nload after:", describe().rpartition("load ")[2])


if __name__ == "__main__":
    main()
