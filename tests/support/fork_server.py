"""A process that has imported what test files import, and forks itself for each fresh one.

A new interpreter takes half a second of a processor until it can play a role; this takes some
milliseconds. It has never imported memlane, nor has what it forks. Imports the standard library
only until somebody asks for a process: most files of tests never do.

    python -P fork_server.py DESCRIPTOR
"""

import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 20


def send(there: socket.socket, value: Any, *descriptors: int) -> None:
    """One message; the other side gets duplicates of the descriptors."""
    socket.send_fds(there, [json.dumps(value).encode()], descriptors)


def receive(there: socket.socket, most: int = 0) -> tuple[Any, list[int]]:
    """A message, and as many descriptors; SystemExit if the other side has ended."""
    text, descriptors, _, _ = socket.recv_fds(there, _MOST_BYTES, most)
    if not text:
        raise SystemExit
    return json.loads(text), descriptors


def become(environment: dict[str, str]) -> None:
    """Have this environment from here on."""
    os.environ.clear()
    os.environ.update(environment)


def serve(requests: socket.socket) -> int:
    """Forks a process for each request until the other side ends; returns the link there."""
    while True:
        (folder, environment), descriptors = receive(requests, 4)
        read, write = os.pipe()
        if (between := os.fork()) == 0:
            if pid := os.fork():
                os.write(write, pid.to_bytes(4, sys.byteorder))
                os._exit(0)  # its child becomes one of the process that asked for it
            for each in (requests.detach(), read, write):
                os.close(each)
            for each, number in zip(descriptors[1:], (0, 1, 2), strict=True):
                os.dup2(each, number)
                os.close(each)
            os.chdir(folder)
            become(environment)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return descriptors[0]
        os.waitpid(between, 0)
        send(requests, int.from_bytes(os.read(read, 4), sys.byteorder))
        for each in (*descriptors, read, write):
            os.close(each)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, for the tests
    requests = socket.socket(fileno=int(sys.argv[1]))
    if not requests.recv(1, socket.MSG_PEEK):
        return 0
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401

    from tests.support import processes

    gc.freeze()  # forks that collect would copy all of these objects
    return processes.play_from(serve(requests))


if __name__ == "__main__":
    sys.exit(main())
