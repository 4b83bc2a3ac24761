"""What the other openers of a disk tier's folder have stored: replicas of one host share it.

Each opener writes its own pair of files, whose format `native/tiers/slot_file.hpp` defines. Here
they are only read, by pread: a file that its owner makes smaller would kill whoever has mapped it.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memlane import _native
from memlane._base.arguments import integer_from
from memlane._base.deadline import Deadline
from memlane._base.diagnosis import warn
from memlane.errors import InvalidType
from memlane.tiers.remote.blocks import HEADER, MAGIC
from memlane.tiers.remote.tier import RemoteTier
from memlane.tiers.remote.transport import Refusal, Refused, Transport, digest_of
from memlane.tiers.tier import Namespace, Rows

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PAIR = struct.Struct(
    "<8sII3Q"
)  # magic, version, CRC of the rest; row bytes, slots, first sequence
_PAIR_MAGIC, _VERSION = b"MEMLTIER", 1
_SLOT = struct.Struct("<24s16sQIIII")  # digest, namespace, sequence, bytes, CRC of the data, 0, CRC
_HEADERS = ".headers"
_FIRST_SLOT = 4096  # bytes
_PAGE = 4096
_AT_A_TIME = 1 << 16  # headers of one read
_EVERY = 1.0  # seconds between two looks at what is new, at least
_TICK = 50_000_000  # nanoseconds, more than the clock of a file system steps by
# Errors of files that are none of ours; others may pass.
_NO_PAIR = (errno.EPERM, errno.EACCES, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR)
_RETRIED = 10.0  # seconds, after which a pair that cannot be read is tried again
_SHARE = 50  # the time between two looks is so many times what one takes, at least

Slots = npt.NDArray[np.int64]


class ReplicaTier(RemoteTier):
    """What other processes have stored by a `DiskTier` in the same folder, for reading::

        with (
            DiskTier("/nvme/kv", rows, "200GiB", opener="0") as own,
            ReplicaTier("/nvme/kv", rows, own="0") as others,
            TierChain(pool, rows, [own, others]) as chain,
        ):
            ...

    Files of openers that have ended are read as well, and openers that come later are found. The
    tier knows what is new within a second, or later where it must read very many headers for it. A
    block that its owner replaces meanwhile is a miss, and so is one that is not what was stored: it
    is the owner's to count. Nothing is stored: each block is reported as failed. `forget` and
    `clear` hold for this object; the owners' tiers must do the same. An answer of `has` that nobody
    has read may be ten seconds old.

    A block costs three reads, through the page cache, and each pair of files two more a batch; a
    slot of another opener 16 bytes of memory. Timeouts are in seconds.
    """

    what = "a replica tier"
    is_read_only = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        rows: Any,
        *,
        own: str | None = None,
        namespace: str | bytes = b"",
        timeout: float = 5.0,
        threads: int = 2,
    ) -> None:
        """Args:
            path: the folder; it may be made later.
            rows: a writable, contiguous buffer of shape (blocks, bytes), which must not be freed
                before the tier is closed.
            own: the `opener` of this process, which is left out.
            namespace: as of `DiskTier`.
            timeout: of `load`, `drain` and `close`, in seconds, unless they are given one.
            threads: 1 to 64, that read.

        Raises:
            InvalidType, InvalidArgument: an argument is none.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise InvalidType(f"path must be a path, not {type(path).__name__}")
        if own is not None and not isinstance(own, str):
            raise InvalidType(f"own must be a string, not {type(own).__name__}")
        count = integer_from("threads", threads, 1, 64)
        name = Namespace(namespace).id
        folder = _Folder(Path(os.fsdecode(path)), own, Rows(rows).nbytes, name)
        super().__init__(
            rows,
            lambda _: _Reader(folder),
            lambda _: _Reader(folder),
            prefix=b"",
            namespace=namespace,
            timeout=timeout,
            connections=count,
            crc_of_key=folder.crc_of_key,
            reports_changed=False,
        )


