"""The ways to move scattered blocks between page-locked host memory and a GPU.

`LIBRARY` is what memlane does. The others are candidates: the fastest for a direction, a size and a
number of blocks belongs in `native/offload/copy_ways.hpp`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.compiled import NotCompiled
from benchmarks.gpu.device import TO_DEVICE, TO_HOST, Device
from memlane import copy_blocks
from memlane._native import CudaCopies
from memlane.offload._arrays import Side
from memlane.offload._runtime import Runtime

Array = np.ndarray[Any, Any]


class NotHere(Exception):
    """A way that this machine does not have; the text says what is missing."""


@dataclass(frozen=True)
class Move:
    """Pairs of blocks in no order, from the host to the GPU or back.

    `spare` is page-locked memory for as many blocks as are moved, and for two numbers a block.
    """

    kind: int  # TO_DEVICE or TO_HOST
    host: Array
    there: Any
    pairs: Array
    spare: Array

    @property
    def size(self) -> int:
        return int(self.host.shape[1])

    @property
    def sides(self) -> tuple[Any, Any]:
        return (self.host, self.there) if self.kind == TO_DEVICE else (self.there, self.host)


class Way:
    """One way for one move on one stream, as often as wanted, each time to its end."""

    def __init__(self, device: Device, move: Move, stream: Any) -> None:
        self.device = device
        self.move = move
        self.stream = stream

    def queue(self) -> None:
        """Queues the move."""
        raise NotImplementedError

    def finish(self) -> None:
        """Does the host's part once all that was queued is done."""


class Library(Way):
    """`memlane.copy_blocks`."""

    method = ""

    def queue(self) -> None:
        moved = copy_blocks(*self.move.sides, self.move.pairs, stream=self.stream)
        self.method = moved.method


class Batch(Way):
    """cudaMemcpyBatchAsync, called by memlane's own code."""

    way = "batch"

    def __init__(self, device: Device, move: Move, stream: Any) -> None:
        super().__init__(device, move, stream)
        self._runtime = Runtime(device.runtime._name)
        source, target = move.sides
        self._sides = Side("src", source), Side("dst", target)

    def queue(self) -> None:
        *_, way = self._runtime.queue(*self._sides, self.move.pairs, self.stream.cuda_stream)
        if way != self.way:
            raise NotHere(f"memlane chose {way} for this move")


class Loop(Batch):
    """cudaMemcpyAsync for each block, in the same code."""

    way = "loop"

    def __init__(self, device: Device, move: Move, stream: Any) -> None:
        super().__init__(device, move, stream)
        address = self._runtime._address
        self._runtime._copies = CudaCopies(
            address("cudaMemcpyAsync"), address("cudaMemcpy2DAsync"), 0, False
        )


class Kernel(Way):
    """kernel.cu, on a part of the GPU's multiprocessors or on all.

    vLLM's own kernel for blocks below 28 KiB runs on 12 of an H100's, too.
    """

    def __init__(self, device: Device, move: Move, stream: Any, grid: int) -> None:
        super().__init__(device, move, stream)
        self._grid = grid
        try:
            self._launch = device.kernel()
        except NotCompiled as missing:
            raise NotHere(str(missing)) from None
        self._places = device.zeros(len(move.pairs), 16)

    def queue(self) -> None:
        move, stream = self.move, self.stream.cuda_stream
        places = move.spare[: 16 * len(move.pairs)].view(np.int64).reshape(-1, 2)
        np.multiply(move.pairs, move.size, out=places)
        places += [_address(side) for side in move.sides]
        there = _address(self._places)
        _copy(self.device, there, places.ctypes.data, places.nbytes, TO_DEVICE, stream)
        self._launch(self._grid, there, len(move.pairs), move.size, stream)


