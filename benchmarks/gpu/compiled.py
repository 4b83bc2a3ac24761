"""kernel.cu as machine code, by NVRTC, which torch brings, or else by nvcc; and its launch.

The signatures are those of nvrtc.h and cuda.h of CUDA 12 and 13. All functions return 0 or an
error.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

SOURCE = Path(__file__).with_name("kernel.cu")
THREADS = 512


class NotCompiled(Exception):
    """Neither compiler is here, or it refused; the text says which and why."""


def kernel_code(architecture: str, packages: Path) -> bytes:
    """The code for an architecture such as `sm_90`; NVRTC is looked for among `packages`."""
    refusals = []
    for path in _nvrtcs(packages):
        try:
            return _by_nvrtc(path, architecture)
        except (NotCompiled, OSError) as refusal:
            refusals.append(str(refusal))
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise NotCompiled("; ".join([*refusals, "nvcc is not here"]))
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        command = [nvcc, f"-arch={architecture}", "-cubin", "-o", str(cubin), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotCompiled(f"nvcc: {done.stderr.strip()}")
        return cubin.read_bytes()


def _nvrtcs(packages: Path) -> Iterator[Path]:
    """In packages for CUDA 13 in nvidia/cu13/lib, for CUDA 12 in nvidia/cuda_nvrtc/lib."""
    for version in ("13", "12"):
        yield from packages.glob(f"nvidia/*/lib/libnvrtc.so.{version}")


def _by_nvrtc(path: Path, architecture: str) -> bytes:
    for builtins in path.parent.glob(f"libnvrtc-builtins.so.{path.suffix[1:]}.*"):
        ctypes.CDLL(str(builtins))  # NVRTC asks for it by name alone, and finds it loaded
    library, program = ctypes.CDLL(str(path)), ctypes.c_void_p()
    # (nvrtcProgram*, source, name, number of headers, headers, their names)
    source = SOURCE.read_bytes()
    made = library.nvrtcCreateProgram(
        ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None
    )
    if made:
        raise NotCompiled(f"nvrtcCreateProgram: error {made}")
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        if library.nvrtcCompileProgram(program, 1, options):
            raise NotCompiled(f"NVRTC: {_taken(library, 'ProgramLog', program).decode().strip()}")
        return _taken(library, "CUBIN", program)  # only for a real architecture, not compute_90
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _taken(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    if error := library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)):
        raise NotCompiled(f"nvrtcGet{what}Size: error {error}")
    taken = ctypes.create_string_buffer(size.value)
    if error := library[f"nvrtcGet{what}"](program, taken):
        raise NotCompiled(f"nvrtcGet{what}: error {error}")
    return taken.raw


def launcher(code: bytes) -> Callable[[int, int, int, int, int], None]:
    """A function (grid, places, blocks, bytes, stream) that queues the kernel.

    The module belongs to this thread's current context, and stays loaded.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check("cuModuleLoadData", driver.cuModuleLoadData(ctypes.byref(module), code))
    name = b"copy_blocks"
    _check("cuModuleGetFunction", driver.cuModuleGetFunction(ctypes.byref(function), module, name))

    def launch(grid: int, places: int, blocks: int, nbytes: int, stream: int) -> None:
        values = [ctypes.c_ulonglong(value) for value in (places, blocks, nbytes)]
        # An array of addresses of the values; CUDA copies them before it returns.
        parameters = (ctypes.c_void_p * 3)(*map(ctypes.addressof, values))
        # (function, grid x y z, block x y z, shared memory, stream, parameters, extra)
        size = (grid, 1, 1, THREADS, 1, 1, 0)
        stream_at = ctypes.c_void_p(stream)
        error = driver.cuLaunchKernel(function, *size, stream_at, parameters, None)
        _check("cuLaunchKernel", error)

    return launch


def _check(call: str, error: int) -> None:
    if error:
        raise RuntimeError(f"{call}: error {error}")
