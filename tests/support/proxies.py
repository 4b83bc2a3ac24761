"""TCP proxies between a reader and its writer: one that a test cuts, one that cuts at any byte,
and one that records.
"""

import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from memlane import Handle
from tests.support import Link
from tests.support.remote_queues import HERE, address_of


class Cable:
    """A TCP proxy that a test can cut: connections through it end at once.

    If one side shuts down its direction, that is forwarded, and the other side can still send.

    Attributes:
        tries: how many connections have been made to it, also while it is cut.
    """

    def __init__(self, handle: Handle) -> None:
        self.tries = 0
        self._to = address_of(handle)
        self._listener = socket.create_server((HERE, 0))
        self._port = self._listener.getsockname()[1]
        self.handle = replace(handle, remote_subscribe_addr=f"tcp://{HERE}:{self._port}")
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._silent: set[socket.socket] = set()  # these have sent everything
        self._is_cut = False
        self._lock = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def cut(self, *, mend: bool = False) -> None:
        """End all connections; refuse new ones, or with `mend` accept them again."""
        with self._lock:
            self._is_cut = not mend
            for end in list(self._pairs):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Accept connections again."""
        with self._lock:
            self._is_cut = False

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Ends all connections; refuses new ones for the block, as if nobody listened."""
        self.cut()
        self._stop()
        self._listener.close()
        yield
        self._listener = socket.create_server((HERE, self._port))
        self._is_cut = self._closing = False
        self._woken.recv(1)
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        self._closing = True
        self._wake.send(b"x")
        self._thread.join()

    def close(self) -> None:
        self._stop()
        for end in (self._listener, self._wake, self._woken, *self._pairs):
            end.close()

    def __enter__(self) -> "Cable":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _carry(self) -> None:
        while not self._closing:
            speaking = self._pairs.keys() - self._silent
            ready, _, _ = select.select([self._listener, self._woken, *speaking], [], [])
            with self._lock:
                for end in ready:
                    if end is self._listener:
                        self._accept()
                    elif end in self._pairs:
                        self._pass_on(end)

    def _accept(self) -> None:
        here, _ = self._listener.accept()
        self.tries += 1
        if self._is_cut:
            here.close()
            return
        try:
            there = socket.create_connection(self._to)
        except ConnectionRefusedError:  # the writer is gone
            here.close()
            return
        self._pairs[here], self._pairs[there] = there, here

    def _pass_on(self, end: socket.socket) -> None:
        other = self._pairs[end]
        try:
            data = end.recv(1 << 16)
            if data:
                other.sendall(data)
                return
            self._silent.add(end)
            other.shutdown(socket.SHUT_WR)
            if other not in self._silent:
                return
        except OSError:  # one of them was reset
            pass
        for one in (end, other):
            del self._pairs[one]
            self._silent.discard(one)
            one.close()


_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing a connection resets it
_LEAST, _MOST = 6, 22  # log2 of the bytes after which a connection is cut


def cutting(link: Link, to: tuple[str, int], cuts: int, seed: int) -> int:
    """Role: forwards connections, sometimes with a delay; cuts each after 64 B to 4 MiB, and sends
    some of the data twice, over a second connection. After `cuts` cuts it only forwards."""
    dice, count = random.Random(seed), 0
    with socket.create_server((HERE, 0)) as listener:
        link.tell(listener.getsockname()[1])
        while not link.has_word():
            speaking: list[socket.socket | int] = [listener, link.descriptor()]
            if listener not in select.select(speaking, [], [])[0]:
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


@contextmanager
def recording(handle: Handle) -> Iterator[tuple[Handle, Callable[[], bytes]]]:
    """A proxy to the writer that records everything a reader sends."""
    said: list[bytes] = []
    with socket.create_server((HERE, 0)) as listener:
        there = socket.create_connection(address_of(handle))

        def carry(source: socket.socket, sink: socket.socket, kept: list[bytes]) -> None:
            with suppress(OSError):
                while part := source.recv(1 << 16):
                    kept.append(part)
                    sink.sendall(part)
            with suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

        def accept() -> None:
            here, _ = listener.accept()
            with here, there:
                back = threading.Thread(target=carry, args=(there, here, []))
                back.start()
                carry(here, there, said)
                back.join()

        thread = threading.Thread(target=accept)
        thread.start()
        where = f"tcp://{HERE}:{listener.getsockname()[1]}"
        yield Handle(**{**vars(handle), "remote_subscribe_addr": where}), lambda: b"".join(said)
        thread.join()
