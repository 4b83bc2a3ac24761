"""A fake CUDA runtime (`cudart.cpp`), because machines that run the tests may have no GPU.

A scene runs in a process that has loaded it under the real library's name, as torch would. A torch
for GPUs has loaded the real one, too, which is hidden there.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memlane.offload import _runtime
from tests.support import Link, start
from tests.support.built import built

STREAM = 0x5EED0


def stand_in(version: int = 13000, driver: int = 13000) -> Path:
    """The library for that version of CUDA's runtime and of the driver."""
    folder = f"native/native/tests/cuda-{version}-{driver}"
    return built(f"{folder}/libcudart.so.{version // 1000}", "native-build")


def with_runtime(library: Path, scene: Callable[[Any], None]) -> None:
    """Runs the scene; it must leave nothing registered, no error, and no copy pending."""

    def role(_link: Link) -> None:
        fake = ctypes.CDLL(str(library))
        use = _runtime.Runtime.__init__

        def use_fake(self: _runtime.Runtime, path: str) -> None:
            if path != str(library):
                raise OSError(f"{path} is not {library}")
            use(self, path)

        _runtime.Runtime.__init__ = use_fake  # type: ignore[method-assign]
        fake.bytes_registered.restype = ctypes.c_size_t
        fake.be_gpu.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        scene(fake)
        left = (fake.ranges_registered(), fake.copies_waiting(), fake.sticky_error())
        assert (left, fake.unregistered_late()) == ((0, 0, 0), 0)

    start(role).result()
