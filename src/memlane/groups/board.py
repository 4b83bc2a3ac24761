"""The board of a TcpGroup: keys and values in a thread of rank 0, and how a rank reaches it.

All that is on the wire is MessagePack in CurveZMQ: authenticated both ways and encrypted, because
handles carry secrets. A request is [number, verb, key, argument], the answer [number, value].
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85

from memlane import _threads
from memlane._contexts import new_context
from memlane._msgspec import msgspec
from memlane._undo import undone_by
from memlane.errors import GroupFailed, RankMissing, SystemFault
from memlane.groups.collectives import SLICE, Deadline, Waiting

if TYPE_CHECKING:
    from memlane.groups.keys import GroupKeys

_decode_request = msgspec.msgpack.Decoder(tuple[int, str, str, Any]).decode
_decode_answer = msgspec.msgpack.Decoder(tuple[int, Any]).decode
_encode = msgspec.msgpack.encode
_CLOSED = {"closed": True}
_NONSENSE = (msgspec.MsgspecError, UnicodeError, TypeError, OverflowError, RecursionError)

_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"memlane group"
# A board that is closed waits so long for ranks in the middle of a call, and looks so often whether
# they live.
_PARTING = 5.0
_SLICE = 0.1
_LONGEST = 3.0e6
# A stranger's first bytes must not make this process allocate what they say.
_MOST_BYTES = 1 << 28


def address_of(host: str, port: int) -> tuple[str, bool]:
    """As ZeroMQ takes it, and whether it is IPv6."""
    try:
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SystemFault(error.errno, f"the group's host {host!r} is not known: {error}") from None
    is_ipv6 = family == socket.AF_INET6
    return f"tcp://[{found[0]}]:{port}" if is_ipv6 else f"tcp://{found[0]}:{port}", is_ipv6


class Board:
    """Serves the keys and values of a group from a thread, to holders of the group's secret."""

    def __init__(self, host: str, port: int, keys: GroupKeys) -> None:
        self._member = keys.member.public
        self._values: dict[str, Any] = {}
        self._waiting: dict[str, dict[bytes, int]] = {}  # key -> waiting clients and their requests
        self._clients: set[bytes] = set()
        self._context = new_context()  # its own: ZAP decides per context
        with undone_by(lambda: self._context.destroy(linger=0)):
            self._open(host, port, keys)

    def _open(self, host: str, port: int, keys: GroupKeys) -> None:
        try:
            self._end = self._context.socket(zmq.PAIR)
            self._end.bind("inproc://end")
            self._zap = self._context.socket(zmq.REP)
            self._zap.bind(_ZAP)
            self._router = self._context.socket(zmq.ROUTER)
            self._router.linger = 1000
            self._router.maxmsgsize = _MOST_BYTES
            self._router.router_mandatory = True  # a client that is gone is an error
            self._router.curve_server = True
            self._router.curve_secretkey = keys.board.secret
            self._router.zap_domain = _DOMAIN
            address, self._router.ipv6 = address_of(host, port)
            self._router.bind(address)
            self.port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
            self._thread = Thread(target=self._serve, name="memlane-group", daemon=True)
            _threads.start(self._thread)
        except zmq.ZMQError as error:
            raise SystemFault(
                error.errno, f"rank 0 cannot listen on {host}:{port}: {error.strerror}"
            ) from None

    def close(self) -> None:
        """Returns when nobody is in the middle of a call any more, or after some seconds."""
        if self._end.closed:
            return
        self._end.send(b"")
        self._thread.join()
        self._context.destroy()

    def _serve(self) -> None:
        end = self._context.socket(zmq.PAIR)
        end.connect("inproc://end")
        poller = zmq.Poller()
        for each in (self._zap, self._router, end):
            poller.register(each, zmq.POLLIN)
        parting: Deadline | None = None
        while parting is None or (self._clients and parting.left() > 0):
            ready = dict(poller.poll(None if parting is None else int(parting.left(_SLICE) * 1000)))
            if self._zap in ready:
                self._let_in()
            if self._router in ready:
                client, *request = self._router.recv_multipart()
                # Of a member of another version, which learns by its deadline that nobody answers.
                with suppress(*_NONSENSE):
                    self._take(client, b"".join(request))
            if end in ready:
                end.recv()
                parting = Deadline(_PARTING)
            if parting is not None and not ready:
                for client in list(self._clients):
                    self._send(client, 0, None)  # fails if the client is gone
        for waiting in self._waiting.values():
            for client, number in waiting.items():
                self._send(client, number, _CLOSED)
        end.close()

    def _let_in(self) -> None:
        """Answers ZeroMQ's question (RFC 27) whether a client may come in."""
        version, request, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
        is_member = mechanism == b"CURVE" and z85.encode(credentials[0]) == self._member
        status = [b"200", b"OK"] if is_member else [b"400", b"not a member of this group"]
        self._zap.send_multipart([version, request, *status, b"", b""])

    def _send(self, client: bytes, number: int, value: object) -> None:
        try:
            self._router.send_multipart([client, _encode((number, value))], zmq.NOBLOCK)
        except zmq.ZMQError:  # it is gone
            self._clients.discard(client)

    def _take(self, client: bytes, request: bytes) -> None:
        number, verb, key, argument = _decode_request(request)
        self._clients.add(client)
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
            case "bye":
                self._clients.discard(client)
                return
            case "has":
                answer = key in self._values
            case "set":
                self._values[key] = argument
                for other, their_number in self._waiting.pop(key, {}).items():
                    self._send(other, their_number, argument)
            case "add":
                answer = self._values[key] = self._values.get(key, 0) + argument
            case "delete":
                self._values.pop(key, None)
        self._send(client, number, answer)


