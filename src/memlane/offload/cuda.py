"""Blocks to and from a GPU: copies queued on a stream of torch's, and what waits for them.

This has not run on a GPU yet. The copies that it asks for are tested against a library that has
the functions of CUDA's runtime, its rules for their arguments, and does them with memcpy
(`tests/cuda.py`).
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from memlane.errors import InvalidArgument, InvalidType, Unsupported
from memlane.offload._runtime import Runtime, loaded_runtime

if TYPE_CHECKING:
    import numpy as np
    import torch

    from memlane.offload._arrays import Side

# Copies that may be under way, with their arrays: memory must not be freed under the GPU, even if
# the caller drops everything. Those that are done go with the next transfer.
_under_way: set[BlockTransfer] = set()
_log = logging.getLogger("memlane.offload")


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
        """Has everything been moved? Then the arrays are kept no longer."""
        is_done = bool(self.event.query())
        if is_done:
            self._let_go()
        return is_done

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


def is_available() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


@cache
def _runtime() -> Runtime:
    """The first that is found: streams are the driver's, so any runtime can copy on them."""
    runtime = loaded_runtime()
    if runtime is None:
        raise Unsupported("copies to and from a GPU need CUDA's runtime, and none is loaded here")
    return runtime


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
    for earlier in tuple(_under_way):
        _ = earlier.done  # which lets go of its arrays
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        try:
            nbytes, copies = runtime.queue(src, dst, pairs, stream.cuda_stream)
            event.record(stream)
            moved = BlockTransfer(nbytes, copies, event, (src, dst))
            _under_way.add(moved)
        except InvalidArgument:  # before anything was queued
            raise
        except BaseException:  # CopyFailed, or whatever a signal handler raises
            stream.synchronize()  # what was queued still uses the arrays
            raise
    return moved


def finish_all() -> None:
    """Waits for every transfer: from then on no memory is used by them."""
    for transfer in tuple(_under_way):
        try:
            transfer.wait()
        except RuntimeError as error:  # a GPU that has failed copies no more
            _log.warning("%r has failed: %s", transfer, error)
