"""A host: a network stack and a /dev/shm of its own."""

import os
import shutil

from .cable import Cable
from .helper import Helper, Refused

_HOLD = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm && ip link set lo up && echo ready && exec cat"


class Host(Helper):
    """A host other than this process's own, until the end of the `with` block.

    Processes that run on it keep it alive; end them first.
    """

    def __init__(self) -> None:
        """Start it, with only a loopback device; raises `Refused`."""
        super().__init__("unshare", "--net", "--mount", "sh", "-c", _HOLD)
        self.command = ("nsenter", f"--target={self.pid}", "--net", "--mount", "--wd", "--")
        """Prefix of a command to run there, in this process's working directory at the start."""


def refusal() -> str:
    """Return why this machine refuses hosts or cables; empty if it allows both."""
    for command in ("unshare", "nsenter", "ip"):
        if shutil.which(command) is None:
            return f"there is no {command} command"
    try:
        host = Host()
    except Refused as error:
        if os.geteuid() != 0:
            return "only root can make network namespaces"
        return f"network namespaces are refused: {error}"
    try:
        with host, Cable(None, host):
            return ""
    except Refused as error:
        return f"cables are refused: {error}"
