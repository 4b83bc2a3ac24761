"""A network of a test's own: a host beside this one, and a cable that can be pulled."""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

_count = itertools.count()


@cache
def network_refusal() -> str:
    """Why this machine does not let a test have a network of its own; empty if it does."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None:
        return "there is no ip command (iproute2)"
    try:
        with neighbour():
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces are refused: {error.stderr.strip()}"


@dataclass(frozen=True)
class Neighbour:
    """Another network stack, connected to this one by a cable.

    Attributes:
        here: the address of this side.
        there: that of the other.
        command: an interpreter that runs there.
    """

    name: str
    here: str
    there: str
    command: tuple[str, ...]

    def pull(self) -> None:
        """Nothing goes through the cable any more; neither side is told."""
        _ip("link", "set", f"{self.name}a", "down")

    def plug(self) -> None:
        """All goes through again."""
        _ip("link", "set", f"{self.name}a", "up")

    def lose(self, percent: float, delay_ms: int = 0) -> None:
        """So much of what leaves this side is lost, the rest late; on a kernel without netem what
        does not fit a short queue is lost instead."""
        device = ("qdisc", "replace", "dev", f"{self.name}a", "root")
        netem = ("netem", "loss", f"{percent}%", "delay", f"{delay_ms}ms")
        try:
            _run("tc", *device, *netem)
        except subprocess.CalledProcessError:
            _run("tc", *device, *["tbf", "rate", "200mbit", "burst", "32kb", "limit", "60kb"])


@contextmanager
def neighbour() -> Iterator[Neighbour]:
    """One that is gone after the block, with its cable."""
    # Name and address are free again only a while after the end. Names have 15 characters at most.
    count = next(_count) % 50
    name = f"ml{os.getpid() % 1_000_000}n{count}"
    net = f"10.{200 + count}.{os.getpid() % 250}"
    one = Neighbour(name, f"{net}.1", f"{net}.2", ("ip", "netns", "exec", name, sys.executable))
    _ip("netns", "add", name)
    try:
        _ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b")
        _ip("link", "set", f"{name}b", "netns", name)
        _ip("addr", "add", f"{one.here}/24", "dev", f"{name}a")
        _ip("link", "set", f"{name}a", "up")
        _ip("-n", name, "addr", "add", f"{one.there}/24", "dev", f"{name}b")
        _ip("-n", name, "link", "set", f"{name}b", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield one
    finally:
        _ip("netns", "del", name)  # its end of the cable goes along, and so the other


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
