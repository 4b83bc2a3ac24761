"""Things that can have a file's name but are not regular files."""

import os
import socket
from collections.abc import Callable
from pathlib import Path


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def directory(path: Path) -> None:
    path.mkdir(0o700)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    path.chmod(0o600)


NO_FILES: tuple[Callable[[Path], None], ...] = (fifo, directory, unix_socket)