class _Pair:
    """The two files of another opener, and which key was in which slot when it was last read."""

    def __init__(self, headers: int, data: int, row_bytes: int, name: bytes) -> None:
        self._headers, self._data = headers, data
        self.number = os.fstat(headers).st_ino  # another file may have its name later
        self.last_sequence = 0  # of all namespaces
        self._row_bytes, self._name = row_bytes, name
        self._keys = np.empty(0, np.uint64)  # the first 8 bytes of digests, sorted
        self._slots: Slots = np.empty(0, np.int64)
        self._read_at: tuple[int, ...] = ()  # what the files were like

    @classmethod
    def opened(cls, path: Path, row_bytes: int, name: bytes) -> _Pair:
        """Raises OSError: it is none, or not this user's."""
        files: list[int] = []
        try:
            for end in (_HEADERS, ".data"):
                files.append(os.open(f"{path}{end}", _FLAGS))
                facts = os.fstat(files[-1])
                if facts.st_uid != os.geteuid() or not stat.S_ISREG(facts.st_mode):
                    raise PermissionError(errno.EPERM, "another user's")
            return cls(files[0], files[1], row_bytes, name)
        except OSError:
            for file in files:
                os.close(file)
            raise

    def facts(self) -> tuple[int, int] | None:
        """Slots, and the first sequence that counts; None: it has no blocks for us."""
        page = os.pread(self._headers, _PAIR.size, 0)
        if len(page) < _PAIR.size:
            return None
        magic, version, crc, row_bytes, slots, first = _PAIR.unpack(page)
        is_pair = (magic, version) == (_PAIR_MAGIC, _VERSION) and crc == _native.crc32c(page[16:])
        return (slots, first) if is_pair and row_bytes == self._row_bytes else None

    def first_sequence(self) -> int | None:
        """Of those that its owner has not cleared; None: it has no blocks for us."""
        try:
            facts = self.facts()
        except OSError:
            return None
        return None if facts is None else facts[1]

    def read(self, *, fully: bool = False) -> None:
        """Which keys there are, if anything has changed."""
        begun = time.time_ns()
        now = os.fstat(self._headers)
        state = (now.st_mtime_ns, now.st_ctime_ns, now.st_size)
        if state == self._read_at and not fully:
            return
        facts = self.facts()
        keys, slots = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        sequences = [np.empty(0, np.uint64)]
        self.last_sequence = 0
        if facts is not None:
            count = min(facts[0], (now.st_size - _FIRST_SLOT) // _SLOT.size)
            first = facts[1]
            wanted = np.frombuffer(self._name, np.uint64)
            for at in range(0, count, _AT_A_TIME):
                size = min(_AT_A_TIME, count - at) * _SLOT.size
                found = os.pread(self._headers, size, _FIRST_SLOT + at * _SLOT.size)
                words = np.frombuffer(found[: len(found) // _SLOT.size * _SLOT.size], np.uint64)
                words = words.reshape(-1, 8)
                self._note_sequences(found, words[:, 5])
                is_ours = (words[:, 3] == wanted[0]) & (words[:, 4] == wanted[1])
                is_ours &= (words[:, 5] >= first) & (words[:, 6] & 0xFFFFFFFF == self._row_bytes)
                places = np.flatnonzero(is_ours)
                keys.append(words[places, 0])
                slots.append(places + at)
                sequences.append(words[places, 5])
        every = np.concatenate(keys)
        # Of two slots with one key the later one counts: it comes first.
        order = np.lexsort((np.iinfo(np.uint64).max - np.concatenate(sequences), every))
        self._keys, self._slots = every[order], np.concatenate(slots)[order]
        # A write within the same tick of the file system's clock would not be seen.
        is_recent = begun - now.st_mtime_ns < _TICK
        self._read_at = () if is_recent else state

    def _note_sequences(self, headers: bytes, sequences: npt.NDArray[np.uint64]) -> None:
        for at in np.argsort(sequences)[::-1].tolist():
            if sequences[at] <= self.last_sequence:
                return
            header = headers[at * _SLOT.size : (at + 1) * _SLOT.size]
            if _SLOT.unpack(header)[-1] == _native.crc32c(header[:-4]):
                self.last_sequence = int(sequences[at])
                return

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The slot of each; -1: none."""
        wanted = np.array([int.from_bytes(each[:8], "little") for each in digests], np.uint64)
        if not len(self._keys):
            return [-1] * len(digests)
        at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        slots: list[int] = np.where(self._keys[at] == wanted, self._slots[at], -1).tolist()
        return slots

    def load(self, slot: int, header: tuple[int, int], digest: bytes, into: memoryview) -> bool:
        """Reads the block, which is not checked. False: it is being replaced."""
        step = -(-self._row_bytes // _PAGE) * _PAGE
        at = 0
        while at < self._row_bytes:
            try:
                got = os.preadv(self._data, [into[at:]], slot * step + at)
            except OSError:
                return False
            if got == 0:
                return False
            at += got
        return self.header(slot, digest) == header

    def header(self, slot: int, digest: bytes) -> tuple[int, int] | None:
        """Sequence, and CRC of the data; None: the slot has something else."""
        try:
            found = os.pread(self._headers, _SLOT.size, _FIRST_SLOT + slot * _SLOT.size)
        except OSError:  # of this file alone
            return None
        if len(found) < _SLOT.size:
            return None
        own, name, sequence, size, data_crc, _, crc = _SLOT.unpack(found)
        if (own, name, size) != (digest, self._name, self._row_bytes):
            return None
        return (sequence, data_crc) if crc == _native.crc32c(found[:-4]) else None

    def __del__(self) -> None:
        os.close(self._headers)
        os.close(self._data)


def _refused(path: Path, error: OSError) -> Refused:
    return Refused(f"{path}: {os.strerror(error.errno or 0)}")


class _Folder:
    """The pairs of all other openers. Its readers share it."""

    def __init__(self, path: Path, own: str | None, row_bytes: int, name: bytes) -> None:
        self._path, self._own = path, own
        self._row_bytes, self._name = row_bytes, name
        self._lock = threading.Lock()
        self._pairs: dict[str, _Pair] = {}
        self._left_out: dict[str, float] = {}  # until when
        self._next = 0.0  # when to look again
        # The last sequence that is not found, by file, and by file and key.
        self._cleared: dict[int, int] = {}
        self._forgotten: dict[int, dict[bytes, int]] = {}

    def crc_of_key(self, digest: bytes) -> int:
        return _native.crc32c(self._name, _native.crc32c(digest))

    def refresh(self, *, fully: bool = False) -> None:
        """Looks for what is new, if it is time for it. Raises OSError."""
        with self._lock:
            begun = time.monotonic()
            if begun < self._next and not fully:
                return
            names = self._names(fully)
            for name in self._pairs.keys() - names:  # its file is gone, and so are all marks
                number = self._pairs.pop(name).number
                self._cleared.pop(number, None)
                self._forgotten.pop(number, None)
            for name in names:
                if self._left_out.get(name, 0.0) <= begun or fully:
                    try:
                        self._look_at(name, fully)
                    except FileNotFoundError:  # its owner makes it, or removes it
                        self._pairs.pop(name, None)
                    except OSError as error:
                        self._pairs.pop(name, None)
                        if fully and error.errno not in _NO_PAIR:
                            raise _refused(self._path / name, error) from None
                        if name not in self._left_out:
                            why = os.strerror(error.errno or 0)
                            warn("a replica tier leaves out %s: %s", self._path / name, why)
                        self._left_out[name] = begun + _RETRIED
            now = time.monotonic()
            self._next = now + max(_EVERY, _SHARE * (now - begun))

    def _names(self, fully: bool) -> set[str]:
        try:
            files = os.listdir(self._path)
        except FileNotFoundError:
            files = []
        except OSError as error:
            if fully:
                raise _refused(self._path, error) from None
            return {*self._pairs}  # for now
        names = {each.removesuffix(_HEADERS) for each in files if each.endswith(_HEADERS)}
        return names - {self._own}

    def _look_at(self, name: str, fully: bool) -> None:
        pair = self._pairs.get(name)
        if pair is None or pair.number != os.stat(self._path / f"{name}{_HEADERS}").st_ino:
            pair = _Pair.opened(self._path / name, self._row_bytes, self._name)
        pair.read(fully=fully)
        # A sequence that comes again, because an owner has started anew, is another block's.
        if (last := self._cleared.get(pair.number, 0)) > pair.last_sequence:
            self._cleared[pair.number] = min(last, pair.last_sequence)
        forgotten = self._forgotten.get(pair.number, {})
        for digest, last in forgotten.items():
            forgotten[digest] = min(last, pair.last_sequence)
        self._pairs[name] = pair
        self._left_out.pop(name, None)

    def close(self) -> None:
        with self._lock:
            self._pairs.clear()

    def places(self, digests: Sequence[bytes]) -> list[list[tuple[_Pair, int]]]:
        """Where each may be."""
        with self._lock:
            pairs = [*self._pairs.values()]
        found: list[list[tuple[_Pair, int]]] = [[] for _ in digests]
        for pair in pairs:
            for place, slot in zip(found, pair.find(digests), strict=True):
                if slot >= 0:
                    place.append((pair, slot))
        return found

    def header(
        self, pair: _Pair, slot: int, digest: bytes, first: int | None
    ) -> tuple[int, int] | None:
        """Of the slot, unless that is forgotten; `first`: the first sequence that counts."""
        header = None if first is None else pair.header(slot, digest)
        if header is None or first is None:
            return None
        last = max(
            first - 1,
            self._cleared.get(pair.number, -1),
            self._forgotten.get(pair.number, {}).get(digest, -1),
        )
        return header if header[0] > last else None

    def forget(self, digests: Sequence[bytes]) -> None:
        self.refresh(fully=True)
        with self._lock:
            for pair in self._pairs.values():
                marks = dict.fromkeys(digests, pair.last_sequence)
                self._forgotten.setdefault(pair.number, {}).update(marks)

    def clear(self) -> None:
        self.refresh(fully=True)
        with self._lock:
            for pair in self._pairs.values():
                self._cleared[pair.number] = pair.last_sequence
                self._forgotten.pop(pair.number, None)


class _Reader(Transport):
    """What one thread reads."""

    def __init__(self, folder: _Folder) -> None:
        self._folder = folder

    def put(
        self,
        names: Sequence[bytes],
        values: Sequence[tuple[bytes, memoryview]],
        deadline: Deadline,
    ) -> list[Refusal | None]:
        return [Refusal("a replica tier only reads") for _ in names]

    def get(
        self, names: Sequence[bytes], into: Sequence[memoryview], deadline: Deadline
    ) -> list[int | Refusal]:
        self._folder.refresh()
        digests = [digest_of(name) for name in names]
        firsts: dict[_Pair, int | None] = {}
        found: list[int | Refusal] = []
        read: list[tuple[int, _Pair, int]] = []
        for digest, memory, places in zip(digests, into, self._folder.places(digests), strict=True):
            size = -1
            for pair, slot in places:
                if pair not in firsts:
                    firsts[pair] = pair.first_sequence()
                header = self._folder.header(pair, slot, digest, firsts[pair])
                if header is None or not pair.load(slot, header, digest, memory[HEADER.size :]):
                    continue
                HEADER.pack_into(memory, 0, MAGIC, memory.nbytes - HEADER.size, header[1], 0)
                size = memory.nbytes
                read.append((len(found), pair, header[0]))
                break
            found.append(size)
        now = {pair: pair.first_sequence() for pair in firsts}
        for at, pair, sequence in read:
            first = now[pair]
            if first is None or sequence < first:  # its owner has cleared it meanwhile
                found[at] = -1
        return found

    def ask(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
        self._folder.refresh()
        digests = [digest_of(name) for name in names]
        places = self._folder.places(digests)
        firsts = {
            pair: pair.first_sequence() for pair in {one for each in places for one, _ in each}
        }
        return [
            any(
                self._folder.header(pair, slot, digest, firsts[pair]) is not None
                for pair, slot in of_key
            )
            for digest, of_key in zip(digests, places, strict=True)
        ]

    def remove(self, names: Sequence[bytes], deadline: Deadline) -> None:
        self._folder.forget([digest_of(name) for name in names])

    def clear(self, prefix: bytes, deadline: Deadline) -> None:
        self._folder.clear()

    def close(self) -> None:
        self._folder.close()
