"""The program behind a `Cable`: it reads frames from one device and writes them to another.

    network stack                  this process                  the other network stack
      TAP device  ── read ──▶  lost?  else due at now + delay  ── write ──▶  TAP device

All it needs from the kernel is /dev/net/tun, so it works without netem; and only frames drawn to
be lost get lost, never because a queue is full. A device exists as long as its descriptor, and so
no longer than this process.

    python carrier.py NAMESPACE NAMESPACE SEED

Its first line of output has the addresses of the two ends. Then it reads `Conditions` as lines of
JSON, and answers each with the number of frames it has carried and lost so far.
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
MOST_BYTES = MTU + 14  # plus the Ethernet header
BATCH = 64
"""Frames read in one direction before the other direction gets its turn."""

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000


class Conditions(NamedTuple):
    """The conditions of frames from now on."""

    is_pulled: bool = False
    """All frames are lost, including those in flight."""
    delay: float = 0.0
    """Seconds from end to end."""
    jitter: float = 0.0
    """Up to this many seconds more, drawn for each frame; no frame overtakes another."""
    loss: float = 0.0
    """The probability that a frame is lost."""


class Way:
    """One direction: frames in order of arrival, each with the time when it is due."""

    def __init__(self, source: int, target: int, chance: random.Random) -> None:
        """Carry nothing yet."""
        self.source = source
        self.carried = self.lost = 0
        self._target = target
        self._chance = chance
        self._frames: deque[tuple[float, bytes]] = deque()

    @property
    def due(self) -> float | None:
        """The time at which the next frame is due; None if there is none."""
        return self._frames[0][0] if self._frames else None

    def take(self, conditions: Conditions) -> None:
        """Read what the device has sent."""
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
        """Write the frames that are due to the other device."""
        now = time.monotonic()
        while self._frames and self._frames[0][0] <= now:
            os.write(self._target, self._frames.popleft()[1])
            self.carried += 1

    def lose_all(self) -> None:
        """Lose all frames in flight."""
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
            # The client waits for each answer, so there is one line at a time.
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
    """Enter a network namespace and create a device there; returns its descriptor and name."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the namespace")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    request = struct.pack("16sH22x", b"cable%d", _IFF_TAP | _IFF_NO_PI)
    name = fcntl.ioctl(device, _TUNSETIFF, request)[:16].rstrip(b"\0").decode()
    return device, name


def main() -> None:
    """Connect two namespaces."""
    # Open descriptors keep the namespaces alive as long as the devices. Open both before entering
    # one: the first path may be /proc/self, our own namespace.
    namespaces = [os.open(path, os.O_RDONLY) for path in sys.argv[1:3]]
    ends = [plug_into(namespace) for namespace in namespaces]
    # The kernel numbers the devices of a namespace, so cables from one host to different hosts get
    # different networks (in 198.18.0.0/15, which RFC 2544 reserves for tests).
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
