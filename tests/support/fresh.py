"""Fresh processes, as `spawn` makes them, from a fork server: see `fork_server`."""

import atexit
import os
import socket
import subprocess
import sys

from tests.support import fork_server
from tests.support.leaks import LASTING

_server: "ForkServer | None" = None


class ForkServer:
    """The side of the process that asks: what is forked becomes its child."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-P", fork_server.__file__, str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
            )
        LASTING.add(self._process.pid)
        atexit.register(self._close)

    def fork(self, link: int) -> int:
        """Starts a process that has this link, and the streams of this one; returns its pid."""
        fork_server.send(self._socket, [os.getcwd(), dict(os.environ)], link, 0, 1, 2)
        pid: int = fork_server.receive(self._socket)[0]
        return pid

    def _close(self) -> None:
        if os.getpid() == self.owner:
            self._socket.shutdown(socket.SHUT_RDWR)  # also the copies of forked processes
            self._process.wait()
        self._socket.close()


def start_fork_server() -> None:
    """Has fresh processes of this one forked. It must be the reaper of orphaned descendants."""
    global _server
    _server = ForkServer()


def this_fork_server() -> ForkServer | None:
    """That of this process."""
    return _server if _server is not None and _server.owner == os.getpid() else None
