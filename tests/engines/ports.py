"""Ports for what engines' groups must be told before they exist."""

import random
import socket
from contextlib import ExitStack


def free_ports(count: int) -> int:
    """The first of so many neighbours that nobody uses.

    Below those that the system gives out by itself: until it is used, a port that came from there
    could be given to a test that runs beside.
    """
    while True:
        first = random.randrange(20000, 32000)
        try:
            with ExitStack() as held:
                for port in range(first, first + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
        except OSError:
            continue
