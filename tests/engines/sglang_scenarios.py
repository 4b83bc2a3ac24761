"""SGLang's processes in the tests; `running.run` runs each function."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

from memlane import MessageQueue
from tests.engines.ports import free_ports
from tests.engines.scenario import fresh_processes
from tests.support import PATIENCE

fresh = fresh_processes(__name__)  # they find the engine's modules, too


def queue_class() -> Any:
    """The class that SGLang's groups get, after its plugins have been called."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.distributed.device_communicators.shm_broadcast import MessageQueue

    return MessageQueue


def through_plugins() -> None:
    """Modules that copied the name are rebound, too; once."""
    import sglang.srt.distributed.device_communicators.shm_broadcast as broadcast
    import sglang.srt.plugins as plugins

    early = SimpleNamespace(copy=broadcast.MessageQueue)
    sys.modules["an_early_importer"] = early  # type: ignore[assignment]
    queue = queue_class()
    plugins._plugins_loaded = False
    assert queue_class() is queue is early.copy
    assert queue.__module__ == "memlane.engines.sglang.queue"


def _rank(rank: int, size: int, port: int, switched: str) -> None:
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), MEMLANE_SGLANG=switched)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    try:
        end = queue_class().create_from_process_group(dist.group.WORLD, 1 << 22, 6)
        for step in range(3):
            sent = {"step": step, "ids": list(range(1000))}
            assert end.broadcast_object(sent if rank == 0 else None) == sent
        dist.barrier()
    finally:  # or torch's threads may abort the interpreter while it ends
        dist.destroy_process_group()


def _ranks(*switched: str) -> list[Any]:
    port, size = free_ports(1), len(switched)
    ranks = [fresh.Process(target=_rank, args=(n, size, port, switched[n])) for n in range(size)]
    for process in ranks:
        process.start()
    return ranks


def group() -> None:
    """As SGLang's groups use it."""
    ranks = _ranks("queue", "queue", "all")
    for process in ranks:
        process.join(PATIENCE)
    assert [process.exitcode for process in ranks] == [0, 0, 0]


def half_switched() -> None:
    """A rank that goes on with SGLang's own queue learns so at once, on either side."""
    for words in (("queue", ""), ("", "queue")):
        ranks = _ranks(*words)
        ranks[1].join(PATIENCE)
        ranks[0].kill()
        ranks[0].join()
        assert ranks[1].exitcode == 1
    MessageQueue(1, 1).close()  # sweeps the name of the one whose readers never came


def switched() -> None:
    """A start."""
    queue_class()
