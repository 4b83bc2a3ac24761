"""How vLLM's executor ends: all workers before its process, and survivors of a death soon.

vLLM's own `shutdown` returns at once to a second caller. With memlane the main thread of EngineCore
hears of a death as early as the thread that monitors the workers, and would end the process, that
thread in it, before the surviving workers have been ended: they would go on as orphans.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from multiprocessing.connection import wait
from typing import Any

Shutdown = Callable[[Any], None]

# Seconds for the survivors of another worker. They may be in a collective that the dead one never
# joins, where nothing but SIGKILL is heard; vLLM sends it after nine.
GRACE = 3.0
OWN_PATIENCE = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"  # if it is set, it holds


def one_at_a_time(shutdown: Shutdown) -> Shutdown:
    """`shutdown` of an executor, behind a lock of that executor's.

    Re-entrant, because a signal handler may call it in the middle of itself.
    """

    @wraps(shutdown)
    def shut_down(executor: Any) -> None:
        lock = vars(executor).setdefault("_memlane_shutdown_lock", threading.RLock())
        with lock, _survivors_ended(executor):
            shutdown(executor)

    return shut_down


@contextmanager
def _survivors_ended(executor: Any) -> Iterator[None]:
    processes = [worker.proc for worker in getattr(executor, "workers", None) or ()]
    # A process that ends closes its sentinel, and only then can be waited for.
    ended = wait([process.sentinel for process in processes], 0)
    alive = [process for process in processes if process.sentinel not in ended]
    if not ended or OWN_PATIENCE in os.environ:
        yield
        return
    timer = threading.Timer(GRACE, lambda: [process.kill() for process in alive])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
