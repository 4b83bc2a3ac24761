"""Lets the ranks of a torch.distributed group meet: by the address of a board in the group's store.

The first rank to come keeps the board; nothing else goes through the store, which shows no deaths.
Imported only once the caller has imported torch.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch.distributed as dist

from memlane._base.deadline import Deadline
from memlane._base.lifetime import start_thread, undone_by
from memlane._base.msgspec import msgspec
from memlane._net.addresses import Address, addresses_of, answering, own_address
from memlane.errors import GroupFailed, RankMissing, Unsupported
from memlane.groups.board import Board
from memlane.groups.keys import group_keys
from memlane.groups.tcp import BoardGroup

_LOOPBACK = Address("127.0.0.1", False)
_LONGEST = 3.0e6  # seconds
_GRACE = 10.0
"""Seconds that a board may take to accept a connection before it counts as gone."""
_THREAD = "memlane-store"


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """The entry that the rank with the board writes into the group's store."""

    secret: str
    port: int  # 0: it is withdrawn
    addresses: list[Address]
    rank: int
    pid: int
    host: str  # which processes reach the board by the loopback address


def _text(offer: _Offer) -> str:
    return msgspec.json.encode(offer).decode()


def _withdrawn(offer: _Offer) -> str:
    return _text(msgspec.structs.replace(offer, port=0))


def is_process_group(group: object) -> bool:
    """True for any backend, because only the group's store is used."""
    return dist.is_available() and isinstance(group, dist.ProcessGroup)


def is_torch_store(store: object) -> bool:
    """For groups that are not torch's own but have a torch store."""
    return dist.is_available() and isinstance(store, dist.Store)


def store_of(group: Any) -> Any:
    """The store through which the ranks of this very group found each other."""
    try:
        if hasattr(group, "get_group_store"):
            return group.get_group_store()
        return dist.distributed_c10d._get_process_group_store(group)  # before torch 2.6
    except (RuntimeError, KeyError) as error:
        raise Unsupported(f"this process group has no store: {error}") from None


def group_over(group: Any, store: Any, rank: int, size: int, deadline: Deadline) -> BoardGroup:
    """Returns the part of this process in `group`, from its first call to the group's end.

    Raises:
        RankMissing: the store has not answered by the deadline, or the rank that keeps the board
            has died.
        GroupFailed: the store is gone.
    """
    part = _parts.get(id(group))
    if part is None:
        end = weakref.finalize(group, _leave, id(group))
        end.atexit = False  # the part itself ends with the interpreter
        with undone_by(end.detach):
            part = _parts[id(group)] = _meet(store, rank, size, deadline)
    return part


_parts: dict[int, BoardGroup] = {}


def _leave(group: int) -> None:
    _parts.pop(group).close()


def _meet(store: Any, rank: int, size: int, deadline: Deadline) -> BoardGroup:
    exchange = _Exchange(store, rank, deadline)
    while True:
        offer = exchange.meet()
        if offer is None:
            part = _founded(exchange, _host_of(store), rank, size)
        elif offer.port:
            part = _joined(exchange, offer, rank, size, deadline)
        else:
            exchange.count()
            continue
        if part is not None:
            return part


def _founded(exchange: _Exchange, host: str | None, rank: int, size: int) -> BoardGroup | None:
    """Offers a board of this rank's. None: another rank was first."""
    secret = secrets.token_hex()
    keys, own_host = group_keys(secret), own_address(host)
    addresses = [*([] if own_host is None else addresses_of(own_host)), _LOOPBACK]
    board = Board(list(dict.fromkeys(addresses)), 0, keys, size)
    with undone_by(board.close):
        part = BoardGroup(rank, size, keys, board.addresses[-1:], board.port, board, rank)
    with undone_by(part.close):
        own = _Offer(secret, board.port, board.addresses, rank, os.getpid(), _network())
        with undone_by(lambda: exchange.withdraw(own)):
            if exchange.meet(own) == own:
                exchange.count()
                return part
    part.close()
    return None


