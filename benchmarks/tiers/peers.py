"""The peers that store rows of a buffer on a disk: memlane's tier, and others at their best
setting.

Each has `store(ids)` and `load(ids)`, which return when all of these rows have been moved.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
HERE = Path(__file__).parent
BATCH = 128  # blocks a call, as a request of some ten thousand tokens has


class Peer(Protocol):
    """Rows of one buffer, on a disk."""

    def passes(self) -> tuple[float, float]:
        """One pass over all rows: MB/s of storing, and of loading them."""
        ...

    def close(self) -> None:
        """Ends what was started."""


class Timed:
    """A pass in batches, over rows whose content is compared afterwards."""

    def __init__(self, rows: npt.NDArray[np.uint8]) -> None:
        self.rows = rows
        self._wanted = rows.copy()
        self._batches = [
            np.arange(first, min(first + BATCH, len(rows)), dtype=np.int32)
            for first in range(0, len(rows), BATCH)
        ]

    def timed(
        self, store: Callable[[list[Ids]], None], load: Callable[[list[Ids]], None]
    ) -> tuple[float, float]:
        """MB/s of both."""
        began = time.perf_counter()
        store(self._batches)
        stored = time.perf_counter()
        self.rows[:] = 0
        again = time.perf_counter()
        load(self._batches)
        loaded = time.perf_counter()
        if not np.array_equal(self.rows, self._wanted):
            raise ValueError("other bytes came back")
        size = self.rows.nbytes / 1e6
        return size / (stored - began), size / (loaded - again)


class Memlane(Timed):
    """`memlane.tiers.DiskTier`."""

    def __init__(self, folder: Path, rows: npt.NDArray[np.uint8], direct: bool) -> None:
        super().__init__(rows)
        from memlane.tiers import DiskTier

        capacity = 5 * 4096 + len(rows) * (rows.shape[1] + 64 + 8)
        self._tier = DiskTier(folder, rows, capacity, policy="lru", direct=direct, timeout=600)
        self._number = 0

    def passes(self) -> tuple[float, float]:
        """Under new keys each time: the pass before is evicted."""
        self._number += 1
        return self.timed(self._store, self._load)

    def _keys(self, ids: Ids) -> list[bytes]:
        return [self._number.to_bytes(16, "big") + int(at).to_bytes(16, "big") for at in ids]

    def _store(self, batches: list[Ids]) -> None:
        for ids in batches:
            self._tier.store(self._keys(ids), ids)
        self._wait()

    def _load(self, batches: list[Ids]) -> None:
        for ids in batches:
            self._tier.load(self._keys(ids), ids)
        self._wait()

    def _wait(self) -> None:
        self._tier.drain()
        for done in self._tier.poll():
            if not done.ok.all():
                raise ValueError(done.error)

    def close(self) -> None:
        """Closes the tier."""
        self._tier.close()


class VllmFs(Timed):
    """vLLM's own file tier: its C extension on its pool of 16 and 16 threads, a file a block."""

    def __init__(self, folder: Path, rows: npt.NDArray[np.uint8], direct: bool) -> None:
        super().__init__(rows)
        from vllm.v1.kv_offload.tiering.fs import io, thread_pool

        if not io._HAS_FSIO_C:
            raise ImportError("vLLM was built without fs_io_C")
        self._io, self._direct, self._folder = io, direct, folder
        self._view = memoryview(rows)  # type: ignore[arg-type]  # numpy's stubs know no buffers
        self._pool = thread_pool.DualQueueThreadPool(16, 16, thread_name_prefix="fs")
        self._number, self._job = 0, 0

    def passes(self) -> tuple[float, float]:
        """Into the same number of files each time: those of the pass before are removed."""
        for file in self._folder.rglob("*.bin"):
            file.unlink()
        self._number += 1
        return self.timed(self._store, self._load)

    def _paths(self, ids: Ids) -> list[str]:
        digests = [f"{self._number:08x}{int(at) * 0x9E3779B97F4A7C15 % 2**64:016x}" for at in ids]
        return [str(self._folder / d[8:11] / d[11:13] / f"{d}.bin") for d in digests]

    def _submit(self, batches: list[Ids], enqueue: Any, move: Any) -> None:
        size = self.rows.shape[1]
        for ids in batches:
            offsets = [int(at) * size for at in ids]
            paths = self._paths(ids)
            self._job += 1

            def task(paths: list[str] = paths, offsets: list[int] = offsets) -> None:
                move(paths, self._view, offsets, size, self._direct)

            enqueue(self._job, 1, [task])
        self._pool.wait_idle()
        for _, is_good, *_ in self._pool.get_finished():
            if not is_good:
                raise ValueError("a job of vLLM's pool failed")

    def _store(self, batches: list[Ids]) -> None:
        self._submit(batches, self._pool.enqueue_store, self._io.batch_store_block)

    def _load(self, batches: list[Ids]) -> None:
        self._submit(batches, self._pool.enqueue_load, self._io.batch_load_block)

    def close(self) -> None:
        """Ends its threads."""
        self._pool.shutdown(wait=True)


class OneThreadEach(Timed):
    """As vLLM's SimpleCPUOffload does it: one file, one thread that stores by pwritev, one that
    loads by preadv, a block at a time; no checksum, no index."""

    def __init__(self, folder: Path, rows: npt.NDArray[np.uint8], direct: bool) -> None:
        super().__init__(rows)
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self._file = os.open(folder / "blocks", flags, 0o600)
        os.ftruncate(self._file, rows.nbytes)
        self._threads = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]

    def passes(self) -> tuple[float, float]:
        """Over the same file."""
        return self.timed(self._store, self._load)

    def _store(self, batches: list[Ids]) -> None:
        def write(ids: Ids) -> None:
            for at in ids.tolist():
                if os.pwritev(self._file, [self.rows[at]], at * self.rows.shape[1]) <= 0:
                    raise OSError("a short write")

        list(self._threads[0].map(write, batches))

    def _load(self, batches: list[Ids]) -> None:
        def read(ids: Ids) -> None:
            for at in ids.tolist():
                if os.preadv(self._file, [self.rows[at]], at * self.rows.shape[1]) <= 0:
                    raise OSError("a short read")

        list(self._threads[1].map(read, batches))

    def close(self) -> None:
        """Ends its threads."""
        for thread in self._threads:
            thread.shutdown()
        os.close(self._file)


class Bare:
    """A loop in C++ that does nothing else (`bare.cpp`), on two threads: this machine's cores."""

    def __init__(self, folder: Path, rows: npt.NDArray[np.uint8], direct: bool) -> None:
        program = folder / "bare"
        compiler = ["g++", "-std=c++20", "-O2", f"-I{HERE.parents[1]}/native"]
        source = [str(HERE / "bare.cpp"), "-o", str(program), "-lpthread"]
        subprocess.run([*compiler, *source], check=True)
        size = [str(rows.shape[1]), str(len(rows)), str(int(direct)), str(os.cpu_count())]
        self._process = subprocess.Popen(
            [program, folder / "bare.data", *size],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def passes(self) -> tuple[float, float]:
        """Over the same file."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        store, load = map(float, self._process.stdout.readline().split())
        return store, load

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate("q")


PEERS: dict[str, Any] = {
    "memlane": Memlane,
    "vLLM's fs tier": VllmFs,
    "one thread each way": OneThreadEach,
    "bare loop, C++": Bare,
}
