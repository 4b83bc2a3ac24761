"""The folder of the sockets: which one it is, whom it must belong to, and how a name in it is
claimed, reached and given up. Everything goes through one descriptor of the folder, so what was
checked is what is used."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from memlane._base.labels import checked_label
from memlane._base.naming import shown
from memlane._doors.descriptors import Descriptor
from memlane._importing import fork_waits
from memlane.errors import (
    InvalidType,
    MemlaneError,
    NameTaken,
    SegmentRefused,
    foreign_segment,
    system_fault,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

_SUFFIX = ".sock"
_NEW = ".new"  # no name's: it lacks the suffix
_BACKLOG = 4096
_CREDENTIALS = struct.Struct("iII")
_NOBODY = 0xFFFFFFFF  # the user of a socket that is not connected
_PER_USER = "/tmp/memlane-{}"


class Peer(NamedTuple):
    """The other side of a connection, as the kernel knows it."""

    pid: int  # 0: of another pid namespace
    user: int


class Line(NamedTuple):
    """A connection."""

    file: Descriptor
    peer: Peer


def peer_of(connection: socket.socket) -> Peer:
    """Returns who made the connection, or who listens at its other side."""
    size = _CREDENTIALS.size
    pid, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return Peer(pid, user)


def served_name(name: object) -> str:
    """Returns `name`, if something can be served under it."""
    if name is None:
        raise InvalidType("a name is needed, not None")
    return checked_label(name)


def folder_path() -> str:
    """Returns the folder of this user's sockets."""
    if path := os.environ.get("MEMLANE_RUN"):
        return os.path.abspath(path)
    run = os.environ.get("XDG_RUNTIME_DIR")
    if run:  # not that of the user who called sudo
        with suppress(OSError):
            if os.stat(run).st_uid == os.geteuid():
                return os.path.join(run, "memlane")
    return _PER_USER.format(os.geteuid())


def new_listener() -> Descriptor:
    """Returns a socket for `Folder.claim`. Raises OSError."""
    return Descriptor(lambda: socket.socket(*_KIND).detach())