def _joined(
    exchange: _Exchange, offer: _Offer, rank: int, size: int, deadline: Deadline
) -> BoardGroup | None:
    """Comes to another rank's board. None: it was withdrawn."""
    is_here = offer.host == _network() != ""
    reached = [each for each in offer.addresses if is_here or not each.is_loopback]
    patience = deadline.left(_GRACE)
    address, has_answered = answering(reached or offer.addresses, offer.port, patience)
    if has_answered:
        keys = group_keys(offer.secret)
        part = BoardGroup(rank, size, keys, [address], offer.port, None, offer.rank)
        with undone_by(part.close):
            exchange.count()
        return part
    text = (
        f"rank {offer.rank} (pid {offer.pid}), which keeps the group's board at "
        f"{address.at(offer.port)}, has died or cannot be reached"
    )
    if has_answered is False and reached:  # nobody listens there, nor will
        is_withdrawn = exchange.meet() != offer
        exchange.count()
        if is_withdrawn or offer.rank == rank:
            return None
    elif deadline.has_passed():
        text = (
            f"timed out after {deadline.timeout} s waiting for rank {offer.rank} "
            f"(pid {offer.pid}), which keeps the group's board at {address.at(offer.port)}"
        )
    raise RankMissing(text, deadline.timeout, (offer.rank,))


def _host_of(store: Any) -> str | None:
    """Returns the host of a TCPStore; None of another kind."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return host if isinstance(host, str) else None


def _network() -> str:
    """The kernel's boot id and the network namespace; "" where /proc does not show them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


class _Exchange:
    """A rank's requests to the store of its group.

    A torch operation cannot be cancelled, and blocks while the process that hosts the store is
    stopped. So operations run in a thread, over their own connection, so that other users of the
    group's store are not blocked with them. Groups may be made anew over the same store: each rank
    counts the boards that it has met or found closed, and the offers have that number. An offer
    stays, if only as withdrawn, so that all ranks count it.
    """

    def __init__(self, store: Any, rank: int, deadline: Deadline) -> None:
        self._deadline = deadline
        self._is_given_up = False
        self._counter = f"memlane/met/{rank}"
        # Fails at once if the store is gone; a new connection would retry for long.
        self._ask(lambda: store.check(["memlane"]))
        self._store = self._ask(lambda: store.clone() if hasattr(store, "clone") else store)
        self._met: int = self._ask(lambda: self._store.add(self._counter, 0))

    def meet(self, own: _Offer | None = None) -> _Offer | None:
        """Returns the board that was offered first, maybe `own`; None if there is none yet."""
        key = self._key

        def meet() -> bytes:
            if own is None and not self._store.check([key]):
                return b""
            first: bytes = self._store.compare_set(key, "", "" if own is None else _text(own))
            if own is not None and self._is_given_up:
                self._store.compare_set(key, _text(own), _withdrawn(own))
            return first

        offer = self._ask(meet)
        try:
            return msgspec.json.decode(offer, type=_Offer) if offer else None
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise GroupFailed(f"the group's store holds an invalid board: {error}") from None

    def withdraw(self, own: _Offer) -> None:
        """Marks the offer, if it is there."""
        self._undo(self._key, _text(own), _withdrawn(own))

    def count(self) -> None:
        """Goes on to the next board, unless the call is given up."""
        before, after = str(self._met), str(self._met + 1)

        def count() -> None:
            self._store.compare_set(self._counter, before, after)
            if self._is_given_up:
                self._store.compare_set(self._counter, after, before)

        with undone_by(lambda: self._undo(self._counter, after, before)):
            self._ask(count)
            self._met += 1

    def _undo(self, key: str, done: str, instead: str) -> None:
        """Waits at most a second for a store that does not answer."""
        self._is_given_up = True
        thread = Thread(target=self._quietly, args=(key, done, instead), name=_THREAD, daemon=True)
        start_thread(thread)
        thread.join(self._deadline.left(1.0))

    def _quietly(self, *change: str) -> None:
        with suppress(RuntimeError):  # the store is gone, which the call's own error tells
            self._store.compare_set(*change)

    @property
    def _key(self) -> str:
        return f"memlane/board/{self._met}"

    def _ask(self, operation: Callable[[], Any]) -> Any:
        outcome: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()

        def run() -> None:
            try:
                outcome.put((operation(), None))
            except Exception as error:
                outcome.put((None, error))

        thread = Thread(target=run, name=_THREAD, daemon=True)
        start_thread(thread)
        try:
            value, error = outcome.get(timeout=self._deadline.left(_LONGEST))
            thread.join()
        except BaseException as reason:
            self._is_given_up = True
            if not isinstance(reason, Empty):  # but a signal handler's
                raise
            raise RankMissing(
                f"timed out after {self._deadline.timeout} s waiting for the store of the process "
                f"group: the process that keeps it (usually rank 0's) is stopped, busy or "
                f"unreachable",
                self._deadline.timeout,
            ) from None
        if isinstance(error, RuntimeError):
            text = f"the store of the process group does not answer: {error}"
            raise GroupFailed(text) from error
        if error is not None:
            raise error
        return value
