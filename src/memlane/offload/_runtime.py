"""The few functions needed of CUDA's runtime, as torch has loaded it into this process.

They are called by address, so building memlane does not require CUDA, and without the GIL.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlane._native import CudaCopies
from memlane.errors import CopyFailed

if TYPE_CHECKING:
    import numpy as np

    from memlane.offload._arrays import Side

# The first version of runtime and driver that has cudaMemcpyBatchAsync.
_FIRST_WITH_BATCHES = 12080
# The first version in which it lacks the parameter for the index of a copy that it refuses.
_FIRST_WITHOUT_INDEX = 13000
# On 64-bit systems: pinned for all GPUs, whichever is current, at the same address.
_REGISTER_DEFAULT = 0


# Where page-locked memory of this process begins that memlane has registered.
_begins: set[int] = set()


class CudaRefused(Exception):
    """A call of the runtime failed. Its error is cleared, so that later calls do not report it."""


class Runtime:
    """The library at `path`; raises OSError if the process has not loaded it."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        library.cudaHostRegister.argtypes = (pointer, size, ctypes.c_uint)
        library.cudaHostUnregister.argtypes = (pointer,)
        library.cudaGetErrorString.restype = ctypes.c_char_p
        self.path = path
        self._library = library
        version = self._version("cudaRuntimeGetVersion")
        has_batches = min(version, self._version("cudaDriverGetVersion")) >= _FIRST_WITH_BATCHES
        self._copies = CudaCopies(
            self._address("cudaMemcpyAsync"),
            self._address("cudaMemcpy2DAsync"),
            self._address("cudaMemcpyBatchAsync") if has_batches else 0,
            version < _FIRST_WITHOUT_INDEX,
        )

    def _version(self, call: str) -> int:
        """Returns 0 if the version is unknown."""
        version = ctypes.c_int(0)
        self._library[call](ctypes.byref(version))
        return version.value

    def _address(self, name: str) -> int:
        return ctypes.cast(self._library[name], ctypes.c_void_p).value or 0

    def register(self, address: int, size: int) -> None:
        self._check(
            "cudaHostRegister", self._library.cudaHostRegister(address, size, _REGISTER_DEFAULT)
        )
        _begins.add(address)

    def unregister(self, address: int) -> None:
        self._check("cudaHostUnregister", self._library.cudaHostUnregister(address))
        _begins.discard(address)

    def queue(
        self, src: Side, dst: Side, pairs: np.ndarray[Any, Any], stream: int
    ) -> tuple[int, int, str]:
        """Queues copies; returns (bytes, copies, ways). The copies before a refused one stay
        queued."""
        nbytes, copies, ways, code = self._copies.queue(
            src.blocks, dst.blocks, pairs, dst.device is not None, stream, sorted(_begins)
        )
        if code:
            raise CopyFailed(code, self._cleared(code), copies)
        return nbytes, copies, ways

    def _check(self, call: str, code: int) -> None:
        if code:
            raise CudaRefused(f"{call}: {self._cleared(code)} (code {code})")

    def _cleared(self, code: int) -> str:
        self._library.cudaGetLastError()
        text = self._library.cudaGetErrorString(code) or b"unknown"
        return str(text.decode(errors="replace"))


def loaded_runtime() -> Runtime | None:
    """The runtime that this process has loaded, or None."""
    # Not splitlines(), which splits at more than newlines; the kernel escapes newlines in names.
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).split("\n"):
        path = line.split(maxsplit=5)[5] if line.count("/") else ""
        if Path(path).name.startswith("libcudart"):
            try:
                return Runtime(path)
            except OSError:  # a mapped file of that name that is not a loaded library
                continue
    return None
