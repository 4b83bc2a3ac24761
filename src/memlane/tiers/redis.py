"""A tier on a Redis or Valkey server. Needs `memlane[redis]`.

redis-py connects, authenticates and encrypts. The blocks themselves go past it: a batch is one
`sendmsg` of the rows as they lie in memory, and replies are read into the tier's memory, so that no
byte is copied by the interpreter.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from memlane import _native
from memlane._base.arguments import integer_from
from memlane._importing import fork_waits
from memlane.errors import AccessRefused, InvalidArgument, InvalidType, Unsupported, system_fault
from memlane.tiers.remote import Cut, Late, Refusal, Refused, RemoteTier, Unanswered

_SCRATCH = 4096
_MOST_PARTS = 512  # of one sendmsg; the system takes 1024


class RedisTier(RemoteTier):
    """Blocks on a Redis or Valkey server, which evicts them by its own `maxmemory-policy`::

        with RedisTier("redis://cache:6379/0", region.rows, namespace="llama-3-8b") as tier:
            ticket = tier.store(keys, ids)
            for done in tier.poll():
                ...

    Each block has a CRC-32C seeded with its key: other bytes than were stored are a miss. A server
    that does not answer is left alone for a second, then two, up to a minute; meanwhile its blocks
    fail at once, and the log says so once. Everybody who may read the server may read the blocks,
    which encode what prompts were about: use a password and `rediss://`.

    Timeouts are in seconds. A batch of up to 32 blocks, or 4 MiB, is under way on each connection;
    each has a thread, and memory for a batch.
    """

    what = "a Redis tier"

    def __init__(
        self,
        url: str,
        rows: Any,
        *,
        namespace: str | bytes = b"",
        timeout: float = 5.0,
        connections: int = 2,
        ttl: int | None = None,
        **options: Any,
    ) -> None:
        """Args:
            url: as redis-py takes it: `redis://[user:password@]host:port/database`, `rediss://` for
                TLS, or `unix://path`.
            rows: a writable, contiguous buffer of shape (blocks, bytes), which must not be freed
                before the tier is closed.
            namespace: what the same key may mean different blocks under: model, revision, dtype,
                layout, tenant. Blocks of other namespaces are not found.
            timeout: of `store`, `load`, `drain` and `close`, in seconds, unless they are given one.
            connections: 1 to 64, each with a thread.
            ttl: seconds after which the server forgets a block; None: it decides itself.
            options: of redis-py's connection, as `ssl_ca_certs`.

        Raises:
            InvalidType, InvalidArgument: an argument is none.
            Unsupported: redis-py is not installed.
            AccessRefused: the server wants another password, or its certificate does not fit.
            SystemFault: the server cannot be reached, or is none.
        """
        try:
            with fork_waits:
                import redis
        except ImportError:
            raise Unsupported("RedisTier needs redis-py: pip install 'memlane[redis]'") from None
        if not isinstance(url, str):
            raise InvalidType(f"url must be a string, not {type(url).__name__}")
        count = integer_from("connections", connections, 1, 64)
        seconds = None if ttl is None else integer_from("ttl", ttl, 1, 1 << 31)
        try:
            pool = redis.ConnectionPool.from_url(url, **options)
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"url is none that redis-py takes: {error}") from None

        def connect(timeout: float) -> _Connection:
            return _Connection(pool, timeout, seconds)

        def connect_first(timeout: float) -> _Connection:
            try:
                made = connect(timeout)
                try:
                    made.ask([b"memlane"], timeout)
                except BaseException:
                    made.close()
                    raise
                return made
            except (TypeError, ValueError) as error:
                raise InvalidArgument(f"redis-py refuses its options: {error}") from None
            except (Unanswered, Refused) as error:
                cause = error.__cause__
                is_refused = isinstance(cause, redis.AuthenticationError) or any(
                    word in str(error) for word in ("NOAUTH", "NOPERM", "WRONGPASS")
                )
                if is_refused or _is_about_certificates(cause):
                    raise AccessRefused(f"the Redis server refuses this client: {error}") from None
                text = f"cannot use the Redis server: {error}"
                raise system_fault(getattr(cause, "errno", None) or errno.EIO, text) from None

        super().__init__(
            rows,
            connect,
            connect_first,
            prefix=b"memlane:",
            namespace=namespace,
            timeout=timeout,
            connections=count,
        )


def _is_about_certificates(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Connection:
    """One connection, speaking RESP."""

    def __init__(self, pool: Any, timeout: float, ttl: int | None) -> None:
        with fork_waits:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry

        settings = {
            # The pool's notifications need RESP3.
            **{k: v for k, v in pool.connection_kwargs.items() if "maint_notifications" not in k},
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),  # the tier says when
        }
        self._connection = pool.connection_class(**settings)
        self._end = time.monotonic() + timeout
        # redis-py's own timeouts are of each read: a server that dribbles would have for ever.
        guard = threading.Timer(timeout, self._give_up)
        guard.daemon = True
        try:
            guard.start()
        except RuntimeError as error:
            raise Unanswered(f"cannot start a thread: {error}") from error
        try:
            self._connection.connect()
        except (redis.RedisError, OSError, UnicodeError) as error:
            is_late = isinstance(error, redis.TimeoutError) or time.monotonic() >= self._end
            raise (Late if is_late else Unanswered)(str(error) or type(error).__name__) from error
        finally:
            guard.cancel()
        self._socket: socket.socket = self._connection._sock
        self._is_plain = not isinstance(self._socket, ssl.SSLSocket)
        self._options = [b"NX"] if ttl is None else [b"NX", b"EX", b"%d" % ttl]
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._have = self._scratch[:0]  # read, and not looked at

    def _give_up(self) -> None:
        with suppress(OSError, AttributeError):
            self._connection._sock.shutdown(socket.SHUT_RDWR)

    # What a tier does ----------------------------------------------------------------------------

    def store(
        self, names: Sequence[bytes], values: Sequence[tuple[bytes, memoryview]], timeout: float
    ) -> list[Refusal | None]:
        with suppress(Refused):  # then the server says it of each
            is_there = self.ask(names, timeout)
            absent = [at for at, has in enumerate(is_there) if not has]
            sent = self._set([names[at] for at in absent], [values[at] for at in absent])
            refusals: list[Refusal | None] = [None] * len(names)
            for at, refusal in zip(absent, sent, strict=True):
                refusals[at] = refusal
            return refusals
        return self._set(names, values)

    def _set(
        self, names: Sequence[bytes], values: Sequence[tuple[bytes, memoryview]]
    ) -> list[Refusal | None]:
        tail = b"".join(b"\r\n$%d\r\n%b" % (len(word), word) for word in self._options) + b"\r\n"
        begin = b"*%d\r\n$3\r\nSET\r\n" % (3 + len(self._options))
        parts: list[bytes | memoryview] = []
        for name, (header, row) in zip(names, values, strict=True):
            size = len(header) + row.nbytes
            parts.append(b"%b$%d\r\n%b\r\n$%d\r\n%b" % (begin, len(name), name, size, header))
            parts += (row, tail)
        if parts:
            self._send(parts)
        refusals: list[Refusal | None] = []
        for _ in names:
            line = self._line()
            if line not in (b"+OK", b"$-1", b"_") and line[:1] != b"-":  # null: there is one
                raise Unanswered(f"it answers SET by {line[:40]!r}")
            refusals.append(Refusal(_text(line[1:])) if line[:1] == b"-" else None)
        return refusals

    def load(
        self, names: Sequence[bytes], into: Sequence[memoryview], timeout: float
    ) -> list[int | Refusal]:
        self._end = time.monotonic() + timeout
        self._send([b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names])
        if self._is_plain:
            return self._bulk(into)
        return [self._value(memory) for memory in into]

    def _bulk(self, into: Sequence[memoryview]) -> list[int | Refusal]:
        """All replies by one call, without the interpreter's lock."""
        left = self._end - time.monotonic()
        found, rest, fault, number, line = _native.read_bulk(
            self._socket.fileno(), max(0.0, left), bytes(self._have), list(into)
        )
        self._have = self._scratch[: len(rest)]
        self._have[:] = rest
        match fault:
            case "none":
                return [
                    Refusal(_text(each)) if isinstance(each, bytes) else each
                    for each in cast("list[int | bytes]", found)
                ]
            case "late":
                raise Late
            case "closed":
                raise Cut("it has closed the connection")
            case "system":
                raise Cut(os.strerror(number))
            case _:
                raise Unanswered(f"it answers {line[:40]!r}: it is no Redis server")

    def _value(self, memory: memoryview) -> int | Refusal:
        line = self._line()
        if line[:1] == b"-":
            return Refusal(_text(line[1:]))
        size = self._number(line, b"$")
        if size < -1:
            raise Unanswered(f"it answers {line[:40]!r}: it is no Redis server")
        if size < 0:
            return -1
        if size == memory.nbytes:
            self._read_into(memory)
        else:
            self._skip(size)
        self._skip(2)
        return size

    def ask(self, names: Sequence[bytes], timeout: float) -> list[bool]:
        self._end = time.monotonic() + timeout
        self._send([b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names])
        lines = [self._line() for _ in names]  # all of them, also behind a refusal
        for line in lines:
            if line[:1] == b"-":
                raise Refused(_text(line[1:]))
        return [self._number(line, b":") > 0 for line in lines]

    def forget(self, names: Sequence[bytes], timeout: float) -> None:
        self._end = time.monotonic() + timeout
        for at in range(0, len(names), 1000):
            some = names[at : at + 1000]
            words = b"".join(b"$%d\r\n%b\r\n" % (len(name), name) for name in some)
            self._send([b"*%d\r\n$6\r\nUNLINK\r\n%b" % (1 + len(some), words)])
            self._number(self._checked_line(), b":")

    def clear(self, prefix: bytes, timeout: float) -> None:
        self._end = time.monotonic() + timeout
        pattern = prefix + b"*"  # of letters and digits
        cursor = b"0"
        while True:
            self._send(
                [
                    b"*6\r\n$4\r\nSCAN\r\n$%d\r\n%b\r\n$5\r\nMATCH\r\n$%d\r\n%b\r\n"
                    b"$5\r\nCOUNT\r\n$4\r\n1000\r\n" % (len(cursor), cursor, len(pattern), pattern)
                ]
            )
            self._number(self._checked_line(), b"*")
            cursor = self._text_of()
            names = [self._text_of() for _ in range(self._number(self._checked_line(), b"*"))]
            if names:
                self.forget(names, self._end - time.monotonic())
            if cursor == b"0":
                return

    def close(self) -> None:
        self._connection.disconnect()

    # Bytes ---------------------------------------------------------------------------------------

    def _arm(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise Late
        self._socket.settimeout(left)

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        try:
            if not self._is_plain:
                for part in parts:
                    self._arm()
                    self._socket.sendall(part)
                return
            waiting = [memoryview(part) for part in parts]
            at = 0
            while at < len(waiting):
                self._arm()
                sent = self._socket.sendmsg(waiting[at : at + _MOST_PARTS])
                while at < len(waiting) and sent >= waiting[at].nbytes:
                    sent -= waiting[at].nbytes
                    at += 1
                if sent:
                    waiting[at] = waiting[at][sent:]
        except TimeoutError:
            raise Late from None
        except OSError as error:
            raise Cut(str(error)) from error

    def _receive(self, into: list[memoryview]) -> int:
        try:
            self._arm()
            if self._is_plain:
                got = self._socket.recvmsg_into(into)[0]
            else:
                got = self._socket.recv_into(into[0])
        except TimeoutError:
            raise Late from None
        except OSError as error:
            raise Cut(str(error)) from error
        if got == 0:
            raise Cut("it has closed the connection")
        return got

    def _read_into(self, memory: memoryview) -> None:
        """Exactly that many bytes; what comes with them goes to the scratch memory."""
        ready = min(self._have.nbytes, memory.nbytes)
        memory[:ready] = self._have[:ready]
        self._have = self._have[ready:]
        at = ready
        while at < memory.nbytes:  # then the scratch memory has nothing
            got = self._receive([memory[at:], self._scratch])
            beyond = max(0, got - (memory.nbytes - at))
            at += got - beyond
            self._have = self._scratch[:beyond]

    def _skip(self, count: int) -> None:
        while count > 0:
            if not self._have.nbytes:
                self._have = self._scratch[: self._receive([self._scratch])]
            some = min(count, self._have.nbytes)
            self._have = self._have[some:]
            count -= some

    def _line(self) -> bytes:
        line = b""
        while True:
            have = bytes(self._have)
            end = have.find(b"\n")
            if end >= 0:
                self._have = self._have[end + 1 :]
                return (line + have[: end + 1]).rstrip(b"\r\n")
            line += have
            if len(line) > 1 << 16:
                raise Unanswered("it answers without an end: it is no Redis server")
            self._have = self._scratch[: self._receive([self._scratch])]

    def _checked_line(self) -> bytes:
        line = self._line()
        if line[:1] == b"-":
            raise Refused(_text(line[1:]))
        return line

    def _number(self, line: bytes, kind: bytes) -> int:
        with suppress(ValueError):
            if line[:1] == kind:
                return int(line[1:])
        raise Unanswered(f"it answers {line[:40]!r}: it is no Redis server")

    def _text_of(self) -> bytes:
        memory = memoryview(bytearray(self._number(self._checked_line(), b"$")))
        self._read_into(memory)
        self._skip(2)
        return bytes(memory)


def _text(line: bytes) -> str:
    return line.decode(errors="replace")
