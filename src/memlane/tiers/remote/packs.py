"""The names of an object tier's packs, and which block is in which of them. No requests.

A pack is an object with the blocks of one batch, side by side. Its name begins with the time, so
that a list can begin there, and lists the blocks: 12 bytes of the digest of each, in base64.
"""

from __future__ import annotations

import base64
import re
import secrets
import time
from collections.abc import Iterable, Sequence

from memlane._locks import Lock

KEY_BYTES = 12
"""The number of a digest's 24 bytes in a pack's name; a block's CRC covers them all."""

_KEY_TEXT = 16  # the same in base64
_KEYS_IN_PART = 12  # of a path: 192 characters, as a file's name has at most 255
_MOST_KEYS = 64  # in a name; one with more is not a pack's
_NAME = re.compile(r"[0-9a-f]{20}((?:/[A-Za-z0-9_-]+)+)")


class Pack:
    """An object, and the blocks in it.

    Attributes:
        path: its name.
        keys: of the blocks, in their order.
        size: bytes of the object.
        seen: the number of the last list of everything that had it.
    """

    __slots__ = ("keys", "path", "seen", "size")

    def __init__(self, path: str, keys: Sequence[bytes], size: int) -> None:
        self.path, self.keys, self.size = path, tuple(keys), size
        self.seen = 0

    @property
    def value_bytes(self) -> int:
        """The size of each block with its header; 0 if the object is not a tier's."""
        size, rest = divmod(self.size, len(self.keys))
        return 0 if rest else size

    @classmethod
    def named(cls, folder: str, path: str, size: int) -> Pack | None:
        """Returns the pack of that name, or None if it is not the name of one."""
        if not path.startswith(folder + "/"):
            return None
        found = _NAME.fullmatch(path, len(folder) + 1)
        if found is None:
            return None
        try:
            keys = base64.urlsafe_b64decode(found[1].replace("/", ""))
        except ValueError:
            return None
        if len(keys) % KEY_BYTES or not 1 <= len(keys) // KEY_BYTES <= _MOST_KEYS:
            return None
        return cls(path, [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)], size)


def path_of(folder: str, keys: Sequence[bytes]) -> str:
    """Returns a name for a new pack. It begins with the time, so that a list can begin there."""
    text = base64.urlsafe_b64encode(b"".join(keys)).decode()
    step = _KEY_TEXT * _KEYS_IN_PART
    parts = [text[at : at + step] for at in range(0, len(text), step)]
    return f"{path_from(folder, now_ms())}{secrets.token_hex(4)}/{'/'.join(parts)}"


def path_from(folder: str, milliseconds: int) -> str:
    """Returns a text that sorts before the names of all packs of that time and later."""
    return f"{folder}/{max(0, milliseconds):012x}"


def now_ms() -> int:
    """Returns the milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class Index:
    """The packs by block. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._packs: dict[str, Pack] = {}
        self._at: dict[bytes, Pack] = {}
        self._others: dict[bytes, list[Pack]] = {}  # further packs that have the block
        self._round = 0

    def add(self, packs: Iterable[Pack]) -> None:
        """Adds packs; of a pack that is known only the size is updated."""
        with self._lock:
            for pack in packs:
                known = self._packs.get(pack.path)
                if known is not None:
                    known.size, known.seen = pack.size, self._round
                    continue
                pack.seen = self._round
                self._packs[pack.path] = pack
                for key in pack.keys:
                    if self._at.setdefault(key, pack) is not pack:
                        self._others.setdefault(key, []).append(pack)

    def drop(self, paths: Iterable[str]) -> None:
        """Removes packs that are not there any more."""
        with self._lock:
            self._drop(paths)

    def _drop(self, paths: Iterable[str]) -> None:
        for path in paths:
            pack = self._packs.pop(path, None)
            for key in pack.keys if pack else ():
                others = self._others.pop(key, [])
                if self._at.get(key) is pack:
                    self._at.pop(key)
                    if others:
                        self._at[key] = others.pop()
                elif pack in others:
                    others.remove(pack)
                if others:
                    self._others[key] = others

    def find(self, keys: Sequence[bytes], value_bytes: int) -> list[Pack | None]:
        """Returns a pack for each key, or None; preferably one whose blocks have that size."""
        found: list[Pack | None] = []
        with self._lock:
            for key in keys:
                pack = self._at.get(key)
                if pack is not None and pack.value_bytes != value_bytes:
                    others = self._others.get(key, ())
                    pack = next((each for each in others if each.value_bytes == value_bytes), pack)
                found.append(pack)
        return found

    def having(self, keys: Sequence[bytes]) -> list[str]:
        """Returns the paths of all packs that have one of these keys."""
        with self._lock:
            packs = {self._at[key].path for key in keys if key in self._at}
            packs.update(each.path for key in keys for each in self._others.get(key, ()))
            return [*packs]

    def begin_round(self) -> None:
        """Begins a list of everything: a pack that is not added again before its end is gone."""
        with self._lock:
            self._round += 1

    def end_round(self) -> None:
        """Ends the list of everything, and removes what it did not have."""
        with self._lock:
            gone = [path for path, pack in self._packs.items() if pack.seen < self._round]
            self._drop(gone)
