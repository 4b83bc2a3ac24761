"""What the processes of a measurement have in common: they obey orders, and end with the run.

Orders come through a pipe; between two slices all processes sleep there. What goes wrong in any of
them is reported through the run's pipe, and the process ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

FORK = multiprocessing.get_context("fork")
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Nobody outlives the run, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def lead(open_peer: Callable[[], object], orders: Connection) -> None:
    """The body of a peer's first process: what it opens obeys, until `close`."""
    os.setpgid(0, 0)  # the run kills the whole group
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        process = open_peer()
        orders.send(None)
    except BaseException as error:
        report_failure(error, orders)
    else:
        obey(process, orders, orders)
    leave()


def follow(process: object, orders: Connection, failures: Connection) -> None:
    """The body of a process that the first one has forked."""
    die_with_parent()
    obey(process, orders, failures)
    leave()


def obey(process: object, orders: Connection, failures: Connection) -> None:
    """Calls the method that each order names, until `close`."""
    order = ""
    try:
        while order != "close":
            order, args = orders.recv()
            orders.send(getattr(process, order)(*args))
    except BaseException as error:
        report_failure(error, failures)


def report_failure(error: BaseException, failures: Connection) -> None:
    """Tells the run, which then ends this peer."""
    failures.send(RuntimeError(f"{type(error).__name__}: {error}"))
    time.sleep(60)  # the run kills us


def leave() -> None:
    """Past everything that an interpreter does at its end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
