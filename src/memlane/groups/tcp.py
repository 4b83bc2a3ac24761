"""Groups whose ranks meet at a board, and TcpGroup, the one that users make without torch."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from memlane._base.arguments import integer_from
from memlane._base.deadline import Deadline, seconds_of
from memlane._base.diagnosis import warn
from memlane._base.lifetime import Owned, undone_by
from memlane._base.msgspec import msgspec
from memlane._net.addresses import Address, addresses_of, answering
from memlane._net.contexts import new_context
from memlane.errors import Closed, GroupFailed, InvalidArgument, InvalidType, WrongProcess
from memlane.groups.board import Board, BoardStore
from memlane.groups.keys import group_keys
from memlane.groups.stores import StoreCollectives

if TYPE_CHECKING:
    from memlane.groups.keys import GroupKeys

_PATIENCE = 1.0
"""Seconds that a rank tries several addresses of the board for."""


class BoardGroup(Owned):
    """A rank's part in a group whose ranks meet at a board.

    Args:
        rank: of this process.
        world_size: number of ranks.
        keys: of the board and its members.
        addresses: of the board; the first that answers is used.
        port: of the board.
        board: if this rank keeps it, the board, which this group closes.
        keeper: the rank that keeps the board.
    """

    _instead_of_pickling = "make one in each process, with the same host and port"

    def __init__(
        self,
        rank: int,
        world_size: int,
        keys: GroupKeys,
        addresses: list[Address],
        port: int,
        board: Board | None,
        keeper: int = 0,
    ) -> None:
        self.rank, self.world_size, self.port = rank, world_size, port
        self._keys, self._addresses = keys, addresses
        self._board, self._keeper = board, keeper
        self._pid = os.getpid()
        self._kept: list[BoardStore] = []  # one, from the first call on
        self._is_closed = False
        self._context = new_context()
        self._own(partial(_close, board, self._kept, self._context, self._pid))

    def collectives(self, deadline: Deadline) -> StoreCollectives:
        """Begins a collective call of this group, which ends at the deadline.

        Raises:
            Closed: the group was closed.
            WrongProcess: the group belongs to the parent process.
        """
        self._check()
        board = self._board
        before = 0 if board is None else board.refused

        def hint() -> str:
            refused = 0 if board is None else board.refused - before
            if not refused:
                return ""
            return f"; {refused} connections were refused, because their group has another secret"

        store = self._connected(deadline)
        with undone_by(store.end):
            number = store.begin(deadline)
            return StoreCollectives(store, number, self.rank, self.world_size, hint)

    def _connected(self, deadline: Deadline) -> BoardStore:
        """Returns the connection that is kept; a new one unless it has been to the board."""
        if self._kept and not self._kept[0].has_connected:
            self._kept[0].close()
            self._kept.clear()
        if not self._kept:
            place = self._reach(deadline)
            store = BoardStore(self._context, place, self.port, self._keys, self.rank, self._keeper)
            self._kept.append(store)
        return self._kept[0]

    def _reach(self, deadline: Deadline) -> Address:
        """Returns the board's address that answers; if none does yet, the likeliest one."""
        if len(self._addresses) == 1:
            return self._addresses[0]
        address, has_answered = answering(self._addresses, self.port, deadline.left(_PATIENCE))
        if has_answered:
            self._addresses = [address]
        return address

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise WrongProcess(
                "this group belongs to the parent process; make a new one in the child"
            )
        if self._is_closed:
            raise Closed("this group is closed")

    def close(self) -> None:
        """Idempotent. On rank 0 it also ends the others' calls, so close rank 0 last.

        Raises:
            ConcurrentUse: another thread is in a call of this group.
        """
        if os.getpid() == self._pid:
            for store in self._kept:
                store.close()
        self._end()

    def _end_block(self, has_failed: bool) -> None:
        (self._end if has_failed else self.close)()

    def _end(self) -> None:
        self._is_closed = True
        self._abandon()

    def __repr__(self) -> str:
        state = " closed" if self._is_closed else ""
        place = self._addresses[0].at(self.port)
        return f"<{type(self).__name__} {place} rank {self.rank} of {self.world_size}{state}>"


