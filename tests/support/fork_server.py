"""A process that has imported what others need, and forks itself for each of them.

A new interpreter takes half a second of a processor until it can play a role, or run a command;
this takes some milliseconds. Imports the standard library only until somebody asks for a process:
most files of tests never do.

    python -P fork_server.py DESCRIPTOR roles|commands
"""

import contextlib
import ctypes
import gc
import io
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


def serve(requests: socket.socket) -> tuple[Any, list[int]]:
    """Forks a process for each request until the other side ends. There, returns what it is for,
    and the descriptors that are not its streams."""
    while True:
        (folder, environment, purpose), descriptors = receive(requests, 4)
        read, write = os.pipe()
        if (between := os.fork()) == 0:
            if pid := os.fork():
                os.write(write, pid.to_bytes(4, sys.byteorder))
                os._exit(0)  # its child becomes one of the process that asked for it
            for each in (requests.detach(), read, write):
                os.close(each)
            for number in range(3):
                os.dup2(descriptors[number], number)
                os.close(descriptors[number])
            os.chdir(folder)
            become(environment)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return purpose, descriptors[3:]
        os.waitpid(between, 0)
        send(requests, int.from_bytes(os.read(read, 4), sys.byteorder))
        for each in (*descriptors, read, write):
            os.close(each)


_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000  # of unshare


def mount_shm(options: str) -> None:
    """Gives this process, which has one thread, a /dev/shm of its own, as `unshare -rm` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_NEW_MOUNTS | _NEW_USER) != 0:
        raise OSError(ctypes.get_errno(), "no namespace")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        Path("/proc/self", name).write_text(text)
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), "no /dev/shm")


def roles(requests: socket.socket) -> int:
    """Plays them. Has never imported memlane."""
    import numpy  # noqa: F401
    import pytest  # noqa: F401

    from tests.support import processes

    gc.freeze()  # forks that collect would copy all of these objects
    own_shm, (link,) = serve(requests)
    if own_shm:
        mount_shm(own_shm)
    return processes.play_from(link)


def commands(requests: socket.socket) -> int:
    """Runs programs that use memlane's command line, as `python -c` does."""
    from memlane.cli.app import app

    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        app(["ls", "--json"])  # which has imported all that most commands need
    gc.freeze()
    (program, *arguments), _ = serve(requests)
    sys.argv = ["-c", *arguments]
    exec(program, {"__name__": "__main__"})
    return 0


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, for the tests
    requests = socket.socket(fileno=int(sys.argv[1]))
    if not requests.recv(1, socket.MSG_PEEK):
        return 0
    sys.path.insert(0, str(Path(__file__).parents[2]))
    return {"roles": roles, "commands": commands}[sys.argv[2]](requests)


if __name__ == "__main__":
    sys.exit(main())
