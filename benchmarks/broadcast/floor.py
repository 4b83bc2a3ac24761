"""Lower bounds for any library on this machine, measured between the peers' turns."""

from __future__ import annotations

import pickle
import statistics
import subprocess
import time
from pathlib import Path

from benchmarks import needs

SOURCE = Path(__file__).with_name("floor.cpp")
TIMEOUT = 90.0
COPY_SECONDS = 0.05
PICKLE_ROUNDS = 2_000
RESTED_ROUNDS = 30
REST = 0.001


class Floor:
    """The compiled program; every method is one short measurement."""

    def __init__(self, folder: Path) -> None:
        self._program = folder / "floor"
        command = [needs.compiler(), "-std=c++20", "-O2", "-o", str(self._program), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)

    def _run(self, *args: object) -> list[float]:
        done = subprocess.run(
            [self._program, *map(str, args)],
            check=True,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        return [float(line) for line in done.stdout.split()]

    def futex_us(self, readers: int, messages: int) -> float:
        """p50 from a paced writer to readers that sleep on one futex, over all readers."""
        return statistics.median(self._run("futex", readers, messages)) / 1e3

    def futex_ns(self, readers: int, messages: int) -> list[float]:
        """The same times, one by one: those of the first reader, then those of the next."""
        return self._run("futex", readers, messages)

    def copy_gb_s(self, count: int) -> float:
        """memcpy on one thread."""
        return self._run("copy", count, COPY_SECONDS)[0]


def pickle_us(obj: object) -> tuple[float, float]:
    """Encode and decode time of `obj` with pickle protocol 5 and warm caches."""
    data = pickle.dumps(obj, protocol=5)
    start = time.perf_counter()
    for _ in range(PICKLE_ROUNDS):
        pickle.dumps(obj, protocol=5)
    middle = time.perf_counter()
    for _ in range(PICKLE_ROUNDS):
        pickle.loads(data)
    end = time.perf_counter()
    scale = 1e6 / PICKLE_ROUNDS
    return (middle - start) * scale, (end - middle) * scale


def rested_pickle_us(obj: object) -> tuple[float, float]:
    """The same as p50 of single calls, each after a pause, as in paced processes."""
    data = pickle.dumps(obj, protocol=5)
    encode, decode = [], []
    for _ in range(RESTED_ROUNDS):
        time.sleep(REST)
        start = time.perf_counter()
        pickle.dumps(obj, protocol=5)
        encode.append(time.perf_counter() - start)
        time.sleep(REST)
        start = time.perf_counter()
        pickle.loads(data)
        decode.append(time.perf_counter() - start)
    return statistics.median(encode) * 1e6, statistics.median(decode) * 1e6
