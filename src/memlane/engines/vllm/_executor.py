"""Ends of vLLM's executor: who calls `shutdown` while it is under way waits until it is done.

vLLM's own returns at once to the second caller. With memlane EngineCore's main thread hears of a
death as early as the thread that monitors the workers, and would end the process, that thread in
it, before the surviving workers have been ended: they would go on as orphans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

Shutdown = Callable[[Any], None]


def one_at_a_time(shutdown: Shutdown) -> Shutdown:
    """`shutdown` of an executor, behind a lock of that executor's.

    Re-entrant, because a signal handler may call it in the middle of itself.
    """

    @wraps(shutdown)
    def shut_down(executor: Any) -> None:
        lock = vars(executor).setdefault("_memlane_shutdown_lock", threading.RLock())
        with lock:
            shutdown(executor)

    return shut_down
