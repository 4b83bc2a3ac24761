"""The payloads of the benchmark: from a scheduler's decision to 64 MiB arrays and tensors."""

from __future__ import annotations

from memlane.cli.bench.channel import ARRAY, DICT, MIB, Payload, array


def _tensor(name: str, title: str, count: int) -> Payload:
    def make() -> object:
        import torch

        torch.set_num_threads(1)  # the process forks later, and must not have other threads then
        return torch.arange(count // 4, dtype=torch.float32)

    return Payload(name, title, count, make, is_tensor=True)


PAYLOADS = (
    DICT,
    ARRAY,
    array("array-64m", "64 MiB array", 64 * MIB),
    _tensor("tensor-16m", "16 MiB tensor", 16 * MIB),
    _tensor("tensor-64m", "64 MiB tensor", 64 * MIB),
)
BY_NAME = {payload.name: payload for payload in PAYLOADS}
