"""The GPU of these tests, and what they must not leave on it."""

import os
from collections.abc import Iterator

import pytest
from benchmarks.gpu.device import Cuda, Device, error_left

from tests.support import children_of, dismiss, holdings
from tests.support.missing import needs, package


@pytest.fixture(scope="session")
def gpu() -> Device:
    torch = package("torch")
    if not torch.cuda.is_available():
        pytest.skip(needs("a GPU"))
    return Cuda()


@pytest.fixture(autouse=True)
def _leaves_nothing(gpu: Device) -> Iterator[None]:
    """Instead of that for all tests: CUDA keeps threads, descriptors and mappings of its own.

    Nothing that failed or was refused may leave an error that a later call reports.
    """
    before = holdings(("memlane-", "vllm_offload_")).segments
    yield
    dismiss()
    assert error_left(gpu) == 0
    assert holdings(("memlane-", "vllm_offload_")).segments == before
    assert not children_of(os.getpid())
