"""A child process that holds a resource for this one."""

import subprocess
from typing import Self


class Refused(Exception):
    """This machine refuses the resource; the message says why."""


class Helper:
    """It prints a line once it holds its resource, and ends when its stdin does.

    Its stdin ends with this process, however that ends.
    """

    def __init__(self, *command: str) -> None:
        """Start it, and wait for its first line, the `greeting`."""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # not interrupted by Ctrl-C
        )
        self.greeting = self._hear()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, line: str) -> str:
        """Send a line, and return its answer."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self._hear()

    def close(self) -> None:
        """Kill it, which frees what it holds. Idempotent."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        """Return the helper, which is already running."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it."""
        self.close()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            _, complaint = self._process.communicate()
            raise Refused(complaint.strip() or f"process {self.pid} was killed")
        return line
