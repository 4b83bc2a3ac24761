"""Copies blocks to and from a GPU: queues copies on a torch stream, and waits for them.

This has not run on a GPU yet. The copies that it requests are tested against a library that has
the functions of CUDA's runtime, checks their arguments as CUDA's manual specifies, and copies with
memcpy (`tests/support/cuda.py`). `make gpu` runs the same tests on a GPU.
"""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

from memlane._base.survivors import DROPPERS
from memlane._importing import fork_waits
from memlane.errors import InvalidArgument, InvalidType, Unsupported
from memlane.offload._runtime import Runtime, loaded_runtime

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import numpy as np
    import torch

    from memlane.offload._arrays import Side

# Transfers that may be in progress, with their arrays: memory must not be freed under the GPU, even
# if the caller drops every reference. Finished ones are removed at the next transfer.
_under_way: set[BlockTransfer] = set()
_own_streams: dict[torch.device, torch.cuda.Stream] = {}
_log = logging.getLogger("memlane.offload")


class BlockTransfer:
    """Copies queued on a stream; both arrays are kept alive until they are done.

    Attributes:
        nbytes: number of bytes they copy.
        copies: number of copies queued; adjacent blocks are one.
        method: how they were queued: `2d` (blocks at a regular step as one copy), `batch` (one call
            for up to 4,096), `loop` (one call each), several joined by `+`, or `none`.
        event: a `torch.cuda.Event` recorded after them, for other streams to wait for.
    """

    __slots__ = ("_arrays", "copies", "event", "method", "nbytes")

    def __init__(
        self,
        nbytes: int,
        copies: int,
        method: str,
        event: torch.cuda.Event,
        arrays: tuple[Any, ...],
    ) -> None:
        self.nbytes = nbytes
        self.copies = copies
        self.method = method
        self.event = event
        self._arrays = arrays

    @property
    def done(self) -> bool:
        """True if everything has been copied; if so, drops the arrays."""
        is_done = bool(self.event.query())
        if is_done:
            self._let_go()
        return is_done

    def wait(self) -> int:
        """Waits, without the GIL, until everything has been copied; returns the number of bytes.

        Raises torch's error if the GPU has failed.
        """
        self.event.synchronize()
        self._let_go()
        return self.nbytes

    def _let_go(self) -> None:
        self._arrays = ()
        _under_way.discard(self)

    def __repr__(self) -> str:
        return f"<BlockTransfer of {self.nbytes} bytes in {self.copies} copies ({self.method})>"


def is_available() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


@cache
def _runtime() -> Runtime:
    """The first one found: streams belong to the driver, so any runtime can copy on them."""
    runtime = loaded_runtime()
    if runtime is None:
        raise Unsupported("copies to and from a GPU need CUDA's runtime, and none is loaded here")
    return runtime


def transfer(
    src: Side, dst: Side, pairs: np.ndarray[Any, Any], stream: torch.cuda.Stream | None
) -> BlockTransfer:
    """Queues the copies; one of the two sides is on a GPU."""
    with fork_waits:
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
        raise InvalidArgument(f"the stream is on {stream.device}, but the tensor is on {device}")
    runtime = _runtime()
    forget_finished()
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        behind, stream = stream, _with_batches(stream, device)
        try:
            nbytes, copies, method = runtime.queue(src, dst, pairs, stream.cuda_stream)
            event.record(stream)
            if behind is not stream:
                behind.wait_event(event)
            moved = BlockTransfer(nbytes, copies, method, event, (src, dst))
            _under_way.add(moved)
        except InvalidArgument:  # before anything was queued
            raise
        except BaseException:  # CopyFailed, or whatever a signal handler raises
            stream.synchronize()  # what was queued still uses the arrays
            raise
    return moved


def _with_batches(stream: torch.cuda.Stream, device: torch.device) -> torch.cuda.Stream:
    """`stream`; for the legacy default stream (which has two handles, and refuses batches), a
    stream of memlane's own that waits for the work queued there so far."""
    if stream.cuda_stream not in (0, 1):
        return stream
    with fork_waits:
        import torch

    own = _own_streams.get(device)
    if own is None:
        own = _own_streams.setdefault(device, torch.cuda.Stream(device))
    own.wait_stream(stream)
    return own


def device_in_use() -> AbstractContextManager[object]:
    """A block in which CUDA calls create no context on a GPU that this process does not use.

    In every new thread GPU 0 is current, whatever the other threads have chosen.
    """
    torch: Any = sys.modules.get("torch")
    has_context = getattr(getattr(torch, "_C", None), "_cuda_hasPrimaryContext", None)
    if has_context is None or not torch.cuda.is_initialized():
        return nullcontext()
    if has_context(torch.cuda.current_device()):
        return nullcontext()
    in_use = (one for one in range(torch.cuda.device_count()) if has_context(one))
    device = next(in_use, None)
    # On exit torch does not touch the previous GPU, because that has no context.
    return nullcontext() if device is None else torch.cuda.device(device)


def forget_finished() -> None:
    """Drops the arrays of finished transfers that nobody has waited for."""
    _ask_all(lambda transfer: transfer.done)


DROPPERS.append(forget_finished)


def finish_all() -> None:
    """Waits for every transfer; afterwards none uses memory."""
    _ask_all(BlockTransfer.wait)


def _ask_all(question: Callable[[BlockTransfer], object]) -> None:
    for transfer in tuple(_under_way):
        try:
            question(transfer)
        except RuntimeError as error:  # a GPU that has failed copies no more
            transfer._let_go()
            _log.warning("%r has failed: %s", transfer, error)
