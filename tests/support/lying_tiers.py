"""A tier in memory, which does what a test tells it to."""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from memlane.tiers.tier import Done, Ticket


class MemoryTier:
    """Reports at once, unless `is_silent`; then whenever it is told to `speak`.

    Attributes:
        blocks: by key.
        fails: whether what is begun now will be reported as failed.
        error: of every other report.
        knows: what `has` says; by default what is so.
        raises: by the name of a call, what it raises.
        asked: keys of each call of `store` and `load`.
        touched: keys of each call of `touch`.
    """

    def __init__(self, rows: npt.NDArray[np.uint8]) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.is_silent = self.fails = False
        self.error: str | None = None
        self.knows: Callable[[bytes], bool | None] = lambda key: key in self.blocks
        self.raises: dict[str, Exception] = {}
        self.asked: list[tuple[str, list[bytes]]] = []
        self.touched: list[list[bytes]] = []
        self._rows = rows
        self._waiting: list[tuple[str, Ticket, list[bytes], list[int], bool]] = []
        self._done: list[Done] = []
        self._ready = os.eventfd(0, os.EFD_NONBLOCK)
        self._next = 0

    def has(self, keys: Sequence[bytes]) -> list[bool | None]:
        self._perhaps_raise("has")
        return [self.knows(key) for key in keys]

    def hold(self, keys: Sequence[bytes]) -> Any:
        return nullcontext()

    def store(self, keys: Sequence[bytes], ids: Any, timeout: float | None = None) -> Ticket:
        return self._begin("store", keys, ids)

    def load(self, keys: Sequence[bytes], ids: Any, timeout: float | None = None) -> Ticket:
        return self._begin("load", keys, ids)

    def _begin(self, kind: str, keys: Sequence[bytes], ids: Any) -> Ticket:
        self._perhaps_raise(kind)
        self._next += 1
        ticket = Ticket(self._next)
        self.asked.append((kind, [*keys]))
        self._waiting.append((kind, ticket, [*keys], np.asarray(ids).tolist(), self.fails))
        if not self.is_silent:
            self.speak()
        return ticket

    def speak(self, count: int | None = None) -> None:
        """Does what waits, or the first `count` of it, and reports it."""
        now, self._waiting = self._waiting[:count], self._waiting[len(self._waiting[:count]) :]
        for kind, ticket, keys, ids, fails in now:
            ok = []
            for key, row in zip(keys, ids, strict=True):
                if not fails and kind == "store":
                    self.blocks.setdefault(key, self._rows[row].tobytes())
                elif not fails and key in self.blocks:
                    self._rows[row] = np.frombuffer(self.blocks[key], np.uint8)
                ok.append(not fails and key in self.blocks)
            error = "it fails" if fails else self.error
            size = sum(ok) * self._rows.shape[1]
            self._done.append(Done(ticket, np.array(ok, np.bool_), error, size, 0.0))
        if now:
            os.eventfd_write(self._ready, 1)

    def poll(self) -> list[Done]:
        self._perhaps_raise("poll")
        done, self._done = self._done, []
        if done:
            os.eventfd_read(self._ready)
        return done

    def fileno(self) -> int:
        return self._ready

    def touch(self, keys: Sequence[bytes]) -> None:
        self.touched.append([*keys])

    def forget(self, keys: Sequence[bytes]) -> None:
        self._perhaps_raise("forget")
        for key in keys:
            self.blocks.pop(key, None)

    def clear(self) -> None:
        self._perhaps_raise("clear")
        self.blocks.clear()

    def drain(self, timeout: float | None = None) -> bool:
        return not self._waiting

    def close(self, timeout: float | None = None) -> None:
        pass

    def __del__(self) -> None:
        os.close(self._ready)

    def _perhaps_raise(self, call: str) -> None:
        if (error := self.raises.get(call)) is not None:
            raise error
