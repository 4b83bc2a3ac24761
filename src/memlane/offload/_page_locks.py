"""Page-locking for the GPU, through the CUDA runtime that torch has loaded into this process."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

GIB = 1 << 30
MOST_AT_ONCE = 64 * GIB
_log = logging.getLogger("memlane.offload")


class CudaRefused(Exception):
    """A call of the runtime failed; its sticky error is cleared."""


class Runtime:
    """The few calls that page-locking needs; no GIL is held in them."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)  # loaded already, so this only finds it
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._library.cudaHostRegister.argtypes = (pointer, size, ctypes.c_uint)
        self._library.cudaHostUnregister.argtypes = (pointer,)
        self._library.cudaGetLastError.argtypes = ()
        self._library.cudaGetErrorString.argtypes = (ctypes.c_int,)
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def register(self, address: int, size: int) -> None:
        self._check("cudaHostRegister", self._library.cudaHostRegister(address, size, 0))

    def unregister(self, address: int) -> None:
        self._check("cudaHostUnregister", self._library.cudaHostUnregister(address))

    def _check(self, call: str, code: int) -> None:
        if code == 0:
            return
        self._library.cudaGetLastError()  # or the next, innocent CUDA call would report it
        text = self._library.cudaGetErrorString(code)
        raise CudaRefused(f"{call}: {text.decode(errors='replace')} (code {code})")


def loaded_runtime() -> Runtime | None:
    """None where nothing in this process has loaded one."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5] if line.count("/") else ""
        if Path(path).name.startswith("libcudart"):
            return Runtime(path)
    return None


class PageLocks:
    """Which parts of one mapping are page-locked; all of it or nothing."""

    def __init__(self, address: int, size: int, row_bytes: int, name: str) -> None:
        self._address = address
        self._size = size
        self._row_bytes = row_bytes
        self._name = name
        self._locked: list[int] = []

    @property
    def is_locked(self) -> bool:
        return bool(self._locked)

    def chunks(self) -> list[tuple[int, int]]:
        """(address, bytes) of each registration: whole rows, as many as 64 GiB hold."""
        rows = max(1, MOST_AT_ONCE // self._row_bytes)
        step = min(rows * self._row_bytes, MOST_AT_ONCE)
        return [
            (self._address + at, min(step, self._size - at)) for at in range(0, self._size, step)
        ]

    def lock(self) -> bool:
        """False, and one WARNING, if it cannot be; then nothing is locked."""
        runtime = loaded_runtime()
        if runtime is None:
            _log.warning(
                "%s stays pageable: no CUDA runtime is loaded here (no GPU, or a torch without "
                "CUDA)",
                self._name,
            )
            return False
        try:
            for address, size in self.chunks():
                runtime.register(address, size)
                self._locked.append(address)
        except CudaRefused as error:
            locked = len(self._locked)
            self.unlock()
            _log.warning(
                "%s stays pageable: chunk %d: %s; see `ulimit -l` and the container's memory",
                self._name,
                locked,
                error,
            )
            return False
        except BaseException:
            self.unlock()
            raise
        return True

    def unlock(self) -> None:
        """Before the memory is unmapped; what fails is a WARNING."""
        locked, self._locked = self._locked, []
        runtime = loaded_runtime() if locked else None
        if runtime is None:
            return
        for address in locked:
            try:
                runtime.unregister(address)
            except CudaRefused as error:
                _log.warning("%s: could not be unlocked: %s", self._name, error)

    def take_over(self) -> None:
        """Somebody has registered the whole by himself, from its beginning."""
        self._locked = [self._address]

    def forget(self) -> None:
        """Somebody has unregistered it by himself."""
        self._locked = []
