"""The program behind a `Cable`: it takes frames out of one device and puts them into another.

    network stack                  this process                  the other network stack
      TAP device  ── read ──▶  lost?  else due at now + delay  ── write ──▶  TAP device

It needs nothing of the kernel but /dev/net/tun, so it works where there is no netem; and what gets
lost is what was drawn, not what a queue had no room for. A device lives as long as its descriptor,
and so no longer than this process.

    python carrier.py NAMESPACE NAMESPACE SEED

Its first line says the addresses of the two ends. Then it takes `Conditions` as lines of JSON, and
answers each with how many frames it has carried and lost so far.
"""

import ctypes
import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from typing import NamedTuple

MTU = 9000
MOST_BYTES = MTU + 14  # and the Ethernet header
BATCH = 64
"""Frames taken in one direction before the other has its turn."""

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000


class Conditions(NamedTuple):
    """What happens to frames from now on."""

    is_pulled: bool = False
    """All are lost, also those on their way."""
    delay: float = 0.0
    """Seconds from end to end."""
    jitter: float = 0.0
    """Up to so many seconds more, drawn for each frame; yet none overtakes another."""
    loss: float = 0.0
    """The chance of each frame to be lost."""


class Way:
    """One direction: frames in the order in which they came, each with the time when it is due."""

    def __init__(self, source: int, target: int, chance: random.Random) -> None:
        """Carry nothing yet."""
        self.source = source
        self.carried = self.lost = 0
        self._target = target
        self._chance = chance
        self._frames: deque[tuple[float, bytes]] = deque()

    @property
    def due(self) -> float | None:
        """When the next frame is to arrive."""
        return self._frames[0][0] if self._frames else None

    def take(self, conditions: Conditions) -> None:
        """Take what the device has sent."""
        for _ in range(BATCH):
            try:
                frame = os.read(self.source, MOST_BYTES)
            except BlockingIOError:
                return
            if conditions.is_pulled or self._chance.random() < conditions.loss:
                self.lost += 1
                continue
            late = conditions.delay + self._chance.random() * conditions.jitter
            due = time.monotonic() + late
            self._frames.append((max(due, self._frames[-1][0]) if self._frames else due, frame))

    def deliver(self) -> None:
        """Let the other device receive what is due."""
        now = time.monotonic()
        while self._frames and self._frames[0][0] <= now:
            os.write(self._target, self._frames.popleft()[1])
            self.carried += 1

    def lose_all(self) -> None:
        """Lose what is on its way."""
        self.lost += len(self._frames)
        self._frames.clear()


def carry(ways: list[Way]) -> None:
    """Carry frames until the end of the input."""
    conditions = Conditions()
    while True:
        dues = [way.due for way in ways if way.due is not None]
        rest = max(0.0, min(dues) - time.monotonic()) if dues else None
        ready, _, _ = select.select([0, *(way.source for way in ways)], [], [], rest)
        if 0 in ready:
            # Whoever asks waits for the answer, so there is one line at a time.
            if not (line := os.read(0, 4096)):
                return
            conditions = Conditions(**json.loads(line))
            if conditions.is_pulled:
                for way in ways:
                    way.lose_all()
            print(sum(way.carried for way in ways), sum(way.lost for way in ways), flush=True)
        for way in ways:
            if way.source in ready:
                way.take(conditions)
            way.deliver()


def plug_into(namespace: int) -> tuple[int, str]:
    """Go into a network namespace and make a device there: its descriptor and its name."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the namespace")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    request = struct.pack("16sH22x", b"cable%d", _IFF_TAP | _IFF_NO_PI)
    name = fcntl.ioctl(device, _TUNSETIFF, request)[:16].rstrip(b"\0").decode()
    return device, name


def main() -> None:
    """Connect two namespaces."""
    # They live at least as long as the devices in them, then. The first may be our own: so both are
    # opened before one is entered.
    namespaces = [os.open(path, os.O_RDONLY) for path in sys.argv[1:3]]
    ends = [plug_into(namespace) for namespace in namespaces]
    # The kernel numbers the devices of a namespace. So the larger number is of no other cable here,
    # and this network (RFC 2544: for tests) of nobody else.
    network = f"198.18.{max(int(name.removeprefix('cable')) for _, name in ends)}"
    for place, (namespace, (_, name)) in enumerate(zip(namespaces, ends, strict=True), start=1):
        for words in (
            ("addr", "add", f"{network}.{place}/24", "dev", name),
            ("link", "set", name, "mtu", str(MTU), "up"),
        ):
            inside = ("nsenter", f"--net=/proc/self/fd/{namespace}", "ip", *words)
            subprocess.run(inside, check=True, pass_fds=[namespace])
    (one, _), (other, _) = ends
    seed = sys.argv[3]
    ways = [Way(one, other, random.Random(f"{seed}a")), Way(other, one, random.Random(f"{seed}b"))]
    print(f"{network}.1 {network}.2", flush=True)
    carry(ways)


if __name__ == "__main__":
    try:
        main()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"no cable: {error}")
