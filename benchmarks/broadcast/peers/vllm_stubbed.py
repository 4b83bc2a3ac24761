"""vLLM 0.33's own MessageQueue without vLLM: its modules are real, their other imports are stubs.

As in the tests of the adapters; `python -m tests.engines.sources` fetches the modules.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from memlane.cli.bench.channel import Peer
from memlane.cli.bench.payloads import Payload
from memlane.cli.bench.peers import vllm_queue

RELEASE = "0.33"
SOURCES = Path(__file__).parents[3] / "build/engines" / RELEASE


class Default(vllm_queue.Default):
    def prepare(self) -> None:
        import_module("tests.engines.scenario").prepare(RELEASE)
        super().prepare()


class Arena(Default):
    has_arena = True


def _missing(payload: Payload) -> str | None:
    if find_spec("torch") is None:
        return "torch is not installed"
    return None if SOURCES.exists() else "run `python -m tests.engines.sources` first"


def _missing_arena(payload: Payload) -> str | None:
    return _missing(payload) if payload.is_tensor else "it is for tensors"


PEERS = (
    Peer("vLLM", Default, _missing, sleeps=False),
    Peer("vLLM arena", Arena, _missing_arena, sleeps=False),
)
