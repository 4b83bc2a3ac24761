"""Tracks which of a tier's keys a router knows, and which events come next: for engines that
publish it. Its only I/O is a disk tier's `KeyLog`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from memlane._base.deadline import Deadline
from memlane.tiers.key_log import KeyLog

if TYPE_CHECKING:
    from memlane.tiers.disk import DiskTier
    from memlane.tiers.disk_array import DiskArray

_MOST_KEYS = 1 << 18  # of a tier on a server that are remembered
_MOST_TAKEN = 4096  # keys at a time


class Inventory:
    """Keys of a tier that does not report what becomes of its blocks, by what its calls find.

    The receiver of the reports knows, of each key, whether it is there; only a difference from that
    is reported. So what nobody takes needs no more memory than the keys themselves. Of more than
    `most` keys the oldest are reported as removed: what is not remembered cannot be removed later.
    """

    def __init__(self, most: int = _MOST_KEYS) -> None:
        self._most = most
        self._told: dict[bytes, None] = {}  # reported as stored, the oldest first
        self._changed: dict[bytes, bool] = {}  # to be reported: stored, or removed

    def submitted(self, keys: Sequence[bytes]) -> None:
        """Notes that these keys are about to be stored."""

    def reported(self, keys: Sequence[bytes], ok: Sequence[bool], is_load: bool) -> None:
        """Notes what became of a call."""
        for key, is_ok in zip(keys, ok, strict=True):
            if is_ok or is_load:
                self.found(key, is_ok)

    def found(self, key: bytes, is_there: bool) -> None:
        """Notes the answer to a question about a key."""
        if is_there:
            self._stored(key)
        else:
            self._removed(key)

    def close(self, timeout: float) -> None:
        """Ends it; the tier is closed."""

    def cleared(self) -> None:
        """Notes that the tier is empty."""
        self._changed = dict.fromkeys(self._told, False)

    def again(self) -> None:
        """Reports everything anew: the router has forgotten what it was told."""
        there = {key: True for key in self._told if self._changed.get(key, True)}
        there |= {key: True for key, is_stored in self._changed.items() if is_stored}
        self._told, self._changed = {}, there

    def take(self) -> list[tuple[list[bytes], bool]]:
        """Returns keys that were stored (True) or removed (False) since the last call, some
        thousands at a time."""
        taken = dict(islice(self._changed.items(), _MOST_TAKEN))
        for key, is_stored in taken.items():
            del self._changed[key]
            if is_stored:
                self._told[key] = None
            else:
                del self._told[key]
        for key in [*islice(self._told, max(0, len(self._told) - self._most))]:
            self._changed[key] = False
        removed = [key for key, is_stored in taken.items() if not is_stored]
        stored = [key for key, is_stored in taken.items() if is_stored]
        return [(keys, kind) for keys, kind in ((removed, False), (stored, True)) if keys]

    def _stored(self, key: bytes) -> None:
        if key in self._told:
            self._changed.pop(key, None)
        elif len(self._changed) < 2 * self._most:
            self._changed[key] = True

    def _removed(self, key: bytes) -> None:
        if key in self._told:
            self._changed[key] = False
        else:
            self._changed.pop(key, None)


class DiskInventory(Inventory):
    """Keys of a disk tier, which reports by digest whatever becomes of its blocks.

    What is there at the start is known by a log of keys, which is never trusted: the tier is asked.
    """

    def __init__(self, disk: DiskTier, path: str) -> None:
        """`path` is the log's. Raises SystemFault: no thread can be started."""
        self._slots = disk.statistics().slots
        super().__init__(self._slots)
        self._disk = disk
        self._keys: dict[bytes, bytes] = {}  # by digest: what is there, or about to be stored
        self._submitted = Counter[bytes]()  # of them, how many calls are not reported
        disk.changes()
        self._log = KeyLog(path)
        self._logged = 0  # keys in the log
        keys = self._log.read()
        for at in range(0, len(keys), _MOST_TAKEN):
            self._find(keys[at : at + _MOST_TAKEN])
        self._log_again()

    def _find(self, keys: Sequence[bytes]) -> None:
        there = self._disk.peek(keys)
        for digest, key, is_there in zip(self._disk.digests(keys), keys, there, strict=True):
            if is_there:
                self._keys[digest] = key
                self._stored(key)

    def _log_again(self) -> None:
        there = [key for key in self._keys.values() if self._is_there(key)]
        self._log.replace(there)
        self._logged = len(there)

    def _is_there(self, key: bytes) -> bool:
        return self._changed.get(key, key in self._told)

    def submitted(self, keys: Sequence[bytes]) -> None:
        self.follow()
        digests = self._disk.digests(keys)
        self._keys.update(zip(digests, keys, strict=True))
        self._submitted.update(digests)

    def reported(self, keys: Sequence[bytes], ok: Sequence[bool], is_load: bool) -> None:
        self.follow()
        if is_load:
            return
        for digest, key in zip(self._disk.digests(keys), keys, strict=True):
            if self._submitted[digest] > 1:
                self._submitted[digest] -= 1
                continue
            self._submitted.pop(digest, None)
            if not self._is_there(key):
                self._keys.pop(digest, None)

    def found(self, key: bytes, is_there: bool) -> None:
        if is_there and not self._is_there(key):
            self.follow()
            self._find([key])
            self._log.append([key])
            self._logged += 1

    def cleared(self) -> None:
        super().cleared()
        self._submitted.clear()  # nobody finds what is under way

    def again(self) -> None:
        self.follow()
        super().again()

    def take(self) -> list[tuple[list[bytes], bool]]:
        self.follow()
        return super().take()

    def end(self) -> None:
        """Notes nothing more; `close` waits for what was noted."""
        self._log.end()

    def close(self, timeout: float) -> None:
        self._log.close(timeout)

    def follow(self) -> None:
        """Takes in what has become of the tier's blocks. Raises `Closed`, `WrongProcess`."""
        stored: list[bytes] = []
        for digest, is_stored in self._disk.changes():
            if not digest:
                super().cleared()
                self._keys = {digest: self._keys[digest] for digest in self._submitted}
                stored.clear()
                self._log_again()
            elif is_stored and digest in self._keys:
                stored.append(self._keys[digest])
                self._stored(self._keys[digest])
            elif key := self._keys.get(digest):
                self._removed(key)
                if digest not in self._submitted:  # else it may be stored again right away
                    del self._keys[digest]
        self._log.append(stored)
        self._logged += len(stored)
        if self._logged > 4 * self._slots:
            self._log_again()