class Staging(Way):
    """One cudaMemcpyAsync through a buffer on each side; the host's half by copy_blocks, the
    GPU's by torch."""

    def __init__(self, device: Device, move: Move, stream: Any) -> None:
        import torch

        super().__init__(device, move, stream)
        self._torch: Any = torch
        count = len(move.pairs)
        self._near = move.spare[: count * move.size].reshape(count, move.size)
        self._far = device.zeros(count, move.size)
        order = np.arange(count)
        source, target = (np.ascontiguousarray(ids) for ids in move.pairs.T)
        self._ids, self._far_ids = (source, target) if move.kind == TO_DEVICE else (target, source)
        gathered = [self._ids, order] if move.kind == TO_DEVICE else [order, self._ids]
        self._pairs = np.stack(gathered, 1)

    def queue(self) -> None:
        device, kind = self.device, self.move.kind
        near, far = self._near.ctypes.data, _address(self._far)
        to, from_ = (far, near) if kind == TO_DEVICE else (near, far)
        copied = to, from_, self._near.nbytes, kind, self.stream.cuda_stream
        if kind == TO_DEVICE:
            self.gather()
            _copy(device, *copied)
        with device.current(self.stream):
            there, far_blocks = map(self._words, (self.move.there, self._far))
            ids = device.ids(self._far_ids)
            if kind == TO_DEVICE:
                there.index_copy_(0, ids, far_blocks)
            else:
                self._torch.index_select(there, 0, ids, out=far_blocks)
        if kind == TO_HOST:
            _copy(device, *copied)

    def _words(self, blocks: Any) -> Any:
        """As torch indexes them fastest: by elements, so those of 8 bytes if that divides them."""
        tensor = blocks if isinstance(blocks, self._torch.Tensor) else self.device.tensor(blocks)
        return tensor if self.move.size % 8 else tensor.view(self._torch.int64)

    def finish(self) -> None:
        if self.move.kind == TO_HOST:
            self.scatter()

    def gather(self) -> None:
        copy_blocks(self.move.host, self._near, self._pairs)

    def scatter(self) -> None:
        copy_blocks(self._near, self.move.host, self._pairs)


class IndexSelect(Staging):
    """The same with torch's index_select and index_copy_ on the host, too."""

    def gather(self) -> None:
        host, ids, near = map(self._torch.from_numpy, (self.move.host, self._ids, self._near))
        self._torch.index_select(self._words(host), 0, ids, out=self._words(near))

    def scatter(self) -> None:
        host, ids, near = map(self._torch.from_numpy, (self.move.host, self._ids, self._near))
        self._words(host).index_copy_(0, ids, self._words(near))


class Vllm(Way):
    """vLLM's swap_blocks_batch, the call of its offloading connector: a batch of the driver's."""

    def __init__(self, device: Device, move: Move, stream: Any) -> None:
        super().__init__(device, move, stream)
        try:
            from vllm import _custom_ops
        except ImportError:
            raise NotHere("vLLM is not installed") from None
        self._swap = _custom_ops.swap_blocks_batch

    def queue(self) -> None:
        import torch

        move = self.move
        places = move.pairs * move.size + [_address(side) for side in move.sides]
        source, target = (torch.from_numpy(np.ascontiguousarray(one)) for one in places.T)
        with self.device.current(self.stream):
            self._swap(source, target, torch.full_like(source, move.size))


def _address(blocks: Any) -> int:
    return int(blocks.ctypes.data if isinstance(blocks, np.ndarray) else blocks.data_ptr())


def _copy(device: Device, to: int, from_: int, nbytes: int, kind: int, stream: int) -> None:
    if error := device.runtime.cudaMemcpyAsync(to, from_, nbytes, kind, stream):
        raise RuntimeError(f"cudaMemcpyAsync: error {error}")


def ceiling(device: Device, move: Move, nbytes: int, stream: Any) -> None:
    """Queues one copy of so many bytes of the same memory: the most that the bus can do."""
    target, source = (_address(side) for side in reversed(move.sides))
    _copy(device, target, source, nbytes, move.kind, stream.cuda_stream)


LIBRARY = "copy_blocks"


def ways(device: Device) -> dict[str, Callable[[Device, Move, Any], Way]]:
    every = device.processors
    return {
        LIBRARY: Library,
        "loop": Loop,
        "batch": Batch,
        "kernel, 12 SMs": partial(Kernel, grid=min(12, every)),
        "kernel, all SMs": partial(Kernel, grid=every),
        "staging": Staging,
        "index_select": IndexSelect,
        "vLLM": Vllm,
    }
