"""One slice of one channel: a reader in its own process, and how long its messages took."""

from __future__ import annotations

import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.remote.channels import DICT_KINDS, KINDS, Channel
from benchmarks.turns import aside

STEP = {
    "step": 4711,
    "sequences": [11, 12, 13, 14, 15, 16, 17, 18],
    "tokens": [101, 2023, 2003, 1037, 3231, 102],
    "temperature": 0.7,
    "finished": ["request-17", "request-23"],
    "note": "x" * 80,
}


def _read(pipe: Connection, kind: type[Channel], encrypted: bool, token: Any, count: int) -> None:
    channel = kind(encrypted=encrypted)
    channel.open_reader(token)
    pipe.send("open")
    stamps, cpu = [], time.process_time()
    for _ in range(count):
        obj = channel.receive()
        stamps.append(time.monotonic_ns())
        del obj
    pipe.send((stamps, time.process_time() - cpu))
    pipe.recv()
    channel.close()


def _run(
    kinds: dict[str, Any], name: str, obj: object, count: int, pause: float
) -> tuple[list[int], float]:
    """Times of sending and arrival in ns, alternating, message after message; and the seconds of
    CPU that both processes needed for them."""
    kind, encrypted = kinds[name]
    channel = kind(encrypted=encrypted)
    with aside(_read, kind, encrypted, channel.open_writer(), count) as reader:
        reader.hear()
        time.sleep(0.2)
        sent, cpu = [], time.process_time()
        for _ in range(count):
            sent.append(time.monotonic_ns())
            channel.send(obj)
            if pause:
                time.sleep(pause)
        arrived, there_too = reader.hear()
        cpu = time.process_time() - cpu + there_too
        reader.pipe.send("end")
    channel.close()
    return [stamp for pair in zip(sent, arrived, strict=True) for stamp in pair], cpu


def latency(name: str, count: int) -> float:
    """Median one-way time of a small dict without other traffic, in us."""
    stamps, _ = _run(DICT_KINDS, name, STEP, count, 0.002)
    return statistics.median(
        (there - here) / 1000 for here, there in zip(stamps[::2], stamps[1::2], strict=True)
    )


def rate(name: str, nbytes: int, count: int) -> float:
    """Messages of `nbytes` bytes per second, without the first tenth."""
    stamps, _ = _run(KINDS, name, os.urandom(nbytes), count, 0.0)
    arrived = stamps[1::2]
    first = max(1, count // 10) - 1
    return (count - 1 - first) / ((arrived[-1] - arrived[first]) / 1e9)


def cpu_of(name: str, nbytes: int, count: int) -> float:
    """CPU time of both processes for a message back to back, in us, libzmq's threads included."""
    _, seconds = _run(KINDS, name, os.urandom(nbytes), count, 0.0)
    return 1e6 * seconds / count