class ArrayInventory(Inventory):
    """Keys of several disks, each of which has an inventory of its own."""

    def __init__(self, array: DiskArray, each: dict[DiskTier, DiskInventory]) -> None:
        super().__init__()
        self._array, self._each = array, each

    def submitted(self, keys: Sequence[bytes]) -> None:
        for disk, own, _ in self._array.split(keys):
            self._each[disk].submitted(own)

    def reported(self, keys: Sequence[bytes], ok: Sequence[bool], is_load: bool) -> None:
        for disk, own, places in self._array.split(keys):
            self._each[disk].reported(own, [ok[at] for at in places], is_load)

    def found(self, key: bytes, is_there: bool) -> None:
        for disk, _, _ in self._array.split([key]):
            self._each[disk].found(key, is_there)

    def close(self, timeout: float) -> None:
        deadline = Deadline(timeout)
        for each in self._each.values():
            each.end()
        for each in self._each.values():
            each.close(deadline.left())

    def cleared(self) -> None:
        for each in self._each.values():
            each.cleared()

    def again(self) -> None:
        for each in self._each.values():
            each.again()

    def take(self) -> list[tuple[list[bytes], bool]]:
        for each in self._each.values():  # this may raise, and nothing is taken then
            each.follow()
        return [taken for each in self._each.values() for taken in Inventory.take(each)]
