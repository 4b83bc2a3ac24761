"""One descriptor for several ends."""

from __future__ import annotations

import select
from contextlib import suppress
from typing import TYPE_CHECKING

from memlane._base.descriptors import duplicate
from memlane.errors import system_fault

if TYPE_CHECKING:
    from memlane.broadcast.local import Watching


class JointWatch:
    """Readable while any of its parts is; its descriptor stays when they change."""

    def __init__(self, *parts: Watching) -> None:
        """Raises SystemFault if there is no descriptor left."""
        self._parts: tuple[Watching, ...] = ()
        try:
            with select.epoll() as made:
                self._epoll = select.epoll.fromfd(duplicate(made.fileno()))
        except OSError as error:
            raise system_fault(error.errno or 0, "cannot open an epoll descriptor") from None
        self.become(*parts)

    def become(self, *parts: Watching) -> None:
        """Raises SystemFault, and changes nothing, if the system refuses."""
        old, self._parts = self._parts, (*self._parts, *parts)  # whose descriptors stay open
        try:
            for part in parts:
                with suppress(FileExistsError):
                    self._epoll.register(part.fileno(), select.EPOLLIN)
        except OSError as error:
            self._leave([part for part in parts if part not in old])
            self._parts = old
            raise system_fault(error.errno or 0, "cannot watch a descriptor") from None
        self._leave([part for part in old if part not in parts])
        self._parts = parts

    def _leave(self, parts: list[Watching]) -> None:
        for part in parts:
            with suppress(FileNotFoundError):  # a signal handler has raised here before
                self._epoll.unregister(part.fileno())

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def is_readable(self) -> bool:
        return any(part.is_readable for part in self._parts)
