"""Hosts on one machine: network stacks with a /dev/shm each, and cables between them.

Needs root, or a user and a network namespace of your own, as `tests/own_shm.sh` creates them.

    with Host() as other, Cable(None, other) as cable:  # None: the host that this process is on
        here, there = cable.addresses
        subprocess.run([*other.command, "python", "-m", "server", there])
        cable.set(delay_ms=2, loss_percent=1)
        cable.pull()

To programs these are two machines: they share neither addresses nor memory, and their traffic can
be delayed or lost. They do share the kernel, with its clock and its pids. Nothing has a name that
could be left behind: helper processes hold everything, and they end with the process that started
them, however that ends.
"""

from .cable import Cable
from .helper import Refused
from .host import Host, refusal

__all__ = ["Cable", "Host", "Refused", "refusal"]
