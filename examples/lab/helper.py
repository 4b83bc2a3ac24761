"""A process that holds something for this one."""

import subprocess
from typing import Self


class Refused(Exception):
    """This machine does not let us have such a thing, and why."""


class Helper:
    """It says a line when it has what it is to hold, and ends when its input does.

    Its input ends with this process, however that ends.
    """

    def __init__(self, *command: str) -> None:
        """Start it, and wait for its first line, the `greeting`."""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is not for it
        )
        self.greeting = self._hear()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def ask(self, line: str) -> str:
        """Say a line, and return what it answers."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self._hear()

    def close(self) -> None:
        """End it, and with it what it holds. Idempotent."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        """Return it, which is running already."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.close()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            _, complaint = self._process.communicate()
            raise Refused(complaint.strip() or f"process {self.pid} was killed")
        return line
