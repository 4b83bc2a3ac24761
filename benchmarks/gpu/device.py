"""A GPU as the measurements and the tests use it: torch's, or a stand-in for machines without one
(`tests/support/gpus.py`)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.gpu.compiled import kernel_code, launcher
from memlane.offload import _page_locks
from memlane.offload._runtime import loaded_runtime

TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind
# (grid, address of the blocks' addresses, number of blocks, bytes of a block, stream)
Launch = Callable[[int, int, int, int, int], None]


class Device(Protocol):
    """One GPU. Streams and events have the methods of torch's."""

    @property
    def name(self) -> str: ...

    @property
    def processors(self) -> int:
        """Number of its multiprocessors."""

    @property
    def runtime(self) -> ctypes.CDLL:
        """CUDA's runtime."""

    def zeros(self, *shape: int) -> Any:
        """Blocks of int8 in its memory, for `copy_blocks`."""

    def tensor(self, blocks: Any) -> Any:
        """The same memory for work of torch's, which sees what was copied before."""

    def ids(self, array: np.ndarray[Any, Any]) -> Any:
        """A copy of these int64 numbers, for torch's work there."""

    def stream(self) -> Any: ...

    def current(self, stream: Any) -> AbstractContextManager[object]:
        """A block in which torch queues its work on the stream."""

    def timer(self) -> Any:
        """An event that tells times."""

    def delay(self, stream: Any) -> None:
        """Keeps the stream busy: what is queued behind it is under way for 0.5 s at least."""

    def finish(self) -> None:
        """Waits for all that was queued."""

    def kernel(self) -> Launch:
        """Raises NotCompiled if there is no compiler."""

    def product(self, side: int) -> Callable[[], object]:
        """A function that queues the product of two bf16 matrices on the current stream."""


def signed(path: str) -> ctypes.CDLL:
    """The runtime at `path` with the types of the functions used here (cuda_runtime_api.h)."""
    runtime = ctypes.CDLL(path)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    runtime.cudaMemcpyAsync.argtypes = (pointer, pointer, size, ctypes.c_int, pointer)
    runtime.cudaHostRegister.argtypes = (pointer, size, ctypes.c_uint)
    runtime.cudaHostUnregister.argtypes = (pointer,)
    return runtime


def error_left(device: Device) -> int:
    """The error that a later, innocent call in this thread would report; clears it."""
    return int(device.runtime.cudaGetLastError())


def fetched(device: Device, blocks: Any) -> np.ndarray[Any, Any]:
    """The bytes of blocks on the GPU once all is copied."""
    device.finish()
    return np.array(device.tensor(blocks).cpu())


@contextmanager
def pieces_of(nbytes: int) -> Iterator[None]:
    """Within it, regions are registered in pieces of so many bytes."""
    most, _page_locks.MOST_AT_ONCE = _page_locks.MOST_AT_ONCE, nbytes
    try:
        yield
    finally:
        _page_locks.MOST_AT_ONCE = most


class Cuda:
    """The current GPU of this process's torch."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        torch.zeros(1, device="cuda")  # loads the runtime and creates the context
        runtime = loaded_runtime()
        if runtime is None:
            sys.exit("torch has loaded no CUDA runtime as a library of its own")
        self.runtime = signed(runtime.path)
        properties = torch.cuda.get_device_properties(0)
        self.name = f"{properties.name}, torch {torch.__version__}, CUDA {torch.version.cuda}"
        self.processors: int = properties.multi_processor_count
        self._launch: Launch | None = None
        self._architecture = f"sm_{properties.major}{properties.minor}"

    def zeros(self, *shape: int) -> Any:
        made = self._torch.zeros(shape, dtype=self._torch.int8, device="cuda")
        self.finish()  # the blocks may be used on any stream
        return made

    def tensor(self, blocks: Any) -> Any:
        return blocks

    def ids(self, array: np.ndarray[Any, Any]) -> Any:
        return self._torch.from_numpy(array).to("cuda", non_blocking=True)

    def stream(self) -> Any:
        return self._torch.cuda.Stream()

    def current(self, stream: Any) -> AbstractContextManager[object]:
        return self._torch.cuda.stream(stream)  # type: ignore[no-any-return]

    def timer(self) -> Any:
        return self._torch.cuda.Event(enable_timing=True)

    def delay(self, stream: Any) -> None:
        with self.current(stream):
            self._torch.cuda._sleep(1_000_000_000)  # cycles, of 2 GHz at most

    def finish(self) -> None:
        self._torch.cuda.synchronize()

    def kernel(self) -> Launch:
        if self._launch is None:
            # NVIDIA's packages lie beside torch.
            code = kernel_code(self._architecture, Path(self._torch.__path__[0]).parent)
            self._launch = launcher(code)
        return self._launch

    def product(self, side: int) -> Callable[[], object]:
        torch = self._torch
        left, right = (torch.randn(side, side, device="cuda").bfloat16() for _ in range(2))
        out = torch.empty_like(left)
        return lambda: torch.mm(left, right, out=out)
