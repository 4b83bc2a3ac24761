"""Copies to a GPU as they are asked for, against a library that does them with memcpy."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from memlane import CopyFailed, PairRefused, Unsupported
from memlane.offload._arrays import Side
from memlane.offload.cuda import Runtime

SOURCE = r"""
#include <cstddef>
#include <cstring>
static int failing;
extern "C" {
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void*) {
    if (failing) return 700;
    memcpy(to, from, bytes);
    return 0;
}
int cudaMemcpy2DAsync(void* to, size_t tp, const void* from, size_t fp, size_t n,
                      size_t rows, int, void*) {
    for (size_t r = 0; r < rows; ++r) memcpy((char*)to + r * tp, (const char*)from + r * fp, n);
    return 0;
}
int cudaMemcpyBatchAsync(void** to, const void** from, size_t* n, size_t count, void*,
                         size_t*, size_t, void*) {
    for (size_t i = 0; i < count; ++i) memcpy(to[i], from[i], n[i]);
    return 0;
}
int cudaRuntimeGetVersion(int* v) { *v = 13000; return 0; }
int cudaDriverGetVersion(int* v) { *v = VERSION; return 0; }
int cudaGetLastError() { return 0; }
const char* cudaGetErrorString(int) { return "it failed"; }
void fail() { failing = 1; }
}
"""


@pytest.fixture(scope="module", params=[13000, 12060])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a driver that knows batches, and with one that does not."""
    folder = tmp_path_factory.mktemp("cudart")
    # It stays in this process, and page-locking takes what is called libcudart for the real one.
    source, built = folder / "fake.cpp", folder / f"libstandin-{request.param}.so"
    source.write_text(SOURCE)
    command = ["g++", "-shared", "-fPIC", f"-DVERSION={request.param}", "-o", built, source]
    subprocess.run(command, check=True)
    return built


@pytest.mark.parametrize("step", [1, 2])
def test_moves(library: Path, step: int) -> None:
    """Runs, regular steps and single blocks arrive, and are counted."""
    src = np.arange(100 * 16, dtype=np.int32).reshape(100, 16)[::step]
    dst = np.zeros((100, 16), np.int32)
    pairs = np.array([(i, 60 + i) for i in range(20)] + [(30, 1), (40, 3), (35, 7)])
    queued = Runtime(str(library), 13).queue(Side("src", src), Side("dst", dst), pairs, 1)
    assert queued == (23 * 64, 4)
    assert (dst[pairs[:, 1]] == src[pairs[:, 0]]).all()
    with pytest.raises(PairRefused):
        Runtime(str(library), 13).queue(Side("src", src), Side("dst", dst), pairs[[0, 0]], 1)


def test_failures(library: Path) -> None:
    """CUDA's error is told with how many copies came before it; no library is told, too."""
    runtime = Runtime(str(library), 13)
    runtime._library.fail()
    src, dst = np.ones((4, 8)), np.zeros((4, 8))
    with pytest.raises(CopyFailed, match="it failed, error 700") as caught:
        runtime.queue(Side("src", src), Side("dst", dst), np.array([(0, 1)]), 1)
    assert (caught.value.code, caught.value.queued) == (700, 0)
    with pytest.raises(Unsupported, match="CUDA's run time"):
        Runtime("libcudart-none.so", 13)
