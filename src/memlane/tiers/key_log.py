"""The keys of a disk tier's blocks, in a file beside them: the blocks themselves have only digests.

The file is a hint: it may have keys of blocks that are gone, and lack the last ones after a kill.
Like the tier's other files it is this user's, and nobody else can read it.
It is written by a thread of its own, because the disk may not answer.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterable
from contextlib import suppress
from queue import SimpleQueue

from memlane._base.diagnosis import warn
from memlane._base.lifetime import start_thread

_MAGIC = b"memlane keys 1\n"
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class KeyLog:
    """Appends keys to a file."""

    def __init__(self, path: str) -> None:
        """Raises SystemFault: no thread can be started."""
        self._path = path
        self._work: SimpleQueue[tuple[bytes, bool] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="memlane-keys", daemon=True)
        start_thread(self._thread)

    def read(self) -> list[bytes]:
        """Returns the keys, each once, up to where the file is damaged. Call it first."""
        try:
            with open(_opened(self._path), "rb") as file:
                found = file.read()
        except OSError:
            return []
        return _keys_in(found)

    def append(self, keys: Iterable[bytes]) -> None:
        self._write(keys, False)

    def replace(self, keys: Iterable[bytes]) -> None:
        """Leaves these keys and no others."""
        self._write(keys, True)

    def end(self) -> None:
        """Ends the thread once all is written."""
        self._work.put(None)

    def close(self, timeout: float) -> None:
        """Waits until all is written, but not for a disk that does not answer."""
        self.end()
        self._thread.join(timeout)

    def _write(self, keys: Iterable[bytes], is_new: bool) -> None:
        records = b"".join(bytes([len(key)]) + key for key in keys)
        if records or is_new:
            self._work.put((records, is_new))

    def _run(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                records, is_new = work
                with open(_opened(self._path, os.O_APPEND | os.O_CREAT), "ab") as file:
                    if not is_new:
                        file.write(records)
                if is_new:  # a kill leaves one or the other
                    fresh = f"{self._path}.new"
                    with suppress(FileNotFoundError):
                        os.unlink(fresh)
                    with open(_opened(fresh, os.O_CREAT | os.O_EXCL), "wb") as file:
                        file.write(_MAGIC + records)
                    os.replace(fresh, self._path)
        except OSError as error:
            warn("cannot note the keys in %s (%s): a restart reports fewer", self._path, error)
            while self._work.get() is not None:  # nothing adds up
                pass


def _opened(path: str, flags: int = 0) -> int:
    """A descriptor of this user's file, which nobody else can read from then on."""
    descriptor = os.open(path, _FLAGS | flags, 0o600)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        os.close(descriptor)
        raise OSError(errno.EPERM, "it is no file of this user", path)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _keys_in(found: bytes) -> list[bytes]:
    if not found.startswith(_MAGIC):
        return []
    keys, at = dict[bytes, None](), len(_MAGIC)
    while at < len(found) and found[at] and at + found[at] < len(found):
        key = found[at + 1 : at + 1 + found[at]]
        keys.pop(key, None)
        keys[key] = None
        at += 1 + len(key)
    return [*keys]
