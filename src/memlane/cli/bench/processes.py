"""Shared by the processes of a measurement: they execute orders, and end with the run.

Orders arrive through a pipe, on which all processes sleep between two slices. A process that fails
reports the error through the run's pipe, and the run kills it.
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
    """Makes the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def lead(open_peer: Callable[[], object], orders: Connection) -> None:
    """The body of a peer's first process: opens the peer and executes orders until `close`."""
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
    """The body of a process that the first one forks."""
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
    """Reports to the run, which then kills this peer."""
    failures.send(RuntimeError(f"{type(error).__name__}: {error}"))
    time.sleep(60)  # the run kills us


def leave() -> None:
    """Exits without the interpreter's shutdown."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
