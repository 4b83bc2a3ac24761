"""Moving blocks between two arrays: within this host's memory, or to and from a GPU."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np

from memlane._base.arguments import integer_from
from memlane._native import copy_blocks as _copy_blocks
from memlane.errors import InvalidArgument, InvalidType, Unsupported
from memlane.offload import (
    _refusals,  # noqa: F401  # installs the errors of refused moves
    cuda,
)
from memlane.offload._arrays import Side

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

    Blocks: TypeAlias = np.ndarray[Any, Any] | torch.Tensor | Buffer
    Pairs: TypeAlias = np.ndarray[Any, Any] | torch.Tensor | Buffer | Iterable[Sequence[int]]

MOST_THREADS = 256

_log = logging.getLogger("memlane.offload")
_has_warned = False


@overload
def copy_blocks(
    src: Blocks, dst: Blocks, pairs: Pairs, *, threads: int | None = None, stream: None = None
) -> int: ...


@overload
def copy_blocks(
    src: Blocks, dst: Blocks, pairs: Pairs, *, threads: None = None, stream: torch.cuda.Stream
) -> cuda.BlockTransfer: ...


def copy_blocks(
    src: Blocks,
    dst: Blocks,
    pairs: Pairs,
    *,
    threads: int | None = None,
    stream: torch.cuda.Stream | None = None,
) -> int | cuda.BlockTransfer:
    """Copies block `a` of `src` to block `b` of `dst` for each pair `(a, b)`, or nothing at all.

    The result is that of numpy's `dst[b] = src[a]`, without an intermediate copy. Everything is
    checked before the first byte is copied, on a private copy of `pairs`. The GIL is released for
    moves that cost more than copying 64 KiB. A signal handler that raises ends a long move within
    about 50 ms; the blocks copied so far stay copied.

    Args:
        src: a numpy array, a torch tensor, or any object with the buffer protocol. Block `i` is
            `src[i]`, with its bytes in C order; it may have any strides.
        dst: the same, with blocks of the same number of bytes, and of the same dtype unless one of
            the two is int8 or uint8. It may be `src`, or share memory with it, if no block that is
            written shares a byte with one that is read. Different mappings of one file are not
            recognised as the same memory.
        pairs: ids as an array of shape (n, 2) and any integer dtype, or any iterable of pairs. No
            block of `dst` may occur twice.
        threads: 1 to 256; by default one per MiB, up to the number of cores and at most 8. Not for
            moves to or from a GPU.
        stream: for moves to or from a GPU, a `torch.cuda.Stream` of that GPU. The copies are
            queued on it, and the call returns at once if the host memory is page-locked. Without
            it they are queued on the current stream and waited for. Never run on a GPU yet.

    Returns:
        The number of bytes copied; with `stream` a `BlockTransfer` to wait for.

    Raises:
        PairRefused: an id is out of range, or a block of `dst` occurs twice or is also read.
        InvalidArgument: shapes, sizes, dtypes or memory do not fit, or `dst` is read-only.
        InvalidType: an argument's type cannot be blocks, ids or a number of threads.
        Unsupported: there is no GPU or no CUDA runtime, or both arrays are on GPUs.
        CopyFailed: CUDA refused a copy.
    """
    count = 0 if threads is None else _threads(threads)
    ids = _ids(pairs)  # first: an iterator may run code that changes the arrays
    source, target = Side("src", src), Side("dst", dst)
    target.require_writable()
    source.require_fits(target)
    if source.device is not None or target.device is not None:
        if threads is not None:
            raise InvalidArgument("threads= is for moves within host memory")
        moved = cuda.transfer(source, target, ids, stream)
        if stream is not None:
            return moved
        moved.wait()
        _log.debug("%r from %s to %s", moved, source.device or "host", target.device or "host")
        return moved.nbytes
    if stream is not None:
        if not cuda.is_available():
            raise Unsupported("stream= is for moves to or from a GPU; torch finds none here")
        raise InvalidArgument("stream= is for moves to or from a GPU; src and dst are on the host")
    nbytes, missing = _copy_blocks(source.blocks, target.blocks, ids, count)
    if missing:
        _warn_of_missing(missing)
    return nbytes


def _threads(threads: object) -> int:
    count = integer_from("threads", threads, 1)
    if count > MOST_THREADS:
        raise InvalidArgument(f"threads must be at most {MOST_THREADS}, not {count}")
    return count


def _ids(pairs: Any) -> np.ndarray[Any, Any]:
    """`pairs` as an aligned array of shape (n, 2) and 32 or 64 bits; copied only if necessary."""
    torch = sys.modules.get("torch")
    if isinstance(pairs, np.ndarray):
        ids = pairs
    elif torch is not None and isinstance(pairs, torch.Tensor):
        if pairs.device.type != "cpu":
            raise InvalidArgument(f"pairs must be in host memory, not on {pairs.device}")
        ids = pairs.detach().numpy()
    else:
        ids = _array_of(pairs)
        if ids.ndim == 0 and isinstance(pairs, Iterable):  # to numpy a generator is one object
            ids = _array_of(list(pairs))
    if ids.shape in ((0,), (0, 2)):
        return np.empty((0, 2), np.int64)
    if ids.ndim != 2 or ids.shape[1] != 2:
        raise InvalidArgument(f"pairs must have shape (n, 2), not {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise InvalidType(f"pairs must be integers of at most 64 bits, not {ids.dtype}")
    flags = ids.flags
    is_plain = ids.dtype.isnative and ids.dtype.itemsize >= 4
    if is_plain and flags.c_contiguous and flags.aligned:
        return ids
    return ids.astype(np.int64 if ids.dtype.kind == "i" else np.uint64, order="C")


def _array_of(pairs: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(pairs)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"pairs must be an array of shape (n, 2): {error}") from error


def _warn_of_missing(missing: int) -> None:
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    logging.getLogger("memlane").warning(
        "copy_blocks could not start %d of its threads and moves blocks more slowly; see `ulimit "
        "-u` and the cgroup's pids.max",
        missing,
    )
