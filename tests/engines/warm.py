"""A process that has imported torch, which takes three seconds, and forks itself for each scenario.

The fork server of a scenario's own processes is forked from it, too, before anything else has
happened there: `multiprocessing` gets it in place of a new interpreter.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from multiprocessing import util

from tests.support.fork_server import become, receive, send
from tests.support.leaks import LASTING

_server: Server | None = None


class Server:
    """The test's side: one scenario at a time."""

    def __init__(self) -> None:
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.warm", str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # what is written there is buffered as in a scenario
            )
        LASTING.add(self._process.pid)
        atexit.register(self.close)

    def close(self) -> None:
        """Ends it."""
        self._socket.shutdown(socket.SHUT_RDWR)  # also the copies of forked processes
        self._process.communicate()
        self._socket.close()

    def run(self, arguments: Sequence[str], env: dict[str, str], timeout: float) -> tuple[int, str]:
        """Plays scenarios; returns their process's exit status and what it and those that it has
        started wrote to both streams. Kills all of them after `timeout` seconds."""
        read, write = os.pipe()
        with open(read, encoding="utf-8", errors="replace") as output:
            send(self._socket, [list(arguments), env], write)
            os.close(write)
            pid = self._hear(None)
            try:
                status = self._hear(timeout)
            except BaseException:  # it hangs, or the test is interrupted
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                self._hear(None)  # the status of what was killed
                raise
            return status, output.read()  # once those that it has started have ended, too

    def _hear(self, timeout: float | None) -> int:
        self._socket.settimeout(timeout)
        number: int = receive(self._socket)[0]
        return number


def server() -> Server:
    """That of this process."""
    global _server
    if _server is None:
        _server = Server()
    return _server


def serve(tests: socket.socket) -> list[str]:
    """Forks a process for each scenario; returns the arguments, there."""
    while True:
        (arguments, environment), (output,) = receive(tests, 1)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            tests.close()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            become(environment)
            return list(arguments)
        os.close(output)
        send(tests, pid)
        send(tests, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def keep_fork_server() -> None:
    """Forks the process that will be this one's fork server, if there will be one."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        here.close()
        (command, numbers, environment), descriptors = receive(there, 16)
        there.close()
        free = 1 + max((*descriptors, *numbers))  # where none is in another's way
        spares = [fcntl(each, F_DUPFD_CLOEXEC, free) for each in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
        for spare, number in zip(spares, numbers, strict=True):
            os.dup2(spare, number, inheritable=False)
            os.close(spare)
        become(environment)
        exec(command, {})
        raise SystemExit
    there.close()
    new_interpreter = util.spawnv_passfds

    def start(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in arguments[-1]:
            return new_interpreter(path, arguments, descriptors)
        numbers = [int(each) for each in descriptors]
        send(here, [arguments[-1], numbers, dict(os.environ)], *numbers)
        here.close()
        util.spawnv_passfds = new_interpreter
        return pid

    util.spawnv_passfds = start


if __name__ == "__main__":
    import torch  # noqa: F401

    from tests.engines.__main__ import play

    gc.freeze()  # or each fork that collects, or ends, copies all of torch's objects: half a second
    channel = socket.socket(fileno=int(sys.argv[1]))
    arguments = serve(channel)
    keep_fork_server()
    play(arguments)
