"""The door of what is served: a thread that accepts callers and sends them what `admission`
decides. It has no timers while nobody is there, and does nothing on a message's path."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from contextlib import suppress
from math import ceil, inf
from typing import TYPE_CHECKING

from memlane._base.descriptors import new_event
from memlane._base.diagnosis import warn
from memlane._base.lifetime import Owned, start_thread, undone_by
from memlane._doors.admission import MOST_BYTES, Admission
from memlane._doors.descriptors import Descriptor
from memlane._doors.folder import Folder, new_listener, peer_of, served_name
from memlane._importing import fork_waits
from memlane._native import fork_generation
from memlane.errors import Closed, WrongProcess

if TYPE_CHECKING:
    from memlane._doors.admission import Host, Reply

MOST_CALLERS = 64  # beside those who wait for a place
_PAUSE = 0.1  # seconds without accepting, when the process has no descriptor left
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class Door(Owned):
    """Serves `host` under a name until it is closed."""

    _instead_of_pickling = "open what it serves by its name"

    def __init__(self, name: str, host: Host) -> None:
        """Raises as `Folder.claim`, and SystemFault if there is no thread left."""
        self._server = server = _Server(served_name(name), host)
        self._own(server.close)
        with undone_by(self.close):
            server.open()

    def close(self) -> None:
        """Gives the name up: nobody else gets in. Idempotent, from any thread."""
        self._server.close()
        self._disown()


class _Server:
    """The thread, and what it owns. The thread does not keep the door: that ends with the last
    reference to it."""

    def __init__(self, name: str, host: Host) -> None:
        self._name = name
        self._made_in = fork_generation()
        self._folder = Folder()
        self._event = Descriptor(new_event)
        self._admission = Admission(name, host)
        self._listener = new_listener()
        self._inode = 0  # of the socket's file, from just before that has the name
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="memlane-door", daemon=True)

    def open(self) -> None:
        self._folder.claim(self._name, self._listener, self._note)
        start_thread(self._thread)

    def _note(self, inode: int) -> None:
        self._inode = inode

    def close(self) -> None:
        if fork_generation() != self._made_in:
            return
        self._is_closed = True
        self._give_up()
        os.eventfd_write(self._event.fileno(), 1)
        # Not in the thread itself, where garbage may be collected; nor where it is kept waiting.
        # One that has not begun ends as it begins, and closes the socket, or that goes with it.
        is_here = threading.current_thread() is self._thread
        if self._thread.is_alive() and not is_here and not fork_waits.is_mine():
            self._thread.join()

    def _give_up(self) -> None:
        """Removes the name first: while the socket listens nobody replaces it."""
        if not self._inode:
            return
        try:
            self._folder.give_up(self._name, self._inode)
        except OSError as error:  # it has become another user: the next server replaces it
            warn("the name %s stays behind: %s", self._folder.path_of(self._name), error)
        self._inode = 0  # last: a close() that a signal handler has interrupted is repeated

    # The thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        lines: dict[int, Descriptor] = {}
        listener = socket.socket(fileno=self._listener.fileno())
        try:
            with suppress(Closed, WrongProcess):
                self._serve(listener, lines)
        finally:
            listener.detach()
            self._give_up()
            self._listener.close()
            for line in lines.values():
                line.close()

    def _serve(self, listener: socket.socket, lines: dict[int, Descriptor]) -> None:
        poller, accepts_again = select.poll(), 0.0
        poller.register(self._event.fileno(), select.POLLIN)
        while not self._is_closed:
            now = time.monotonic()
            until = self._admission.due()
            if self._admission.arriving >= MOST_CALLERS:
                poller.register(listener.fileno(), 0)
            elif now < accepts_again:
                poller.register(listener.fileno(), 0)
                until = min(until, accepts_again)
            else:
                poller.register(listener.fileno(), select.POLLIN)
            wait = None if until == inf else ceil(1000 * max(0.0, until - now))
            for number, _ in poller.poll(wait):
                if number == listener.fileno():
                    try:
                        line = self._accept(listener)
                    except (BlockingIOError, ConnectionAbortedError):
                        continue  # it has left
                    except OSError as error:
                        if error.errno not in _OUT_OF_FILES:
                            raise
                        accepts_again = time.monotonic() + _PAUSE
                        continue
                    if line is not None:
                        lines[line.fileno()] = line
                        poller.register(line.fileno(), select.POLLIN)
                        self._admission.comes(line.fileno(), time.monotonic())
                elif number in lines and not self._receive(number):
                    self._end(number, lines, poller)
            for reply in self._admission.turn(time.monotonic()):
                if not _send(reply) or reply.is_last:
                    self._end(reply.caller, lines, poller)

    def _end(self, number: int, lines: dict[int, Descriptor], poller: select.poll) -> None:
        self._admission.leaves(number)
        poller.unregister(number)
        lines.pop(number).close()

    def _accept(self, listener: socket.socket) -> Descriptor | None:
        """Returns a connection, or None if it was another user's. Raises OSError."""
        user = -1

        def accept() -> int:
            nonlocal user
            connection, _ = listener.accept()
            connection.setblocking(False)
            user = peer_of(connection).user
            return connection.detach()

        line = Descriptor(accept)
        if user == self._folder.user:
            return line
        line.close()
        return None

    def _receive(self, number: int) -> bool:
        """Returns whether the caller is still there."""
        try:
            packet = os.read(number, MOST_BYTES + 1)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not 0 < len(packet) <= MOST_BYTES:
            return False
        self._admission.asks(number, packet, time.monotonic())
        return True


def _send(reply: Reply) -> bool:
    """Returns whether the packet has reached the caller's socket, which has room for all that one
    who behaves is sent."""
    if reply.packet is None:
        return False
    with suppress(OSError):
        os.write(reply.caller, reply.packet)
        return True
    return False
