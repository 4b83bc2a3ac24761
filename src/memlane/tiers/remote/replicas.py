"""The tier of blocks that other openers of a disk tier's folder have stored: replicas of one host
share it.

Each opener writes its own pair of files, which native code reads (native/tiers/slot_reader.hpp).
Here is which pairs there are, when to look for new blocks, and what this process has forgotten.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memlane._base.arguments import integer_from
from memlane._base.deadline import Deadline
from memlane._base.diagnosis import warn
from memlane._base.paths import path_from
from memlane._locks import Lock
from memlane._native import SlotReader, crc32c
from memlane.tiers.remote.blocks import HEADER, MAGIC
from memlane.tiers.remote.tier import RemoteTier
from memlane.tiers.remote.transport import Refusal, Refused, Transport, digest_of
from memlane.tiers.tier import Namespace, Rows, text

_HEADERS = ".headers"
_EVERY = 1.0  # seconds between two looks at what is new, at least
_SHARE = 50  # the time between two looks is so many times what one takes, at least
_RETRIED = 10.0  # seconds, after which a pair that cannot be read is tried again
# Errors of files that are no pair of this user; others may pass.
_NO_PAIR = (errno.EPERM, errno.EACCES, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR)


class ReplicaTier(RemoteTier):
    """Blocks that other processes have stored by a `DiskTier` in the same folder; read only::

        with (
            DiskTier("/nvme/kv", rows, "200GiB", opener="0") as own,
            ReplicaTier("/nvme/kv", rows, own="0") as others,
            TierChain(pool, rows, [own, others]) as chain,
        ):
            ...

    Files of openers that have ended are read as well, and openers that start later are found. New
    blocks are found within a second, or later where very many headers must be read for that. A
    block that its owner replaces meanwhile is a miss, and so is one that is not what was stored;
    its owner counts it. Nothing is stored: each block is reported as failed. `forget` and `clear`
    hold for this object only; the owners' tiers must do the same. An answer of `has` that was not
    read yet may be ten seconds old.

    A block costs three reads, through the page cache, and each pair of files two more a batch; a
    slot of another opener costs 12 bytes of memory.
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
            path: the folder; it may be created later.
            rows, namespace, timeout: as of every `Tier`; timeout in seconds.
            own: the `opener` of this process, whose files are not read.
            threads: how many read, 1 to 64.

        Raises:
            InvalidType, InvalidArgument: an argument is not valid.
        """
        place = Path(path_from("path", path))
        if own is not None:
            text("own", own)
        count = integer_from("threads", threads, 1, 64)
        name = Namespace(namespace).id
        folder = _Folder(place, own, Rows(rows).nbytes, name)
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


class _Folder:
    """The pairs of all other openers. The connections of a tier share it."""

    def __init__(self, path: Path, own: str | None, row_bytes: int, name: bytes) -> None:
        self._path, self._own = path, own
        self._row_bytes, self._name = row_bytes, name
        self._looking = threading.Lock()  # one thread looks; others use what it found before
        self._next = 0.0  # when to look again
        self._skipped: dict[str, float] = {}  # pairs that cannot be read, and until when
        self._lock = Lock()  # for what follows
        self._pairs: dict[str, tuple[int, SlotReader]] = {}  # with the number of the file
        # The last sequence that is not found any more, by file, and by file and key.
        self._cleared: dict[int, int] = {}
        self._forgotten: dict[int, dict[bytes, int]] = {}

    def crc_of_key(self, digest: bytes) -> int:
        """Returns what the CRC of a block begins with."""
        return crc32c(self._name, crc32c(digest))

    # What is there -------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Looks for what is new, if it is time and no other thread does."""
        if time.monotonic() >= self._next and self._looking.acquire(blocking=False):
            try:
                self._look(fully=False)
            finally:
                self._looking.release()

    def _look(self, *, fully: bool) -> None:
        """Looks at all pairs; `fully`: also at those that seem unchanged. Raises Refused then."""
        begun = time.monotonic()
        names = self._names(fully)
        with self._lock:
            for name in self._pairs.keys() - names:  # its file is gone, and so are all marks
                number, _ = self._pairs.pop(name)
                self._cleared.pop(number, None)
                self._forgotten.pop(number, None)
        for name in names:
            if self._skipped.get(name, 0.0) > begun and not fully:
                continue
            try:
                self._look_at(name, fully)
            except OSError as error:
                with self._lock:
                    self._pairs.pop(name, None)
                if error.errno == errno.ENOENT:  # its owner is creating or removing it
                    continue
                if fully and error.errno not in _NO_PAIR:
                    raise _refused(self._path / name, error) from None
                if name not in self._skipped:
                    why = os.strerror(error.errno or 0)
                    warn("a replica tier skips %s: %s", self._path / name, why)
                self._skipped[name] = begun + _RETRIED
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
        number, pair = self._pairs.get(name, (None, None))
        if pair is None or number != os.stat(self._path / f"{name}{_HEADERS}").st_ino:
            pair = SlotReader(os.fspath(self._path / name), self._row_bytes, self._name)
            number = pair.number
        pair.look(fully)
        with self._lock:
            # A sequence that comes again, because an owner has started anew, is another block's.
            last = pair.last_sequence
            if self._cleared.get(number, -1) > last:
                self._cleared[number] = last
            forgotten = self._forgotten.get(number, {})
            for digest, until in forgotten.items():
                forgotten[digest] = min(until, last)
            self._pairs[name] = (number, pair)
        self._skipped.pop(name, None)

    def close(self) -> None:
        with self._lock:
            self._pairs.clear()

    # Blocks --------------------------------------------------------------------------------------

    def _marks(self, number: int, digests: Sequence[bytes]) -> list[int]:
        """Returns for each key the last sequence that is not found any more."""
        cleared = self._cleared.get(number, -1)
        forgotten = self._forgotten.get(number)
        if not forgotten:
            return [cleared] * len(digests)
        return [max(cleared, forgotten.get(digest, -1)) for digest in digests]

    def _pairs_for(self, digests: Sequence[bytes]) -> list[tuple[SlotReader, dict[bytes, int]]]:
        with self._lock:
            return [
                (pair, dict(zip(digests, self._marks(number, digests), strict=True)))
                for number, pair in self._pairs.values()
            ]

    def has(self, digests: Sequence[bytes]) -> list[bool]:
        """Returns for each key whether some opener has it."""
        there: set[bytes] = set()
        for pair, marks in self._pairs_for(digests):
            left = [digest for digest in digests if digest not in there]
            found = pair.has(left, [marks[digest] for digest in left])
            there.update(digest for digest, is_there in zip(left, found, strict=True) if is_there)
        return [digest in there for digest in digests]

    def get(self, digests: Sequence[bytes], into: Sequence[memoryview]) -> list[int | None]:
        """Reads rows. Returns what the CRC of each should be, or None where there is none."""
        crcs: dict[bytes, int] = {}
        memory = dict(zip(digests, into, strict=True))
        for pair, marks in self._pairs_for(digests):
            left = [digest for digest in digests if digest not in crcs]
            if not left:
                break
            found = pair.get(
                left, [marks[digest] for digest in left], [memory[digest] for digest in left]
            )
            crcs.update(
                (digest, crc) for digest, crc in zip(left, found, strict=True) if crc is not None
            )
        return [crcs.get(digest) for digest in digests]

    # Forgetting ----------------------------------------------------------------------------------

    def forget(self, digests: Sequence[bytes]) -> None:
        """Finds none of these keys any more, until it is stored again. Raises Refused."""
        with self._looking:
            self._look(fully=True)
            with self._lock:
                for number, pair in self._pairs.values():
                    marks = dict.fromkeys(digests, pair.last_sequence)
                    self._forgotten.setdefault(number, {}).update(marks)

    def clear(self) -> None:
        """Finds nothing any more that is stored now. Raises Refused."""
        with self._looking:
            self._look(fully=True)
            with self._lock:
                for number, pair in self._pairs.values():
                    self._cleared[number] = pair.last_sequence
                    self._forgotten.pop(number, None)


def _refused(path: Path, error: OSError) -> Refused:
    return Refused(f"{path}: {os.strerror(error.errno or 0)}")


class _Reader(Transport):
    """The files that one thread reads."""

    def __init__(self, folder: _Folder) -> None:
        self._folder = folder

    def ask(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
        self._folder.refresh()
        return self._folder.has([digest_of(name) for name in names])

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
        rows = [memory[HEADER.size :] for memory in into]
        crcs = self._folder.get([digest_of(name) for name in names], rows)
        for memory, row, crc in zip(into, rows, crcs, strict=True):
            if crc is not None:
                HEADER.pack_into(memory, 0, MAGIC, row.nbytes, crc, 0)
        return [
            -1 if crc is None else memory.nbytes for memory, crc in zip(into, crcs, strict=True)
        ]

    def remove(self, names: Sequence[bytes], deadline: Deadline) -> None:
        self._folder.forget([digest_of(name) for name in names])

    def clear(self, prefix: bytes, deadline: Deadline) -> None:
        self._folder.clear()

    def close(self) -> None:
        self._folder.close()
