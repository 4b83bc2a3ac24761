"""Runs the steps of a plan on a device: what takes time, and how it is timed."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.gpu.device import TO_DEVICE, Device, error_left, pieces_of
from benchmarks.gpu.plan import Plan, Scale, Step
from benchmarks.gpu.ways import LIBRARY, Library, Move, NotHere, Way, ceiling, ways
from memlane import SharedOffloadRegion
from memlane.cli.bench.measure import Figures

CEILING = "ceiling"
# A way that is faster than this is repeated, and the whole is timed.
SHORTEST = 0.002
MOST_REPEATS = 50
_HUGE, _SMALL = 14, 15  # MADV_HUGEPAGE, MADV_NOHUGEPAGE


@dataclass
class Cell:
    """The figures of one step by peer, one value a round."""

    step: Step
    peers: dict[str, Figures] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # ways that are not here, and why
    failed: dict[str, str] = field(default_factory=dict)  # ways, or the step itself, and why
    method: str = ""  # what copy_blocks chose

    def median(self, peer: str, measure: str) -> float | None:
        return self.peers[peer].median(measure) if peer in self.peers else None

    def add(self, peer: str, measure: str, value: float) -> None:
        self.peers.setdefault(peer, Figures()).add(measure, value)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        peers = {
            name: {
                measure: {"median": figures.median(measure), "rounds": values}
                for measure, values in figures.rounds.items()
            }
            for name, figures in self.peers.items()
        }
        rest = {"skipped": self.skipped, "failed": self.failed, "method": self.method}
        return {**asdict(self.step), "peers": peers, **rest}


class Bench:
    """A device with the memory that all moves use: a page-locked region, and the GPU's."""

    def __init__(self, device: Device, scale: Scale, host: SharedOffloadRegion) -> None:
        self.device = device
        self.scale = scale
        whole = np.asarray(host.create_kv_memoryview()).reshape(-1).view(np.int8)
        self._host, self._spare = np.split(whole, [self.bytes_of_blocks(scale)])
        self._there = device.zeros(len(self._host))
        self._random = np.random.default_rng(1)
        self._content = self._random.integers(-128, 128, len(self._host), np.int8)

    @staticmethod
    def bytes_of_blocks(scale: Scale) -> int:
        return max(scale.ceiling, 2 * scale.moved)

    def run(self, plan: Plan) -> Iterator[Cell]:
        """A step that fails does not end the others: a GPU is not always to be had."""
        measures: dict[str, Callable[[Cell], None]] = {
            "move": self._move,
            "rows": self._move,
            "beside a matmul": self._beside,
            "registration": self._registration,
            "pieces": self._pieces,
        }
        while step := plan.next(time.time()):
            begin, cell = time.time(), Cell(step)
            try:
                measures[step.kind](cell)
            except Exception as error:
                cell.failed["all"] = f"{type(error).__name__}: {error}"
            plan.took(step, time.time() - begin)
            yield cell

    def _prepared(self, step: Step) -> Move:
        """The move of a step: half of twice as many blocks, in no order on either side; or rows of
        the host, each with a gap as long as itself, to blocks without."""
        if step.kind == "rows":
            host = self._host[: 2 * step.count * step.size].reshape(step.count, -1)[:, : step.size]
            host[:] = self._content[: step.count * step.size].reshape(host.shape)
            there = self._there[: step.count * step.size].reshape(host.shape)
            pairs = np.arange(step.count).repeat(2).reshape(-1, 2)
            return Move(step.direction, host, there, pairs, self._spare)
        blocks = 2 * step.count
        ids = [self._random.permutation(blocks)[: step.count] for _ in range(2)]
        part = blocks * step.size
        host, there = self._host[:part], self._there[:part]
        host[:] = self._content[:part]
        shape = (blocks, step.size)
        return Move(
            step.direction, host.reshape(shape), there.reshape(shape), np.stack(ids, 1), self._spare
        )

    # Moves ----------------------------------------------------------------------------------

    def _move(self, cell: Cell) -> None:
        move, stream = self._prepared(cell.step), self.device.stream()
        chosen = self._ways(cell, move, stream)
        names = [CEILING, *chosen]
        for number in range(self.scale.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                if name == CEILING:
                    seconds = self._ceiling(move, stream)
                    cell.add(CEILING, "gb_s", self.scale.ceiling / seconds / 1e9)
                else:
                    self._time(cell, name, *chosen[name])

    def _ways(self, cell: Cell, move: Move, stream: Any) -> dict[str, tuple[Way, int]]:
        """Every way that is here, each with how often it is repeated; its result is checked."""
        check = _Check(self.device, move)
        chosen = {}
        for name, make in ways(self.device).items():
            if cell.step.kind == "rows" and name != LIBRARY:
                continue  # these see single blocks, which are the same as in other moves
            try:
                check.clear()
                way = make(self.device, move, stream)
                self._once(way)  # compiles, and starts what is started once
                check.compare(name)
                begin = time.perf_counter()
                self._once(way)
                taken = time.perf_counter() - begin
            except NotHere as missing:
                cell.skipped[name] = str(missing)
                continue
            except Exception as error:
                cell.failed[name] = f"{type(error).__name__}: {error}"
                continue
            chosen[name] = way, max(1, min(MOST_REPEATS, int(SHORTEST / taken)))
            if isinstance(way, Library):
                cell.method = way.method
        return chosen

    @staticmethod
    def _once(way: Way) -> None:
        way.queue()
        way.stream.synchronize()
        way.finish()

    def _time(self, cell: Cell, name: str, way: Way, repeats: int) -> None:
        """By wall clock with all that the host does, by events on the stream (the last time), and
        by CPU time."""
        start, end = self.device.timer(), self.device.timer()
        begin, cpu = time.perf_counter(), 0.0
        for _ in range(repeats):
            start.record(way.stream)
            before = time.thread_time()
            way.queue()
            cpu += time.thread_time() - before
            end.record(way.stream)
            way.stream.synchronize()
            before = time.thread_time()
            way.finish()
            cpu += time.thread_time() - before
        seconds = (time.perf_counter() - begin) / repeats
        count = len(way.move.pairs)
        cell.add(name, "gb_s", count * way.move.size / seconds / 1e9)
        cell.add(name, "event_ms", start.elapsed_time(end))
        cell.add(name, "cpu_ns", cpu / repeats / count * 1e9)

    def _ceiling(self, move: Move, stream: Any) -> float:
        begin = time.perf_counter()
        ceiling(self.device, move, self.scale.ceiling, stream)
        stream.synchronize()
        return time.perf_counter() - begin

    # Beside a matmul ------------------------------------------------------------------------

    def _beside(self, cell: Cell) -> None:
        """Returns how long the same products take alone, and while each way moves without a pause;
        and how much it moves meanwhile."""
        move, stream = self._prepared(cell.step), self.device.stream()
        side, products = self.scale.product
        compute, multiply = self.device.stream(), self.device.product(side)
        chosen = self._ways(cell, move, stream)

        def milliseconds(way: Way | None) -> tuple[float, int]:
            moves = 0
            start, end = self.device.timer(), self.device.timer()
            with self.device.current(compute):
                start.record(compute)
                for _ in range(products):
                    multiply()
                end.record(compute)
            while way is not None and not end.query():
                self._once(way)
                moves += 1
            end.synchronize()
            return float(start.elapsed_time(end)), moves

        milliseconds(None)
        for _ in range(self.scale.rounds):
            alone, _ = milliseconds(None)
            for name, (way, _) in chosen.items():
                taken, moves = milliseconds(way)
                cell.add(name, "slowdown", taken / alone)
                nbytes = moves * len(move.pairs) * move.size
                cell.add(name, "gb_s", nbytes / taken / 1e6)

    # Registration ---------------------------------------------------------------------------

    def _registration(self, cell: Cell) -> None:
        """cudaHostRegister of private memory."""
        for _ in range(self.scale.rounds):
            for pages, advice in (("4 KiB", _SMALL), ("huge", _HUGE)):
                for state in ("populated", "fresh"):
                    memory = mmap.mmap(-1, self.scale.registered, mmap.MAP_PRIVATE)
                    with suppress(OSError):  # a kernel without huge pages
                        memory.madvise(advice)
                    view = np.frombuffer(memory, np.int8)
                    if state == "populated":
                        view[:: mmap.PAGESIZE] = 1
                    seconds = self._register(view)
                    cell.add(f"{state}, {pages} pages", "gb_s", view.nbytes / seconds / 1e9)
                    del view
                    memory.close()

    def _register(self, view: np.ndarray[Any, Any]) -> float:
        runtime, address = self.device.runtime, ctypes.c_void_p(view.ctypes.data)
        begin = time.perf_counter()
        error = runtime.cudaHostRegister(address, view.nbytes, 0)
        seconds = time.perf_counter() - begin
        error = error or runtime.cudaHostUnregister(address)
        if error:
            error_left(self.device)  # cleared
            raise RuntimeError(f"cudaHostRegister or cudaHostUnregister: error {error}")
        return seconds

    def _pieces(self, cell: Cell) -> None:
        """A populated region, pinned by one call and in sixteen pieces, in turns."""
        nbytes = self.scale.pieces
        with region(nbytes) as whole:
            for number in range(2 * self.scale.rounds):
                name, most = (("one call", nbytes), ("16 pieces", nbytes // 16))[number % 2]
                with pieces_of(most):
                    begin = time.perf_counter()
                    if not whole.pin():
                        raise RuntimeError("the region could not be pinned; the log says why")
                    seconds = time.perf_counter() - begin
                    whole.unpin()
                cell.add(name, "gb_s", nbytes / seconds / 1e9)


class _Check:
    """Checks that a move's blocks have arrived, byte by byte, and that the others are untouched."""

    def __init__(self, device: Device, move: Move) -> None:
        import torch

        self._device = device
        self._move = move
        source, target = (torch.from_numpy(np.ascontiguousarray(ids)) for ids in move.pairs.T)
        host = torch.from_numpy(move.host)
        there = device.tensor(move.there)
        if move.kind != TO_DEVICE:
            there.copy_(host)
        self._host = host
        self._expected = torch.zeros_like(host)
        self._expected[target] = host[source]
        if move.kind == TO_DEVICE:
            self._expected = self._expected.to(there.device)

    def _target(self) -> Any:
        if self._move.kind == TO_DEVICE:
            return self._device.tensor(self._move.there)
        self._device.finish()
        return self._host

    def clear(self) -> None:
        self._target().zero_()
        self._device.finish()

    def compare(self, name: str) -> None:
        if not self._target().equal(self._expected):
            raise RuntimeError(f"{name} has not moved the blocks that it should have")


@contextmanager
def region(nbytes: int) -> Iterator[SharedOffloadRegion]:
    """A populated region with 16 rows, for one worker."""
    name = f"benchmark-{time.time_ns()}"
    with SharedOffloadRegion(name, nbytes, 16, 0, 1, nbytes // 16) as made:
        yield made


def measure(device: Device, scale: Scale, plan: Plan) -> Iterator[Cell]:
    nbytes = Bench.bytes_of_blocks(scale) + scale.moved
    with region(nbytes) as host:
        if not host.pin():
            raise RuntimeError("the region could not be pinned; the log says why")
        bench = Bench(device, scale, host)
        yield from bench.run(plan)
        del bench  # its views of the region