class Folder:
    """The folder, open."""

    def __init__(self, path: str | None = None) -> None:
        """Creates the folder if there is none.

        Raises:
            SegmentRefused: it is another user's, or others may enter it, or it is a link.
            SystemFault: the system refuses it.
        """
        self.path = path = folder_path() if path is None else path
        self.user = os.geteuid()
        try:
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
            how = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = Descriptor(lambda: os.open(path, how))
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise SegmentRefused(
                    f"{shown(path)} is a link or no folder; remove it, or set MEMLANE_RUN to a "
                    f"folder of yours"
                ) from None
            raise system_fault(error.errno or 0, f"cannot open {shown(path)}") from None
        facts = os.fstat(self._file.fileno())
        if facts.st_uid != self.user:
            raise foreign_segment(shown(path), facts.st_uid, "set MEMLANE_RUN to a folder of yours")
        if stat.S_IMODE(facts.st_mode) & 0o077:
            raise SegmentRefused(
                f"{shown(path)} has mode {stat.S_IMODE(facts.st_mode):o}: others could serve or "
                f"read under its names; `chmod 700` it, or set MEMLANE_RUN to another folder"
            )

    @classmethod
    def existing(cls) -> Self | None:
        """Returns the folder of this user's sockets, if there is one that it can use."""
        path = folder_path()
        with suppress(MemlaneError):
            return cls(path) if os.path.lexists(path) else None
        return None

    def address(self, file: str = "") -> str:
        """Returns a path to the folder, or a file in it, that no change of names leads elsewhere;
        it is short enough for a socket."""
        return f"/proc/self/fd/{self._file.fileno()}/{file}"

    def claim(self, name: str, made: Descriptor, note: Callable[[int], None]) -> None:
        """Makes `made`, of `new_listener`, listen under the name; replaces one whose process has
        died. Calls `note` with the inode of its file before that has the name.

        Raises:
            NameTaken: a living process serves under it.
            SegmentRefused: a file of that name is not a socket.
            SystemFault: the system refuses it.
        """
        try:
            with self._locked():
                pid = self.server_of(name)
                if pid is not None:
                    raise NameTaken(name, pid)
                # A copy: nothing that a signal handler may interrupt closes the descriptor itself.
                with fork_waits, socket.fromfd(made.fileno(), *_KIND) as listener:
                    self._listen(listener, _file_of(name), note)
        except OSError as error:
            if isinstance(error, (NameTaken, SegmentRefused)):
                raise
            path = self.path_of(name)
            raise system_fault(error.errno or 0, f"cannot serve under {path}") from None

    def _listen(self, listener: socket.socket, file: str, note: Callable[[int], None]) -> None:
        """The name comes into being with a socket that accepts already: who waits for it connects
        at once."""
        new = self.address(_NEW)
        with suppress(FileNotFoundError):
            os.unlink(new)  # of a process that was killed here
        try:
            listener.bind(new)
            os.chmod(new, 0o600)
            listener.listen(_BACKLOG)
            note(os.stat(new).st_ino)
            os.rename(new, self.address(file))
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(new)
            raise

    def give_up(self, name: str, inode: int) -> None:
        """Removes the name, if it is that socket's. Raises OSError."""
        address = self.address(_file_of(name))
        with suppress(FileNotFoundError):
            if os.stat(address, follow_symlinks=False).st_ino == inode:
                os.unlink(address)

    def server_of(self, name: str) -> int | None:
        """Returns the pid of the living process that serves under the name, 0 if it is unknown, and
        None if there is none. Raises as `connect`."""
        try:
            line = self.connect(name, 0)
        except BlockingIOError:  # too many wait for it already
            return 0
        if line is None:
            return None
        line.file.close()
        return line.peer.pid

    def names(self) -> dict[str, int | None]:
        """Returns what `server_of` returns for each name; those that it refuses are left out.
        Raises OSError."""
        found = {}
        for file in sorted(os.listdir(self._file.fileno())):
            if file.endswith(_SUFFIX):
                with suppress(MemlaneError):
                    found[_name_of(file)] = self.server_of(_name_of(file))
        return found

    def remove_dead(self) -> list[str]:
        """Removes the names whose processes have died, and returns them. Raises OSError."""
        with self._locked():
            dead = [name for name, pid in self.names().items() if pid is None]
            for name in dead:
                os.unlink(self.address(_file_of(name)))
            return dead

    def connect(self, name: str, seconds: float) -> Line | None:
        """Returns a connection to the process that serves under the name; None if none does.

        Raises:
            BlockingIOError: for so many seconds it has not accepted those who came before.
            SegmentRefused: the file is not a socket of memlane's, or another user listens.
            SystemFault: the system refuses it.
        """
        address, path = self.address(_file_of(name)), self.path_of(name)
        try:
            if not stat.S_ISSOCK(os.stat(address, follow_symlinks=False).st_mode):
                raise SegmentRefused(f"{path} is no socket; remove it")
            with socket.socket(*_KIND) as connection:
                span = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)
                connection.setblocking(seconds > 0)
                connection.connect(address)
                connection.setblocking(False)
                peer = peer_of(connection)
                line = Line(Descriptor(connection.detach), peer)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except (BlockingIOError, SegmentRefused):
            raise
        except OSError as error:
            if error.errno == errno.EPROTOTYPE:
                raise SegmentRefused(f"{path} is no socket of memlane's; remove it") from None
            raise system_fault(error.errno or 0, f"cannot connect to {path}") from None
        if peer.user == _NOBODY:
            raise BlockingIOError(errno.EAGAIN, "a signal has interrupted the connection")
        if peer.user != self.user:
            raise foreign_segment(path, peer.user, "end that process")
        return line

    def path_of(self, name: str) -> str:
        """Returns the socket's path, for texts."""
        return shown(os.path.join(self.path, _file_of(name)))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else claims or removes a name meanwhile; nobody waits with it held."""
        fcntl.flock(self._file.fileno(), fcntl.LOCK_EX)
        try:
            yield
        finally:  # explicitly: a child that was forked meanwhile may share the description
            fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)


_KIND = socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK


def _file_of(name: str) -> str:
    return name.replace("/", "%") + _SUFFIX


def _name_of(file: str) -> str:
    return file.removesuffix(_SUFFIX).replace("%", "/")