class TcpGroup(BoardGroup):
    """Processes that meet at rank 0's address, to build queues with each other.

    Args:
        host: address or name at which all ranks reach rank 0's host; rank 0 listens there only. If
            the name has several addresses, rank 0 listens on those of its host, and the others use
            the first that answers.
        port: rank 0's port; 0 on rank 0 lets the kernel choose one, which `port` then holds.
        rank: of this process, from 0 to world_size - 1.
        world_size: number of processes in the group.
        secret: at least 16 random bytes (`secrets.token_hex()`), the same on all ranks. Pass it in
            an environment variable or a file, not on a command line.
        timeout: of each call of the group, in seconds; None: no limit.

    Raises:
        InvalidArgument: numbers that are out of range, or a short secret.
        SystemFault: rank 0 cannot listen there, or the host is not known.

    All traffic is encrypted, and authenticated both ways by the secret (CurveZMQ): strangers can
    connect, but cannot read, write or be counted. Values are sent as plain data (MessagePack),
    never pickled. Rank 0 keeps the others' data in its own thread; when it closes, it waits some
    seconds for ranks in the middle of a call. The others keep a connection to it from their first
    call on, by whose end a death is noticed.

    Example::

        secret = secrets.token_hex()  # the same on all ranks
        with TcpGroup("127.0.0.1", 0, rank=0, world_size=1, secret=secret) as group:
            queue = MessageQueue.create_from_process_group(group, 1 << 20, 10)
            queue.close()
    """

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        *,
        secret: str | bytes,
        timeout: float | None = 300.0,
    ) -> None:
        world_size = integer_from("world_size", world_size, 1)
        rank = integer_from("rank", rank, 0)
        if rank >= world_size:
            raise InvalidArgument(f"rank must be below the world_size of {world_size}, not {rank}")
        port = integer_from("port", port, 0)
        if port > 65535 or (port == 0 and rank != 0):
            raise InvalidArgument(f"port must be that of rank 0 (at most 65535), not {port}")
        seconds_of(timeout)
        self.timeout = timeout
        keys, addresses, board = group_keys(secret), addresses_of(host), None
        with ExitStack() as failing:
            if rank == 0:
                board = Board(addresses, port, keys, world_size)
                failing.callback(board.close)
                if world_size > 1:
                    _warn_of_loopback(host, board.addresses)
                addresses, port = board.addresses[:1], board.port
            super().__init__(rank, world_size, keys, addresses, port, board)
            failing.pop_all()

    def broadcast_obj(self, obj: Any, src: int, timeout: float | None = None) -> Any:
        """Returns rank `src`'s `obj` on all ranks. Plain data only: types that MessagePack has.

        All ranks must make their calls in the same order. `src` does not wait for the others.

        Raises:
            InvalidType: `obj` is not plain data.
            RankMissing: `src`, or rank 0, did not answer within `timeout` seconds (None: the
                group's).
            GroupFailed: `src` failed or sent what cannot be decoded, or rank 0 closed the group.
        """
        src = integer_from("src", src, 0)
        if src >= self.world_size:
            raise InvalidArgument(f"there is no rank {src} in a group of {self.world_size}")
        deadline = Deadline(self.timeout if timeout is None else timeout)
        with self.collectives(deadline) as call:
            packed = call.deliver(src, lambda: _packed(obj))
        if src == self.rank:
            return obj
        try:
            return msgspec.msgpack.decode(packed)
        except (msgspec.MsgspecError, UnicodeError, TypeError, RecursionError) as error:
            raise GroupFailed(f"rank {src} sent an undecodable object: {error}", src) from None


def _warn_of_loopback(host: str, addresses: list[Address]) -> None:
    """Rank 0's own name often means 127.0.1.1 in its /etc/hosts, and another address elsewhere."""
    if host.startswith("localhost") or not all(each.is_loopback for each in addresses):
        return
    if addresses[0].host != host:
        warn(
            "rank 0 listens on %s, which is what %r means on its own host (see /etc/hosts there): "
            "ranks on other hosts cannot connect; pass an address that they reach",
            addresses[0].host,
            host,
        )


def _packed(obj: object) -> bytes:
    try:
        return msgspec.msgpack.encode(obj)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidType(f"a group's objects must be plain data: {error}") from None


def _close(
    board: Board | None,
    kept: list[BoardStore],
    context: zmq.Context[zmq.Socket[bytes]],
    pid: int,
) -> None:
    if os.getpid() != pid:  # a forked child does not own the group or its threads
        return
    if board is not None:
        board.close()
    while kept:
        kept.pop().abandon()
    context.destroy()
