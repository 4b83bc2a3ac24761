"""The processes of a group's ranks, exchanged through its store, and the deaths among them.

A store keeps no connection between calls, so each rank leaves its process there as it joins a call.
Ranks on its host look whether that process lives, and tell the others as they leave the call. Of a
rank without another on its host, the board of a TcpGroup sees the connection end during a call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from memlane._base.msgspec import msgspec
from memlane._base.processes import start_ticks, status


class Values(Protocol):
    """What this needs of a store."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, timeout: float) -> bytes | None: ...
    def dead(self) -> list[int]: ...


class Process(msgspec.Struct, frozen=True, array_like=True):
    """A process as its own host knows it."""

    host: str  # the kernel's boot id, and its pid namespace
    pid: int
    started: int  # in clock ticks since boot

    def has_ended(self) -> bool:
        state, started = status(self.pid)
        return state == "dead" or started not in (None, self.started)


def this_process() -> Process | None:
    """None where /proc does not show it."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
        if (started := start_ticks(os.getpid())) is not None:
            return Process(host, os.getpid(), started)
    return None


class Members:
    """The processes of a group's ranks, during one call of it."""

    def __init__(self, store: Values, rank: int, size: int) -> None:
        self._store = store
        self._own = this_process()
        self._others = [other for other in range(size) if other != rank]
        self._here: dict[int, Process] = {}
        self._looks = 0
        if self._own is not None:
            store.set(_key(rank), msgspec.msgpack.encode(self._own))

    def dead(self, missing: Callable[[], Sequence[int]]) -> dict[int, str]:
        """The `missing` ranks that have died, each with what shows it: the pid of a process on
        this host that has ended, or the connection that the store has lost."""
        here = self._ended_here()
        lost = self._store.dead()
        if not here and not lost:
            return {}
        awaited = set(missing())
        signs = dict.fromkeys(lost, "the connection to rank 0 ended") | here
        return {rank: sign for rank, sign in sorted(signs.items()) if rank in awaited}

    def _ended_here(self) -> dict[int, str]:
        """Asks the store for unknown ranks at the 1st, 2nd, 4th, 8th ... call, as it is shared by
        all."""
        if self._own is None:
            return {}
        self._looks += 1
        if self._looks & (self._looks - 1) == 0:
            for rank in set(self._others) - set(self._here):
                self._read(rank)
        ended = [rank for rank, process in self._here.items() if process.has_ended()]
        for rank in ended:  # another process may have come in its place
            self._read(rank)
        return {
            rank: f"pid {self._here[rank].pid}"
            for rank in ended
            if rank in self._here and self._here[rank].has_ended()
        }

    def _read(self, rank: int) -> None:
        self._here.pop(rank, None)
        value = self._store.get(_key(rank), 0)
        with suppress(msgspec.MsgspecError):  # of another version: it cannot be looked at
            process = None if value is None else msgspec.msgpack.decode(value, type=Process)
            if process is not None and self._own is not None and process.host == self._own.host:
                self._here[rank] = process


def _key(rank: int) -> str:
    return f"memlane/member/{rank}"
