"""Collective calls through a board, a key-value store that all ranks can reach.

Unlike a communication library's collectives, a store shows which ranks are missing, and giving up a
wait does no harm. Nothing read from a store is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from memlane._base.msgspec import msgspec
from memlane.errors import GroupFailed, RankMissing
from memlane.groups.collectives import (
    SLICE,
    Collectives,
    Outcome,
    dead_error,
    missing_error,
    stall_of,
)

if TYPE_CHECKING:
    from memlane.groups.board import BoardStore

_encode = msgspec.msgpack.encode


class StoreCollectives(Collectives):
    """One collective call through a store.

    Every rank counts its calls in the store, and keys begin with that number, so calls never see
    each other's keys, even if one fails. A rank that leaves a call with an error says so under the
    number of that call: ranks that wait in it, or join later, see it at once. A rank deletes its
    keys once a gather has shown that everybody has read them. Keys that a call leaves behind are
    deleted in the next one, once a gather has shown that everybody has joined it.

    Args:
        number: of the call.
        hint: returns what the error about missing ranks should say besides.
    """

    def __init__(
        self,
        store: BoardStore,
        number: int,
        rank: int,
        size: int,
        hint: Callable[[], str] = str,
    ) -> None:
        super().__init__(rank, size, store.deadline, store.host)
        self._hint = hint
        self._store = store
        self._number = number
        self._call = f"memlane/{number}"
        self._own: list[str] = []
        self._rest = f"memlane/rest/{rank}"  # lists the keys that earlier calls left
        self._is_joined = False  # everybody is in this call, so nobody is in an older one
        self._step = 0
        self._is_over = False  # somebody has left this call, which all others will see

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            # Errors of other ranks are known there; a store that does not answer cannot be told.
            if kind is not None and not issubclass(kind, (GroupFailed, RankMissing)):
                self._leave((), f"rank {self.rank} of the group failed: {kind.__name__}: {error}")
            if self._is_over:
                self._clear_after_leavers()
            if self._own:
                older = [key for key in self._older() if self._store.has(key)]
                self._store.set(self._rest, _encode(self._own + older))
        finally:
            self._store.end()

    def deliver(self, src: int, make: Callable[[], Any]) -> Any:
        """`broadcast` as the only step of a call; the last rank to read the value deletes it."""
        value = self.broadcast(src, make)
        self._own.clear()
        key = f"{self._call}/{self._step}"
        has_read = self.rank != src and self._store.add(f"{key}/read", 1)
        if self.size == 1 or has_read == self.size - 1:
            self._store.delete(key)
            self._store.delete(f"{key}/read")
        return value

    # Steps ----------------------------------------------------------------------------------

    def _broadcast(self, src: int, outcome: Outcome | None) -> Outcome:
        key = self._begin()
        if outcome is None:
            value: Outcome = self._take(key, src)
            return value
        self._post(key, outcome)
        return outcome

    def _scatter(self, src: int, outcomes: Sequence[Outcome] | None) -> Outcome:
        key = self._begin()
        if outcomes is None:
            value: Outcome = self._take(f"{key}/{self.rank}", src)
            return value
        for rank, outcome in enumerate(outcomes):
            if rank != src:
                self._post(f"{key}/{rank}", outcome)
        return outcomes[src]

    def _gather(self, outcome: Outcome) -> list[Outcome]:
        """Rank 0 collects and redistributes, which takes 2 * size messages, not size ** 2."""
        key = self._begin()
        posts = [f"{key}/{rank}" for rank in range(self.size)]

        def missing() -> list[int]:
            return [rank for rank in range(self.size) if not self._store.has(posts[rank])]

        spent = self._own
        self._own = []
        self._post(posts[self.rank], outcome)
        if self.rank == 0:
            others = enumerate(posts[1:], 1)
            outcomes = [outcome, *(self._take(post, rank, missing) for rank, post in others)]
            self._post(f"{key}/all", outcomes)
            spent.append(posts[0])
        else:
            outcomes = self._take(f"{key}/all", 0, missing)
            if not isinstance(outcomes, list) or len(outcomes) != self.size:
                raise _foreign(0, f"it does not contain {len(posts)} outcomes")
            spent += self._own
            self._own = []
        if not self._is_joined:
            spent += self._older()
            self._is_joined = True
        for old in spent:
            self._store.delete(old)
        return list(outcomes)

    # Keys -----------------------------------------------------------------------------------

    def _older(self) -> list[str]:
        """Keys that earlier calls of this rank left and that are not deleted yet."""
        if self._is_joined:
            return []
        rest = self._store.get(self._rest, 0)
        return [] if rest is None else list(_decoded(rest, self.rank, list[str]))

    def _begin(self) -> str:
        self._look_for_leavers()
        self._step += 1
        return f"{self._call}/{self._step}"

    def _post(self, key: str, value: object) -> None:
        self._own.append(key)
        self._store.set(key, _encode(value))

    def _take(self, key: str, src: int, missing: Callable[[], list[int]] = list) -> Any:
        """Returns the value that rank `src` sets for `key`. While it waits, it blames the ranks
        that `missing` returns, or `src` if there are none."""
        stall = stall_of(self.rank, lambda: missing() or [src])
        while True:
            left = self.deadline.left(stall.due(SLICE))
            value = self._store.get(key, left)
            if value is not None:
                return self._unless_over(_decoded(value, src), src)
            self._look_for_leavers()
            if dead := self._dead([*missing(), src]):
                died = dead_error(self.size, dead, self.deadline.timeout)
                self._leave(list(dead), f"rank {self.rank}: {died}")
                raise died
            if self.deadline.left() == 0:
                absent = missing() or [src]
                value = self._store.get(key, 0)  # set meanwhile: those ranks have moved on
                if value is not None:
                    return self._unless_over(_decoded(value, src), src)
                self._look_for_leavers()  # a leaver may have set a missing key to `over`
                error = missing_error(self.size, absent, self.deadline.timeout, self._hint())
                self._leave(absent, f"rank {self.rank} {error}")
                raise error
            stall.report()

    def _dead(self, awaited: Sequence[int]) -> dict[int, int]:
        """The pids of those awaited ranks that have died, by rank."""
        dead = self._store.dead(self._number)
        return {rank: pid for rank, pid in dead.items() if rank in awaited}

    def _leave(self, missing: Sequence[int], text: str) -> None:
        self._own.append(f"{self._call}/left")
        self._store.set(self._own[-1], _encode({"over": [self.rank, missing, text]}))
        self._store.wake()
        self._is_over = True

    def _clear_after_leavers(self) -> None:
        """The last rank to leave a failed call deletes its marks: nobody looks for them now."""
        left = f"{self._call}/left"
        self._own.append(f"{left}/counted")
        if self._store.add(self._own[-1], 1) == self.size:
            for key in (left, self._own[-1]):
                self._store.delete(key)
            self._own = [key for key in self._own if not key.startswith(left)]

    def _look_for_leavers(self) -> None:
        if not self._store.has(f"{self._call}/left"):
            return
        value = self._store.get(f"{self._call}/left", 0)
        if value is not None:
            self._unless_over(_decoded(value, None), None)

    def _unless_over(self, value: Any, src: int | None) -> Any:
        """Returns `value`; raises if it says that somebody has left the call."""
        if not isinstance(value, dict) or "over" not in value:
            return value
        try:
            rank, missing, text = msgspec.convert(value["over"], _Over)
        except msgspec.ValidationError as error:
            raise _foreign(src, str(error)) from None
        self._is_over = True
        if self.rank in missing:
            text = f"{text}; this is rank {self.rank}, which was too late: call again on all ranks"
        if missing:
            raise RankMissing(text, self.deadline.timeout, missing)
        raise GroupFailed(text, rank)


_Over = tuple[int, tuple[int, ...], str]
"""The rank that left a call, the ranks that it missed, and its error text."""


def _decoded(value: bytes, rank: int | None, kind: Any = Any) -> Any:
    """Decodes what `rank` has written."""
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _foreign(rank, str(error)) from None


def _foreign(rank: int | None, why: str) -> GroupFailed:
    who = "no rank" if rank is None else f"rank {rank}"
    return GroupFailed(
        f"the group's store holds an invalid value under a key of {who}: {why}", rank
    )
