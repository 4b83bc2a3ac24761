"""Hosts on one machine: network stacks with a /dev/shm each, and cables between them.

Needs root, or a user and a network namespace of one's own, as `tests/own_shm.sh` makes them.

    with Host() as other, Cable(None, other) as cable:  # None: the host that this process is on
        here, there = cable.addresses
        subprocess.run([*other.command, "python", "-m", "server", there])
        cable.set(delay_ms=2, loss_percent=1)
        cable.pull()

To programs these are two machines: they share neither addresses nor memory, and what they say to
each other takes its time, or gets lost. What they do share is the kernel, with its clock and its
pids. Nothing of it has a name that could be left over: processes hold it, and they end with the one
that started them, however that ends.
"""

from .cable import Cable
from .helper import Refused
from .host import Host, refusal

__all__ = ["Cable", "Host", "Refused", "refusal"]
