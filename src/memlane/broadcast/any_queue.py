"""What `MessageQueue` and `Gather` have in common: iterating, awaiting, and how a block ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol

from memlane._base.lifetime import Owned
from memlane._importing import fork_waits
from memlane.errors import WriterClosed

if TYPE_CHECKING:
    from typing_extensions import (
        TypeVar,
    )  # a checker has its own; typing's knows defaults from 3.13

    from memlane.broadcast.awaiting import Awaiting
    from memlane.broadcast.local import AwaitableEnd


if TYPE_CHECKING:
    M = TypeVar("M", default=Any)
else:
    from typing import TypeVar

    M = TypeVar("M")


class AnyEnd(Protocol):
    """What a queue or gather needs of its end."""

    def check(self) -> None: ...


class AnyQueue(Owned, Generic[M]):
    """One end, which sends or receives messages."""

    _is_closed = False  # through this object
    _awaiting: Awaiting | None = None

    @property
    def _end(self) -> AnyEnd:
        raise NotImplementedError

    def _must_be_reader(self, call: str) -> object:
        """Raises WrongRole unless it can `call`."""
        raise NotImplementedError

    def dequeue(self) -> M:
        """Returns the next object. Raises as in the subclass."""
        raise NotImplementedError

    async def adequeue(self) -> M:
        """The same, for asyncio. Raises as in the subclass."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes it in this process, and tells the peers. Raises as in the subclass."""
        raise NotImplementedError

    def _end_block(self, has_failed: bool) -> None:
        if has_failed:
            self._is_closed = True
            self._abandon()
        else:
            self.close()

    def _check(self) -> None:
        self._end.check()

    def _awaited(self, end: AwaitableEnd) -> Awaiting:
        if self._awaiting is None:
            with fork_waits:
                from memlane.broadcast.awaiting import Awaiting  # which imports asyncio

            self._awaiting = Awaiting(end)
        return self._awaiting

    def __iter__(self) -> Iterator[M]:
        self._must_be_reader("iterate")
        return self

    def __next__(self) -> M:
        try:
            return self.dequeue()
        except WriterClosed:
            raise StopIteration from None
        except StopIteration as error:  # raised by decoding; it must not end the loop
            raise RuntimeError("decoding a message raised StopIteration") from error

    def __aiter__(self) -> AsyncIterator[M]:
        self._must_be_reader("iterate")
        return self

    async def __anext__(self) -> M:
        try:
            return await self.adequeue()
        except WriterClosed:
            raise StopAsyncIteration from None
        except StopAsyncIteration as error:  # raised by decoding; it must not end the loop
            raise RuntimeError("decoding a message raised StopAsyncIteration") from error
