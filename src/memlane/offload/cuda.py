"""Blocks to and from a GPU: copies queued on a stream of torch's, and what waits for them.

This has not run on a GPU yet. The copies that it asks for are tested against a library that has
the functions of CUDA's run time and does them with memcpy (`tests/unit/test_copy_cuda.py`).
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from memlane._native import CudaCopies
from memlane.errors import CopyFailed, InvalidArgument, InvalidType, Unsupported
from memlane.offload._arrays import Side

if TYPE_CHECKING:
    import torch

# From here on the run time, and the driver below it, know cudaMemcpyBatchAsync.
_FIRST_WITH_BATCHES = 12080

# Copies that may be under way, with their arrays: memory must not be freed under the GPU, even if
# the caller drops everything. Those that are done go with the next transfer.
_under_way: set[BlockTransfer] = set()


class BlockTransfer:
    """Copies that are queued on a stream; it keeps both arrays until they are done.

    Attributes:
        nbytes: how many bytes they move.
        copies: how many copies they were made of, neighbours being one.
        event: a `torch.cuda.Event` recorded behind them, for other streams to wait for.
    """

    __slots__ = ("_arrays", "copies", "event", "nbytes")

    def __init__(
        self, nbytes: int, copies: int, event: torch.cuda.Event, arrays: tuple[Any, ...]
    ) -> None:
        self.nbytes = nbytes
        self.copies = copies
        self.event = event
        self._arrays = arrays

    @property
    def done(self) -> bool:
        """Has everything been moved?"""
        return bool(self.event.query())

    def wait(self) -> int:
        """Return when everything has been moved, without the GIL; the number of bytes."""
        self.event.synchronize()
        self._let_go()
        return self.nbytes

    def _let_go(self) -> None:
        self._arrays = ()
        _under_way.discard(self)

    def __repr__(self) -> str:
        return f"<BlockTransfer of {self.nbytes} bytes in {self.copies} copies>"


class Runtime:
    """A CUDA run time library, `path` for the loader; `major` is its version."""

    def __init__(self, path: str, major: int) -> None:
        try:
            self._library = ctypes.CDLL(path)
            copy, copy_2d = self._address("cudaMemcpyAsync"), self._address("cudaMemcpy2DAsync")
        except (OSError, AttributeError) as error:
            raise Unsupported(f"copies to and from a GPU need CUDA's run time: {error}") from error
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        batch = self._address("cudaMemcpyBatchAsync") if self._has_batches(major) else 0
        self._copies = CudaCopies(copy, copy_2d, batch, major)

    def _address(self, name: str) -> int:
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0

    def _has_batches(self, major: int) -> bool:
        needed = max(_FIRST_WITH_BATCHES, major * 1000)
        for ask in ("cudaRuntimeGetVersion", "cudaDriverGetVersion"):
            version = ctypes.c_int(0)
            if getattr(self._library, ask)(ctypes.byref(version)) or version.value < needed:
                return False
        return hasattr(self._library, "cudaMemcpyBatchAsync")

    def queue(
        self, src: Side, dst: Side, pairs: np.ndarray[Any, Any], stream: int
    ) -> tuple[int, int]:
        """Bytes and copies; if one of these is refused, those before it are queued."""
        nbytes, copies, error = self._copies.queue(
            src.blocks, dst.blocks, pairs, dst.device is not None, stream
        )
        if error:
            self._library.cudaGetLastError()  # or torch would report it as its own
            reason = self._library.cudaGetErrorString(error) or b"unknown"
            raise CopyFailed(error, reason.decode(errors="replace"), copies)
        return nbytes, copies


def is_available() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


@cache
def _runtime() -> Runtime:
    """The one that torch has loaded: the loader gives what has that name already."""
    import torch

    version = torch.version.cuda
    if version is None:
        raise Unsupported("copies to and from a GPU need a torch that is built for CUDA")
    major = int(version.split(".")[0])
    return Runtime(f"libcudart.so.{major}", major)


def transfer(
    src: Side, dst: Side, pairs: np.ndarray[Any, Any], stream: torch.cuda.Stream | None
) -> BlockTransfer:
    """Queues the copies; one of the two sides is on a GPU."""
    import torch

    if src.device is not None and dst.device is not None:
        raise Unsupported(
            f"src is on {src.device} and dst on {dst.device}; between GPUs, or within one, torch's "
            "index_copy_ is the better call"
        )
    device = dst.device if src.device is None else src.device
    if stream is None:
        stream = torch.cuda.current_stream(device)
    elif not isinstance(stream, torch.cuda.Stream):
        raise InvalidType(f"stream must be a torch.cuda.Stream, not {type(stream).__name__}")
    if stream.device != device:
        raise InvalidArgument(f"the stream is one of {stream.device}, the tensor is on {device}")
    runtime = _runtime()
    for earlier in [earlier for earlier in _under_way if earlier.done]:
        earlier._let_go()
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        try:
            nbytes, copies = runtime.queue(src, dst, pairs, stream.cuda_stream)
            event.record(stream)
        except CopyFailed:
            stream.synchronize()  # what was queued still uses the arrays
            raise
    moved = BlockTransfer(nbytes, copies, event, (src, dst))
    _under_way.add(moved)
    return moved
