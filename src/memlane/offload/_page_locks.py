"""Page-locking for the GPU."""

from __future__ import annotations

import logging
from contextlib import suppress

from memlane._locks import Lock
from memlane.offload import cuda
from memlane.offload._runtime import CudaRefused, Runtime, loaded_runtime

GIB = 1 << 30
MOST_AT_ONCE = 64 * GIB
_log = logging.getLogger("memlane.offload")


class PageLocks:
    """The page locks of one mapping, in several registrations: all of it is locked, or nothing."""

    def __init__(self, address: int, size: int, row_bytes: int, name: str) -> None:
        self._address = address
        self._size = size
        self._row_bytes = row_bytes
        self._name = name
        self._locked: list[int] = []
        self._current: int | None = None  # the one that is being registered
        self._unlocks = 0  # calls of unlock()
        self._runtime: Runtime | None = None  # the one that locked them
        self._one_at_a_time = Lock()

    @property
    def is_locked(self) -> bool:
        return bool(self._locked)

    def chunks(self) -> list[tuple[int, int]]:
        """(address, bytes) of each registration: as many whole rows as fit in 64 GiB."""
        rows = max(1, MOST_AT_ONCE // self._row_bytes)
        step = min(rows * self._row_bytes, MOST_AT_ONCE)
        return [
            (self._address + at, min(step, self._size - at)) for at in range(0, self._size, step)
        ]

    def lock(self) -> bool:
        """Locks all pages; if that fails, locks none, logs one warning and returns False."""
        with self._one_at_a_time:
            if self.is_locked:
                return True
            runtime = loaded_runtime()
            if runtime is None:
                _log.warning(
                    "%s stays pageable: no CUDA runtime is loaded here (no GPU, or a torch without "
                    "CUDA)",
                    self._name,
                )
                return False
            self._runtime = runtime
            unlocks = self._unlocks
            try:
                with cuda.device_in_use():
                    for address, size in self.chunks():
                        self._current = address
                        runtime.register(address, size)
                        if self._unlocks != unlocks:  # in a signal handler
                            self._unlock_current(runtime)
                            return False
                        self._locked.append(address)
                        self._current = None
            except CudaRefused as error:
                self._current = None
                if self._unlocks != unlocks:
                    return False
                locked = len(self._locked)
                self.unlock()
                _log.warning(
                    "%s stays pageable: chunk %d: %s; see `ulimit -l` and the container's memory",
                    self._name,
                    locked,
                    error,
                )
                return False
            except BaseException:  # a signal handler may raise anything between two calls
                self.unlock()
                raise
            return True

    def unlock(self) -> None:
        """Call it before the memory is unmapped; logs a failure as a warning."""
        cuda.forget_finished()
        with self._one_at_a_time:
            self._unlocks += 1
            is_any = self._locked or self._current is not None
            runtime = (self._runtime or loaded_runtime()) if is_any else None
            if runtime is None:
                self._locked = []
                return
            cuda.finish_all()
            with cuda.device_in_use():
                self._unlock_current(runtime)
                while self._locked:  # what an interruption leaves is unlocked by the next call
                    address = self._locked[-1]
                    try:
                        runtime.unregister(address)
                    except CudaRefused as error:
                        _log.warning("%s could not be unlocked: %s", self._name, error)
                    with suppress(ValueError):  # a signal handler has unlocked all of them
                        self._locked.remove(address)

    def _unlock_current(self, runtime: Runtime) -> None:
        if self._current is not None and self._current not in self._locked:
            with suppress(CudaRefused):  # it is not registered yet
                runtime.unregister(self._current)
                self._current = None

    def take_over(self) -> None:
        """Call it after registering the whole mapping, from its beginning."""
        if not self._locked:
            self._runtime = loaded_runtime()
            self._locked = [self._address]

    def forget(self) -> None:
        """Call it after unregistering the mapping."""
        self._locked = []
