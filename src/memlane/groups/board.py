"""The board of a group: a key-value store in a thread of one rank, and the ranks' client for it.

Each rank keeps its connection from its first call on. If that ends, and the rank neither said that
it leaves nor connects again, the rank has died: the board lists it, and wakes all that wait. So it
has if another process comes as this rank, which takes part from the next call on.

The wire format is MessagePack over CurveZMQ, encrypted and mutually authenticated, because handles
carry secrets. A request is [number, verb, key, argument], its answer [number, value]; both are sent
in parts of `_PART` bytes, because neither side accepts larger frames from an unknown peer. A rank
that has lost its connection repeats the request that it waits for, and the board does it once: the
number shows whose it is, and which.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Thread, current_thread
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85

from memlane._base.deadline import Deadline
from memlane._base.descriptors import new_event
from memlane._base.guard import Guard
from memlane._base.lifetime import start_thread, undone_by
from memlane._base.msgspec import msgspec
from memlane._net.addresses import Address
from memlane._net.contexts import new_context
from memlane._net.sockets import (
    MOST_BYTES,
    WATCHED_BY_DEALER,
    Connecting,
    Listening,
    can_receive,
)
from memlane.errors import GroupFailed, RankMissing, SystemFault
from memlane.groups.collectives import SLICE, stall_of

if TYPE_CHECKING:
    from memlane.groups.keys import GroupKeys

_decode_request = msgspec.msgpack.Decoder(tuple[int, str, str, Any]).decode
_decode_answer = msgspec.msgpack.Decoder(tuple[int, Any]).decode
_decode_dead = msgspec.msgpack.Decoder(dict[int, tuple[int, int]]).decode
_encode = msgspec.msgpack.encode
_DEAD = "memlane/dead"
"""The key of the processes that died, by rank: the pid, and the last call that waits in vain."""
_CALLS = "memlane/calls/"
"""Begins the key of the number of calls that a rank has begun, as all its processes."""
_CLOSED = {"closed": True}
_LOOK = {"look": True}
"""The answer to a wait that ends early: the ranks that have died or left should be looked at."""
_NONSENSE = (msgspec.MsgspecError, UnicodeError, TypeError, OverflowError, RecursionError)

# Seconds that a closing board waits for ranks in the middle of a call.
_PARTING = 5.0
# Seconds after which a connection to the board that was lost, and did not come back, is over.
_RECONNECTION = 0.8
_LONGEST = 3.0e6  # seconds, for `timeout=None`; larger values overflow in C
_LONGEST_POLL = 3600.0  # seconds; poll() takes an int of milliseconds, at most 24 days
_PART = MOST_BYTES - 96  # CURVE adds less than that
_COUNT_BITS = 32  # of a request's number; the others are its store's own
_ALL_CALLS = 2**62
HANDSHAKE = 10.0
"""Seconds that a connecting peer has to prove its key."""


def _parts(message: bytes) -> list[bytes]:
    return [message[at : at + _PART] for at in range(0, len(message), _PART)] or [b""]


class _Members(Listening):
    """The board's socket.

    Attributes:
        refused: how many connections had keys that were made from another secret.
    """

    _watched = Listening._watched | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: GroupKeys, size: int) -> None:
        self.refused = 0
        self._silent = 0  # at most so many were admitted and have sent nothing yet
        member = z85.decode(keys.member.public)
        super().__init__(
            context,
            keys.board.secret,
            lambda key: 0 if key == member else None,
            size,
            HANDSHAKE,
            (zmq.LINGER, 1000),
        )

    def events(self) -> Iterator[tuple[str, int]]:
        for name, value in super().events():
            if name == "failed" and value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
                self.refused += 1
            yield name, value

    def admit(self) -> None:
        """Answers those that have proved their key, or have none."""
        self._silent += sum(1 for _ in self.accept_authenticated())

    def has_silent(self) -> bool:
        """Returns whether a member may be connected that has sent nothing yet."""
        if self._silent:
            self._silent = min(self._silent, len(self._unidentified()))
        return self._silent > 0

    def hear(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields clients and requests; a client's first request registers its connection."""
        while True:
            try:
                client = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            parts = self.socket.recv_multipart(copy=False)
            if client not in self.connections:
                connection = self.connection_of(parts[0])
                if connection is not None:
                    self.connections[client] = connection
                    self._silent = max(0, self._silent - 1)
            yield client, b"".join(part.bytes for part in parts)

    def send(self, client: bytes, message: bytes) -> None:
        """Does nothing if the client is gone."""
        try:
            self.socket.send_multipart([client, *_parts(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise


_NOT_HERE = (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EAFNOSUPPORT)


def _cannot_listen(address: Address, port: int, error: zmq.ZMQError) -> SystemFault:
    what = f"the group's board cannot listen on {address.host}:{port}: {error.strerror}"
    return SystemFault(error.errno or errno.EIO, what)


class Board:
    """Serves a group's keys and values from a thread to those who hold the group's secret."""

    def __init__(self, addresses: list[Address], port: int, keys: GroupKeys, size: int) -> None:
        self._values: dict[str, Any] = {}
        self._waiting: dict[str, dict[bytes, int]] = {}  # key -> waiting clients and their requests
        self._id = secrets.randbits(63)
        self._ranks: dict[bytes, int] = {}
        self._known: dict[int, tuple[int, int]] = {}  # rank -> its last process: store and pid
        self._in_call: set[bytes] = set()
        # rank -> it may come back until; whether it may be in a handshake even then
        self._lost: dict[int, tuple[Deadline, bool]] = {}
        self._dead: dict[int, tuple[int, int]] = {}  # as under _DEAD
        self._done: dict[int, tuple[int, Any]] = {}  # the last change of each store, its answer
        self._events = [new_event()]  # one, while it serves
        self._thread = Thread(target=self._serve, name="memlane-group", daemon=True)
        with self._undone_by(self._close_events):
            self._context = new_context()  # its own, because ZAP works per context
            with self._undone_by(lambda: self._context.destroy(linger=0)):
                self._members = _Members(self._context, keys, size)
                with self._undone_by(self._members.close):
                    self.port, self._has_port = port, bool(port)
                    self.addresses = [each for each in addresses if self._listens_on(each)]
                    if not self.addresses:
                        raise _cannot_listen(addresses[0], port, zmq.ZMQError(errno.EADDRNOTAVAIL))
                    start_thread(self._thread)

    @contextmanager
    def _undone_by(self, undo: Callable[[], object]) -> Iterator[None]:
        """Is `undone_by`; but what the thread uses, it frees itself."""
        with undone_by(undo), undone_by(self._end_thread):
            try:
                yield
            except BaseException as error:  # its frames may have a socket, which the context awaits
                clear_frames(error.__traceback__)
                raise

    def _end_thread(self) -> None:
        if self._thread.is_alive():
            self.close()

    def _listens_on(self, address: Address) -> bool:
        """Listens there, too. False: it is not an address of this host, or the port that the kernel
        has chosen at another address is in use at this one."""
        others = [errno.EADDRINUSE] if self.port and not self._has_port else []
        try:
            at = address.at(self.port) if self.port else address.at(0).removesuffix("0") + "*"
            self.port = self._members.bind(at, is_ipv6=address.is_ipv6)
        except zmq.ZMQError as error:
            if error.errno in (*_NOT_HERE, *others):
                return False
            raise _cannot_listen(address, self.port, error) from None
        return True

    @property
    def refused(self) -> int:
        """Returns how many connections had keys that were made from another secret, so far."""
        return self._members.refused

    def close(self) -> None:
        """Waits for ranks in the middle of a call, but at most `_PARTING` seconds. Idempotent, and
        can be called again if a signal handler raised in it."""
        for event in self._events:
            os.eventfd_write(event, 1)
        if self._thread is not current_thread():  # a finalizer may run there
            self._thread.join()

    def _serve(self) -> None:
        with ExitStack() as ending:
            ending.callback(self._close_events)
            ending.callback(self._members.descriptors.forget_all)
            ending.callback(self._context.destroy)
            ending.callback(self._members.close)
            self._attend()

    def _close_events(self) -> None:
        while self._events:
            os.close(self._events.pop())

    def _attend(self) -> None:
        members, parting = self._members, None
        poller = select.poll()
        for descriptor in (*members.quiet, members.readable, *self._events):
            poller.register(descriptor, select.POLLIN)
        while parting is None or (self._in_call and parting.left() > 0):
            ends = [patience for patience, _ in self._lost.values()]
            ends += [] if parting is None else [parting]
            wait = min((end.left() for end in ends), default=None)
            poller.poll(None if wait is None else int(wait * 1000) + 1)
            members.admit()
            for client, request in members.hear():
                # Malformed: from a member of another version, which times out without an answer.
                with suppress(*_NONSENSE):
                    self._take(client, request)
                if client not in members.connections:
                    self._forget(client)  # it has left, or was lost before its request was read
            for client in members.reap_unidentified():
                self._forget(client)
            self._list_dead()
            with suppress(BlockingIOError):
                os.eventfd_read(self._events[0])
                parting = parting or Deadline(_PARTING)
        for waiting in self._waiting.values():
            for client, number in waiting.items():
                self._send(client, number, _CLOSED)

    def _forget(self, client: bytes) -> None:
        """Drops the waits of a client whose connection has ended. Its rank has some time to connect
        again."""
        for key, waiting in list(self._waiting.items()):
            waiting.pop(client, None)
            if not waiting:
                del self._waiting[key]
        self._in_call.discard(client)
        rank = self._ranks.pop(client, None)
        if rank is not None and rank in self._known and rank not in self._ranks.values():
            self._lost[rank] = Deadline(_RECONNECTION), True

    def _list_dead(self) -> None:
        """Lists the ranks that did not connect again as dead, and wakes all that wait."""
        # A member's connection that has said nothing may be of one of them that computes. One that
        # has not proved its key yet may be a stranger's, so it counts once.
        is_member, dead = self._members.has_silent(), {}
        for rank, (end, is_first) in list(self._lost.items()):
            if end.left() > 0:
                continue
            if is_member or (is_first and self._members.has_unidentified()):
                self._lost[rank] = Deadline(_RECONNECTION), False
            else:
                del self._lost[rank]
                dead[rank] = self._known[rank][1], _ALL_CALLS
        if dead:
            self._note_dead(dead)

    def _note_dead(self, dead: dict[int, tuple[int, int]]) -> None:
        self._dead |= dead
        self._values[_DEAD] = _encode(self._dead)
        self._wake_all()

    def _come(self, client: bytes, store: int, rank: int, pid: int) -> None:
        """A rank begins a call, or is in one and connected again."""
        known = self._known.get(rank)
        self._known[rank] = store, pid
        self._ranks[client] = rank
        self._in_call.add(client)
        self._lost.pop(rank, None)
        if known is not None and known[0] != store:  # the process that had the rank has died
            begun = [count for key, count in self._values.items() if key.startswith(_CALLS)]
            last = max((count for count in begun if isinstance(count, int)), default=0)
            self._values[f"{_CALLS}{rank}"] = last
            self._note_dead({rank: (known[1], last)})
        elif self._dead.get(rank, (0, 0))[1] == _ALL_CALLS:  # it was only cut off
            del self._dead[rank]
            self._values[_DEAD] = _encode(self._dead)

    def _wake_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for clients in waiting.values():
            for client, number in clients.items():
                self._send(client, number, _LOOK)

    def _send(self, client: bytes, number: int, value: object) -> None:
        self._members.send(client, _encode((number, value)))

    def _take(self, client: bytes, request: bytes) -> None:
        number, verb, key, argument = _decode_request(request)
        answer: Any = None
        match verb:
            case "get":
                if key not in self._values:
                    self._waiting.setdefault(key, {})[client] = number
                    return
                answer = self._values[key]
            case "forget":
                waiting = self._waiting.get(key, {})
                waiting.pop(client, None)
                if not waiting:
                    self._waiting.pop(key, None)
                return
            case "join":
                who = msgspec.convert(argument, tuple[int, int])
                self._come(client, number >> _COUNT_BITS, *who)
                answer = self._id
            case "end":
                self._in_call.discard(client)
                return
            case "bye":
                self._known.pop(self._ranks.pop(client, -1), None)
                self._done.pop(number >> _COUNT_BITS, None)
                self._members.connections.pop(client, None)
                return
            case "has":
                answer = key in self._values
            case _:
                last, answer = self._done.get(number >> _COUNT_BITS, (None, None))
                if last != number:  # else it comes again
                    answer = self._change(verb, key, argument)
                    self._done[number >> _COUNT_BITS] = number, answer
        self._send(client, number, answer)

    def _change(self, verb: str, key: str, argument: Any) -> Any:
        """Returns the answer."""
        match verb:
            case "wake":
                self._wake_all()
            case "set":
                self._values[key] = argument
                for other, number in self._waiting.pop(key, {}).items():
                    self._send(other, number, argument)
            case "add":
                self._values[key] = self._values.get(key, 0) + argument
                return self._values[key]
            case "delete":
                self._values.pop(key, None)
        return None


class BoardStore:
    """A rank's connection to the board, and the board's values as the rank's current call sees
    them. Only one thread at a time may use it.

    Args:
        address, port: of the board.
        rank: of this process.
        keeper: the rank that has the board.

    Attributes:
        deadline: of the current call.
        host: of the board, as this rank reaches it.
        has_connected: whether the board has proved that it has the group's secret.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: Address,
        port: int,
        keys: GroupKeys,
        rank: int,
        keeper: int = 0,
    ) -> None:
        self.deadline = Deadline(0.0)
        self.host, self._place = address.host, address.at(port)
        self._rank, self._keeper = rank, keeper
        self._guard = Guard()
        self._number = self._id = secrets.randbits(63 - _COUNT_BITS) << _COUNT_BITS
        self._board: int | None = None  # the id of the board
        self._last: tuple[object, ...] = ()  # the last request
        self._begun: int | None = None  # calls, also of processes that had this rank before
        self.has_connected = self._has_answered = False
        self._lost_at: float | None = None
        self._connection = Connecting(
            context,
            WATCHED_BY_DEALER,
            keys.board.public,
            keys.member.public,
            keys.member.secret,
            (zmq.IPV6, int(address.is_ipv6)),
            (zmq.MAXMSGSIZE, MOST_BYTES),
        )
        with undone_by(lambda: self._connection.close(0)):
            self._connection.socket.connect(self._place)

    def begin(self, deadline: Deadline) -> int:
        """Begins a call, which ends at the deadline, and returns its number. If that fails, the
        next call has this number again."""
        with self._guard:
            self.deadline = deadline
            self._has_answered = False
            self._send("join", "", self._who())
            self._meet(self._answer())
        key = f"{_CALLS}{self._rank}"
        if self._begun is None:
            self._begun = self.add(key, 0)
        self._ask("set", key, self._begun + 1)
        self._begun += 1
        return self._begun

    def end(self) -> None:
        """Ends the call; the connection stays."""
        with self._guard:
            self._send("end", "", None)

    def close(self) -> None:
        """Leaves the group, and ends the connection. Idempotent."""
        with self._guard:
            if self.has_connected and not self._connection.socket.closed:
                self._send("bye", "", None)
            self.abandon(1000 if self._has_answered else 0)  # ms; none for a silent board

    def add(self, key: str, number: int) -> int:
        return int(self._ask("add", key, number))

    def set(self, key: str, value: bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str, timeout: float) -> bytes | None:
        if timeout <= 0:
            if not self.has(key):
                return None
            timeout = max(self.deadline.left(_LONGEST), 1.0)
        with self._guard:
            self._send("get", key, None)
            answer = self._receive(timeout)
            if answer is None:
                self._send("forget", key, None)
                return None
        value = answer[0]
        if not isinstance(value, bytes):
            raise GroupFailed(f"the group's board has no bytes under {key!r}", self._keeper)
        return value

    def has(self, key: str) -> bool:
        return bool(self._ask("has", key, None))

    def delete(self, key: str) -> None:
        self._ask("delete", key, None)

    def wake(self) -> None:
        self._ask("wake", "", None)

    def dead(self, number: int) -> dict[int, int]:
        """Returns the pids of the ranks that have died and are missing in that call, by rank."""
        dead = self.get(_DEAD, 0)
        died = {} if dead is None else _decode_dead(dead)
        return {rank: pid for rank, (pid, last) in died.items() if number <= last}

    def abandon(self, linger: int = 0) -> None:
        """Ends the connection, which looks like the rank's death. Idempotent."""
        self._connection.close(linger)

    def _ask(self, verb: str, key: str, argument: object) -> Any:
        with self._guard:
            self._send(verb, key, argument)
            return self._answer()

    def _answer(self) -> Any:
        deadline = self.deadline
        if self._has_answered:
            # A live board answers even after the deadline, so the error can name missing ranks.
            deadline = Deadline(max(round(deadline.left(), 1), 1.0))
        stall = stall_of(self._rank, lambda: [self._keeper])
        while (answer := self._receive(deadline.left(stall.due(SLICE)))) is None:
            if deadline.left(SLICE) == 0:
                raise RankMissing(
                    f"timed out after {deadline.timeout} s waiting for rank {self._keeper}, which "
                    f"keeps the group's board at {self._place}: not started, stopped, dead, or its "
                    f"group has a different secret",
                    self.deadline.timeout,
                    (self._keeper,),
                )
            stall.report()
        return answer[0]

    def _send(self, verb: str, key: str, argument: object) -> None:
        self._number += 1
        self._last = self._number, verb, key, argument
        self._post(*self._last)

    def _who(self) -> tuple[int, int]:
        """Is sent to show whose connection this is, and that its rank is in a call."""
        return self._rank, os.getpid()

    def _meet(self, board: Any) -> None:
        """Raises if it is not the board of the calls before, whose rank has died."""
        before, self._board = self._board, board
        if before not in (None, board):
            self._begun = None  # its calls are counted anew
            raise RankMissing(
                f"rank {self._keeper}, which kept the group's board at {self._place}, has died, "
                f"and another process has taken its place: call again on all ranks",
                self.deadline.timeout,
                (self._keeper,),
            )

    def _post(self, *request: object) -> None:
        """Drops the request if libzmq has given the connection up: there is no answer then."""
        message = _encode(request)
        try:
            self._connection.socket.send_multipart(_parts(message), zmq.NOBLOCK)
        except zmq.Again:
            pass
        except BaseException:  # from a signal handler: ends a half-sent message, to be ignored
            with suppress(zmq.Again):
                self._connection.socket.send(b"", zmq.NOBLOCK)
            raise

    def _receive(self, timeout: float) -> tuple[Any] | None:
        """Returns the answer to the last request, None if it times out or the board ends the wait;
        drops older answers."""
        end = time.monotonic() + timeout
        while self._connection.socket.get(zmq.RCVMORE):  # a signal handler interrupted
            self._connection.socket.recv()
        while self._has_news(max(0.0, end - time.monotonic())):
            number, value = self._decoded(b"".join(self._connection.socket.recv_multipart()))
            self._has_answered = True
            if number == self._id:  # connected again: the request may have been lost
                self._meet(value)
                self._post(*self._last)
            elif number == self._number:
                if value == _CLOSED:
                    text = f"rank {self._keeper} closed the group during this call"
                    raise GroupFailed(text, self._keeper)
                return None if value == _LOOK else (value,)
        return None

    def _has_news(self, timeout: float) -> bool:
        """Returns whether an answer comes in time. Handles connection events at once: a forked
        child must close the right descriptors."""
        connection, end = self._connection, time.monotonic() + timeout
        poller = select.poll()
        for descriptor in (*connection.quiet, connection.readable):
            poller.register(descriptor, select.POLLIN)
        while True:
            for name, _ in connection.events():
                if name == "connected":
                    if self.has_connected:
                        self._post(self._id, "join", "", self._who())
                    self.has_connected = True
                if name in ("lost", "connected"):
                    self._lost_at = time.monotonic() if name == "lost" else None
            if can_receive(connection.socket):
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            if self._lost_at is not None and self.has_connected:
                until_gone = self._lost_at + _RECONNECTION - time.monotonic()
                if until_gone <= 0:
                    raise self._gone()
                left = min(left, until_gone)
            poller.poll(int(min(left, _LONGEST_POLL) * 1000) + 1)

    def _gone(self) -> RankMissing:
        return RankMissing(
            f"rank {self._keeper}, which keeps the group's board at {self._place}, has died or "
            f"cannot be reached: its connection ended",
            self.deadline.timeout,
            (self._keeper,),
        )

    def _decoded(self, answer: bytes) -> tuple[int, Any]:
        try:
            return _decode_answer(answer)
        except _NONSENSE as error:
            raise GroupFailed(
                f"rank {self._keeper} sent an answer that this version of memlane cannot read: "
                f"{error}",
                self._keeper,
            ) from None
