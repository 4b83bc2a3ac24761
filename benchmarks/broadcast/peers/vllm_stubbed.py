"""vLLM 0.33's own MessageQueue without vLLM: its modules are real, their other imports are stubs.

As in the tests of the adapters; `python -m tests.engines.sources` fetches the modules.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from memlane.cli.bench.channel import Payload, Peer
from memlane.cli.bench.peers import vllm_queue

RELEASE = "0.33"
SOURCES = Path(__file__).parents[3] / "build/engines" / RELEASE


class Default(vllm_queue.Default):
    def prepare(self) -> None:
        import_module("tests.engines.scenario").prepare(RELEASE)
        super().prepare()


class Arena(Default):
    has_arena = True


def _refuses(payload: Payload) -> str | None:
    return None if SOURCES.exists() else "run `python -m tests.engines.sources` first"


def _only_tensors(payload: Payload) -> str | None:
    return _refuses(payload) if payload.is_tensor else "it is for tensors"


PEERS = (
    Peer("vLLM", Default, "torch", _refuses, sleeps=False),
    Peer("vLLM arena", Arena, "torch", _only_tensors, sleeps=False),
)
