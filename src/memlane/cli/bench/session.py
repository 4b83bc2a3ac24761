"""Starts the processes of one peer, asks them for slices, and kills them if they hang."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from memlane.cli.bench.processes import FORK

SHM = Path("/dev/shm")
TMP = Path(tempfile.gettempdir())
PREFIX = "mlbench"
OPEN_SECONDS = 30.0


class Hung(Exception):
    """A peer did not answer in time, and was killed."""


class Workspace:
    """The folder and the name prefix of everything that peers create; removed at the end.

    Inside the block it is the folder of temporary files: vLLM's queue leaves its sockets there.
    """

    def __init__(self) -> None:
        for stale in (*SHM.glob(f"{PREFIX}*_*"), *TMP.glob(f"{PREFIX}*_*")):
            pid = stale.name[len(PREFIX) :].partition("_")[0]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                self._remove(stale)  # left by a run that was killed
        self.prefix = f"{PREFIX}{os.getpid()}_"
        self.folder = Path(tempfile.mkdtemp(prefix=self.prefix))
        self._count = 0

    def new_name(self) -> str:
        self._count += 1
        return f"{self.prefix}{self._count}"

    @staticmethod
    def _remove(path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        with suppress(FileNotFoundError, PermissionError, IsADirectoryError):
            path.unlink()

    def __enter__(self) -> Self:
        self._before, tempfile.tempdir = tempfile.tempdir, str(self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        tempfile.tempdir = self._before
        self._remove(self.folder)
        for path in SHM.glob(f"{self.prefix}*"):
            self._remove(path)


class Session:
    """A context manager; leaving it ends the processes, and kills those that do not end."""

    def __init__(
        self, main: Callable[..., None], *args: object, open_seconds: float = OPEN_SECONDS
    ) -> None:
        """Starts a process with `main(*args, orders)`, which answers once it is open."""
        self._orders, there = FORK.Pipe()
        self._process = FORK.Process(target=main, args=(*args, there))
        self._process.start()
        there.close()
        try:
            self._answer(open_seconds)
        except BaseException:
            self.kill()
            raise

    def ask(self, order: str, *args: object, timeout: float) -> Any:
        """Sends the writer's process an order; if it fails or hangs, kills the peer and raises."""
        try:
            self._orders.send((order, args))
            return self._answer(timeout)
        except BaseException:
            self.kill()
            raise

    def _answer(self, timeout: float) -> Any:
        if not self._orders.poll(timeout):
            raise Hung(f"no answer within {timeout:.0f} s")
        try:
            answer = self._orders.recv()
        except EOFError:
            raise Hung("its processes ended") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        """Kills all processes of this peer; nothing else is in their process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or os.getpid() + 1, signal.SIGKILL)
        self._process.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._process.is_alive():
            with suppress(Exception):
                self.ask("close", timeout=10)
            self._process.join(2)
        self.kill()
