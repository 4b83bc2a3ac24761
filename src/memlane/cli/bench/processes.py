"""The processes of one peer: they execute orders, and end with the run.

Orders arrive through a pipe, on which all processes sleep between two slices, even those of peers
that poll. A process that fails reports the error through the run's pipe, and the run kills it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

FORK = multiprocessing.get_context("fork")
SHM = Path("/dev/shm")
_PREFIX = "mlbench"
_PR_SET_PDEATHSIG = 1


class Hung(Exception):
    """A peer did not answer in time, and was killed."""


class Workspace:
    """The folder and the name prefix of everything that peers create; removed at the end.

    Inside the block it is the folder of temporary files: vLLM's queue leaves its sockets there.
    """

    def __init__(self) -> None:
        for folder in (SHM, Path(tempfile.gettempdir())):
            for stale in folder.glob(f"{_PREFIX}*_*"):
                pid = stale.name[len(_PREFIX) :].partition("_")[0]
                if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                    self.remove(stale)  # left by a run that was killed
        self.prefix = f"{_PREFIX}{os.getpid()}_"
        self.folder = Path(tempfile.mkdtemp(prefix=self.prefix))
        self._count = 0

    def new_name(self) -> str:
        self._count += 1
        return f"{self.prefix}{self._count}"

    @staticmethod
    def remove(path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        with suppress(FileNotFoundError, PermissionError, IsADirectoryError):
            path.unlink()

    def __enter__(self) -> Self:
        self._before, tempfile.tempdir = tempfile.tempdir, str(self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        tempfile.tempdir = self._before
        for path in (self.folder, *SHM.glob(f"{self.prefix}*")):
            self.remove(path)


class Session:
    """A context manager; leaving it ends the processes, and kills those that do not end."""

    def __init__(
        self, main: Callable[..., None], *args: object, open_seconds: float = 30.0
    ) -> None:
        """Starts a process with `main(*args, orders)`, which answers once it is open."""
        self._orders, there = FORK.Pipe()
        self._process = FORK.Process(target=main, args=(*args, there))
        self._process.start()
        there.close()
        self._answer(open_seconds)

    def ask(self, order: str, *args: object, timeout: float = 30.0) -> Any:
        """Sends the first process an order; if it fails or hangs, kills the peer and raises."""
        with suppress(BrokenPipeError):  # what follows says so
            self._orders.send((order, args))
        return self._answer(timeout)

    def _answer(self, timeout: float) -> Any:
        try:
            if not self._orders.poll(timeout):
                raise Hung(f"no answer within {timeout:.0f} s")
            answer = self._orders.recv()
            if isinstance(answer, Exception):
                raise answer
        except BaseException as error:
            self.kill()
            if isinstance(error, (EOFError, ConnectionError)):
                raise Hung("its processes ended") from None
            raise
        return answer

    def kill(self) -> None:
        """Kills all processes of this peer; nothing else is in their process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or os.getpid() + 1, signal.SIGKILL)
        self._process.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            with suppress(Exception):
                self.ask("close", timeout=10)
            self._process.join(2)
        self.kill()


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def lead(open_peer: Callable[[], object], orders: Connection) -> None:
    """The body of a peer's first process: opens the peer and executes orders until `close`."""
    os.setpgid(0, 0)  # the run kills the whole group
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _obey(open_peer, orders, orders)


def follow(process: object, orders: Connection, failures: Connection) -> None:
    """The body of a process that the first one forks."""
    _obey(lambda: process, orders, failures)


def _obey(open_process: Callable[[], object], orders: Connection, failures: Connection) -> None:
    """Calls the method that each order names, until `close`."""
    die_with_parent()
    try:
        process = open_process()
        if orders is failures:
            orders.send(None)  # the first process is open
        order = ""
        while order != "close":
            order, args = orders.recv()
            orders.send(getattr(process, order)(*args))
    except BaseException as error:
        failures.send(RuntimeError(f"{type(error).__name__}: {error}"))
        time.sleep(60)  # the run kills us
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without the interpreter's shutdown
