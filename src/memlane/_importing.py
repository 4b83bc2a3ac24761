"""The lock around imports that come late: a fork waits for them.

A child that is forked while another thread imports a module inherits the lock of that module, held
by a thread that it does not have: its own import would never return. What functions
import, they import with `fork_waits`, the lock that `os.fork` takes. Forks by C code do not wait.
"""

import os
import sys

from memlane._locks import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

fork_waits = Lock()


def _wait() -> None:
    """Takes `fork_waits` whatever signal handlers raise meanwhile: os.fork only prints what its
    hooks raise, and forks. The parent gets that error once os.fork has returned."""
    taken: list[bool] = []  # is extended in C, so it tells for certain
    raised: BaseException | None = None
    while not taken:
        try:
            taken.extend(filter(fork_waits.acquire, (False,)))
            if not taken:
                _sleep(taken)
        except BaseException as error:
            if raised is not None:
                error.__context__ = raised
            raised = error
    if raised is not None:
        _raise_after_fork(raised)


def _sleep(taken: list[bool]) -> None:
    """Does not hold the lock of logging meanwhile, which imports may need: its own hook has taken
    it before, if logging was imported after memlane."""
    lock: Any = getattr(sys.modules.get("logging"), "_lock", None)
    held = lock._release_save() if lock is not None and lock._is_owned() else None
    try:
        taken.extend(filter(fork_waits.acquire, (True,)))
    finally:
        if held is not None:
            lock._acquire_restore(held)


def _raise_after_fork(error: BaseException) -> None:
    with fork_waits:
        from memlane._native import after_return

    errors = [error]

    def raise_in_parent() -> None:
        if errors:
            after_return.error = errors.pop()  # no call, after which another hook could run

    # Registered last, it runs last: whatever a hook raises is lost.
    os.register_at_fork(after_in_parent=raise_in_parent, after_in_child=errors.clear)


os.register_at_fork(
    before=_wait,
    after_in_parent=fork_waits.release,
    after_in_child=fork_waits.release,
)
