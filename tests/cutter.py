"""A TCP proxy in its own process that cuts connections at any byte."""

import random
import select
import socket
import struct
import threading
import time
from contextlib import suppress

from tests.harness import Link
from tests.remotes import HERE

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing a connection resets it
_LEAST, _MOST = 6, 22  # log2 of the bytes after which a connection is cut


def cutting(link: Link, to: tuple[str, int], cuts: int, seed: int) -> int:
    """Role: forwards connections, sometimes with a delay; cuts each after 64 B to 4 MiB, and sends
    some of the data twice, over a second connection. After `cuts` cuts it only forwards."""
    dice, count = random.Random(seed), 0
    with socket.create_server((HERE, 0)) as listener:
        link.tell(listener.getsockname()[1])
        while not link.has_word():
            if not select.select([listener, link.descriptor()], [], [])[0].count(listener):
                continue
            here, _ = listener.accept()
            lives_for = 1 << 62
            if count < cuts:
                lives_for = int(2 ** dice.uniform(_LEAST, _MOST))
            try:
                ends = [here, socket.create_connection(to)]
                if dice.random() < 0.1:
                    ends.append(socket.create_connection(to))
            except OSError:  # the writer is gone
                here.close()
                continue
            thread = threading.Thread(target=_carry, args=(ends, lives_for, dice.random()))
            thread.start()
            if count < cuts:
                thread.join()
                count += 1
                if count == cuts:
                    link.tell("cut enough")
    return count


def _carry(ends: list[socket.socket], lives_for: int, seed: float) -> None:
    """Forwards until `lives_for` bytes went through in total, or both ends have closed."""
    here, there, *twins = ends
    dice = random.Random(seed)
    other = {here: there, there: here}
    speaking = [here, there]
    with suppress(OSError):
        while lives_for > 0 and speaking:
            for one in select.select([*speaking, *twins], [], [])[0]:
                data = one.recv(min(1 << 16, lives_for))
                if one in twins:  # discard answers to the second connection
                    if not data:
                        twins.remove(one)
                    continue
                if not data:
                    speaking.remove(one)
                    other[one].shutdown(socket.SHUT_WR)
                    continue
                if dice.random() < 0.02:
                    time.sleep(dice.uniform(0, 0.05))
                other[one].sendall(data)
                lives_for -= len(data)
                for twin in twins if one is here else ():
                    with suppress(OSError):
                        twin.sendall(data)
    for one in ends:
        if lives_for <= 0:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        one.close()
