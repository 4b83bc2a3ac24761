"""Processes from a fork server (see `fork_server`): fresh ones, as `spawn` makes them, for roles;
and those of commands."""

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from tempfile import TemporaryFile

from tests.support import fork_server
from tests.support.leaks import LASTING
from tests.support.waiting import PATIENCE

MAIN = "from memlane.__main__ import main; main()"
FRESH = (sys.executable,)
_servers: "dict[tuple[str, tuple[str, ...]], ForkServer]" = {}


class ForkServer:
    """The side of the process that asks: what is forked becomes its child."""

    def __init__(self, kind: str, command: Sequence[str]) -> None:
        self.owner = os.getpid()
        # Of `env`: what is forked hands it on to the programs that it runs.
        variables = (word.partition("=") for word in command)
        self._environment = {name: value for name, _, value in variables if name.isidentifier()}
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                [*command, "-P", fork_server.__file__, str(there.fileno()), kind],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
            )
        LASTING.add(self._process.pid)
        atexit.register(self._close)

    def fork(
        self, *descriptors: int, purpose: object = None, environment: Mapping[str, str] = {}
    ) -> int:
        """Starts a process with these streams, and perhaps a link; returns its pid."""
        variables = {**os.environ, **self._environment, **environment}
        request = [os.getcwd(), variables, purpose]
        fork_server.send(self._socket, request, *descriptors)
        pid: int = fork_server.receive(self._socket)[0]
        return pid

    def _close(self) -> None:
        if os.getpid() == self.owner:
            self._socket.shutdown(socket.SHUT_RDWR)  # also the copies of forked processes
            self._process.wait()
        self._socket.close()


def start_fork_server(kind: str, command: Sequence[str] = FRESH) -> None:
    """Has fresh processes of this one forked, by that interpreter. This process must be the reaper
    of orphaned descendants."""
    if this_fork_server(kind, command) is None:
        _servers[kind, tuple(command)] = ForkServer(kind, command)


def this_fork_server(kind: str, command: Sequence[str] = FRESH) -> ForkServer | None:
    """That of this process and that interpreter, if it was started."""
    server = _servers.get((kind, tuple(command)))
    return server if server is not None and server.owner == os.getpid() else None


def run_memlane(
    *arguments: str, program: str = MAIN, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Runs the command, or a program that ends with it, for tests with the fixture `commands`.

    Typer and what it imports cost each new interpreter a third of a second of a processor.
    """
    server = this_fork_server("commands")
    assert server is not None
    with (
        open(os.devnull) as nothing,
        TemporaryFile("w+", errors="backslashreplace") as output,
        TemporaryFile("w+", errors="backslashreplace") as errors,
    ):
        streams = [file.fileno() for file in (nothing, output, errors)]
        pid = server.fork(*streams, purpose=[program, *arguments], environment=environment)
        with open(os.pidfd_open(pid)) as ends:
            in_time = select.select([ends], [], [], PATIENCE)[0]
            if not in_time:
                os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        errors.seek(0)
        done = subprocess.CompletedProcess(arguments, code, output.read(), errors.read())
    assert in_time, f"it did not end within {PATIENCE} s: {done}"
    return done
