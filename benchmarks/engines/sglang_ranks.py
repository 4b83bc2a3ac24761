"""Ranks of one of SGLang's process groups, run in its environment: `sglang_ranks.py`.

Prints what it measures as lines of JSON after `@@`; everything else is SGLang's log.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from typing import Any

RANKS = 3
ROUNDS = 3000
IDLE = 5.0
PATIENCE = 10.0


def tell(**facts: object) -> None:
    print("@@" + json.dumps(facts), flush=True)


def seconds_of_cpu() -> float:
    times = os.times()
    return times.user + times.system


def rank(number: int, port: int, struck: Any) -> None:
    """Rank 0 writes. Loads SGLang's plugins, as each of SGLang's processes does."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.plugins import load_plugins

    load_plugins()
    parallel_state.init_distributed_environment(
        world_size=RANKS,
        rank=number,
        local_rank=number,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
        backend="gloo",
    )
    group = parallel_state.init_model_parallel_group(
        [list(range(RANKS))], number, "gloo", use_message_queue_broadcaster=True, group_name="tp"
    )
    queue = type(group.mq_broadcaster)
    if number == 0:
        tell(queue=f"{queue.__module__}.{queue.__name__}")

    def step(count: int) -> None:
        sent = {"step": count, "ids": list(range(1000))}
        received = group.broadcast_object(sent if number == 0 else None)
        if received != sent:
            raise SystemExit(f"rank {number} received {received}")

    for count in range(20):
        step(count)
    parallel_state.get_world_group().barrier()
    began = time.perf_counter()
    for count in range(ROUNDS):
        step(count)
    parallel_state.get_world_group().barrier()
    if number == 0:
        tell(microseconds_per_object=(time.perf_counter() - began) / ROUNDS * 1e6)
        time.sleep(IDLE)
    before = seconds_of_cpu()
    step(0)
    if number == 1:
        tell(idle_cpu_of_a_reader=seconds_of_cpu() - before)
    parallel_state.get_world_group().barrier()
    if number == 0:
        time.sleep(1)
        struck.value = time.monotonic()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.broadcast_object()
    except Exception as error:
        tell(rank=number, seconds_to_the_error=time.monotonic() - struck.value, error=str(error))


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    struck = spawn.Value("d", 0.0)
    ranks = [spawn.Process(target=rank, args=(n, port, struck)) for n in range(RANKS)]
    for process in ranks:
        process.start()
    ranks[0].join()
    for process in ranks:
        process.join(PATIENCE)
        process.kill()


if __name__ == "__main__":
    main()
