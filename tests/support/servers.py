"""Servers that tests start: stopped, killed, and started again."""

import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any, Self

from tests.support.waiting import until


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port: int = own.getsockname()[1]
        return port


def _is_stopped(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return True


class Server:
    """A process that listens on a port of its own, until the end of the block."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    def launch(self) -> "subprocess.Popen[Any]":
        raise NotImplementedError

    def connect(self) -> socket.socket:
        """Raises OSError until it listens."""
        return socket.create_connection(("127.0.0.1", self.port), 1)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        self._process = self.launch()
        until(self._listens, f"{self._process.args!r} listens", pause=0.01)

    def _listens(self) -> bool:
        if self._process.poll() is not None:  # another process has taken the port meanwhile
            self.port = free_port()
            self._process = self.launch()
        try:
            self.connect().close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        """Returns once every thread has stopped: until then the server may answer."""
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: all(map(_is_stopped, Path(f"/proc/{self.pid}/task").iterdir())), "stopped")

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