class BoardStore:
    """The board as one rank sees it during one collective call; a connection of its own."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        keys: GroupKeys,
        rank: int,
        deadline: Deadline,
    ) -> None:
        self._address = address
        self._rank = rank
        self._deadline = deadline
        self._number = 0
        self._has_answered = False
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.ipv6 = "[" in address
        self._socket.curve_serverkey = keys.board.public
        self._socket.curve_publickey = keys.member.public
        self._socket.curve_secretkey = keys.member.secret
        self._socket.connect(address)

    def add(self, key: str, number: int) -> int:
        return int(self._ask("add", key, number))

    def set(self, key: str, value: bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str, timeout: float) -> bytes | None:
        if timeout <= 0:
            if not self.has(key):
                return None
            timeout = max(self._deadline.left(_LONGEST), 1.0)
        self._send("get", key, None)
        answer = self._receive(timeout)
        if answer is None:
            self._send("forget", key, None)
            return None
        value = answer[0]
        if not isinstance(value, bytes):
            raise GroupFailed(f"the group's board has no bytes under {key!r}", 0)
        return value

    def has(self, key: str) -> bool:
        return bool(self._ask("has", key, None))

    def delete(self, key: str) -> None:
        self._ask("delete", key, None)

    def close(self, over: bytes) -> None:
        if self._has_answered:
            self._send("bye", "", None)
            self._socket.linger = 1000  # else nothing is worth waiting for
        self._socket.close()

    def _ask(self, verb: str, key: str, argument: object) -> Any:
        self._send(verb, key, argument)
        deadline = self._deadline
        if self._has_answered:
            # What works answers at once, behind the deadline, too: it then names the missing.
            deadline = Deadline(max(deadline.left(), 1.0))
        waiting = Waiting(self._rank)
        while (answer := self._receive(deadline.left(waiting.due(SLICE)))) is None:
            if deadline.left(SLICE) == 0:
                raise RankMissing(
                    f"gave up after {deadline.timeout:.1f} s waiting for rank 0, which keeps the "
                    f"group's board at {self._address}: not started, dead, or its group has "
                    f"another secret",
                    (0,),
                    self._deadline.timeout,
                )
            waiting.report(lambda: [0])
        return answer[0]

    def _send(self, verb: str, key: str, argument: object) -> None:
        self._number += 1
        self._socket.send(_encode((self._number, verb, key, argument)))

    def _receive(self, timeout: float) -> tuple[Any] | None:
        """The answer to the last request, None if it does not come; older ones are dropped."""
        end = time.monotonic() + timeout
        while self._socket.poll(int(max(0.0, end - time.monotonic()) * 1000)):
            number, value = _decode_answer(self._socket.recv())
            self._has_answered = True
            if number == self._number:
                if value == _CLOSED:
                    raise GroupFailed("rank 0 closed the group in the middle of this call", 0)
                return (value,)
        return None
