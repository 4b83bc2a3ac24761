"""The tier on a Redis or Valkey server. Needs `memlane[redis]`.

redis-py connects, authenticates and encrypts, and carries whatever is not a block. On a connection
without TLS blocks go past it: a batch is one `sendmsg` of the rows as they lie in memory, and the
replies are read into the worker's memory by native code, so the interpreter copies no byte.
"""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, cast

from memlane import _native
from memlane._base.arguments import integer_from
from memlane._base.deadline import Deadline
from memlane._importing import fork_waits
from memlane.errors import AccessRefused, InvalidArgument, Unsupported, system_fault
from memlane.tiers.remote.tier import RemoteTier
from memlane.tiers.remote.transport import (
    FAIR,
    Cut,
    Late,
    Refusal,
    Refused,
    Transport,
    Unanswered,
)
from memlane.tiers.tier import text

_MOST_PARTS = 512  # of one sendmsg; the system takes 1024
_MOST_NAMES = 1000  # of one UNLINK
_Value = tuple[bytes, memoryview]


class RedisTier(RemoteTier):
    """Blocks on a Redis or Valkey server, which evicts them by its own `maxmemory-policy`::

        with RedisTier("redis://cache:6379/0", rows, namespace="llama-3-8b") as tier:
            ticket = tier.store(keys, ids)
            for done in tier.poll():
                ...

    Each block has a CRC-32C seeded with its key: bytes other than those that were stored are a
    miss. A server that is silent for a second is not tried for a second, then two, up to a minute;
    meanwhile its blocks fail at once, and the log says so once. One that answers READONLY has lost
    its part as master in a failover: the tier resolves the address again and connects to what is
    there then. Anyone who can read the server can read the blocks, and blocks reveal prompts: use
    a password and `rediss://`.

    A batch of up to 32 blocks, or 4 MiB, is under way on each connection; each has a thread, and
    memory for a batch.
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
            url: as redis-py accepts it: `redis://[user:password@]host:port/database`, `rediss://`
                for TLS, or `unix://path`.
            rows, namespace, timeout, connections: as of every `Tier`; timeout in seconds.
            ttl: seconds after which the server drops a block; None: it decides itself.
            options: of redis-py's connection, such as `ssl_ca_certs`.

        Raises:
            InvalidType, InvalidArgument: an argument is not valid.
            Unsupported: redis-py is not installed; or the server is a node of a Redis Cluster or
                a Sentinel: the tier needs the address of one server that has all keys.
            AccessRefused: the password is wrong, or the server's certificate is not trusted.
            SystemFault: the server cannot be reached, or does not speak Redis.
        """
        try:
            with fork_waits:
                import redis
        except ImportError:
            raise Unsupported("RedisTier needs redis-py: pip install 'memlane[redis]'") from None
        text("url", url)
        count = integer_from("connections", connections, 1, 64)
        seconds = None if ttl is None else integer_from("ttl", ttl, 1, 1 << 31)
        try:
            pool = redis.ConnectionPool.from_url(url, **options)
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"redis-py does not accept this url: {error}") from None

        def connect(deadline: Deadline) -> _Connection:
            return _Connection(pool, deadline, seconds, FAIR)

        def connect_first(deadline: Deadline) -> _Connection:
            try:
                made = _Connection(pool, deadline, seconds, deadline.left())
                try:
                    (answer,) = made.ask([b"memlane:"], deadline)
                    with suppress(Unanswered, Refused):
                        # Not by the same one: a proxy may close it for a command that it lacks.
                        other = _Connection(pool, deadline, seconds, FAIR)
                        with closing(other):
                            other.refuse_parts(deadline)
                    if isinstance(answer, Refusal):
                        raise Refused(answer)
                except BaseException:
                    made.close()
                    raise
                return made
            except (TypeError, ValueError, LookupError) as error:  # no such encoding
                raise InvalidArgument(f"redis-py does not accept these options: {error}") from None
            except (Unanswered, Refused) as error:
                cause = error.__cause__
                is_refused = isinstance(cause, redis.AuthenticationError) or any(
                    word in str(error) for word in ("NOAUTH", "NOPERM", "WRONGPASS")
                )
                if is_refused or _is_about_certificates(cause):
                    raise AccessRefused(f"the Redis server refuses this client: {error}") from None
                why = f"cannot use the Redis server: {error}"
                raise system_fault(getattr(cause, "errno", None) or errno.EIO, why) from None

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


class _Connection(Transport):
    """One connection of redis-py."""

    def __init__(self, pool: Any, deadline: Deadline, ttl: int | None, patience: float) -> None:
        """`patience`: seconds for which the server may be silent while it is connected to."""
        with fork_waits:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry

        self._redis = redis
        settings = {
            # The pool's notifications need RESP3.
            **{k: v for k, v in pool.connection_kwargs.items() if "maint_notifications" not in k},
            "socket_timeout": min(patience, deadline.left()),
            "socket_connect_timeout": min(patience, deadline.left()),
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),  # the tier decides when to try again
        }
        self._connection = pool.connection_class(**settings)
        with self._by(deadline):
            self._connection.connect()
        self._socket: socket.socket = self._connection._sock
        self._is_plain = not isinstance(self._socket, ssl.SSLSocket)
        self._options = [b"NX"] if ttl is None else [b"NX", b"EX", b"%d" % ttl]
        self._begun = time.monotonic()

    def refuse_parts(self, deadline: Deadline) -> None:
        """Raises Unsupported if this is no server that has all keys."""
        (answer,) = self.ask([b"memlane:"], deadline)
        if isinstance(answer, Refusal) and answer.startswith(("MOVED", "ASK ")):
            mode = b"cluster"
        else:
            about = self._control(deadline, b"INFO", b"server")
            lines = about if isinstance(about, bytes) else b""
            found = re.search(rb"(?:redis|server)_mode:(\w+)", lines)
            mode = b"" if found is None else found[1]
        if mode == b"cluster":
            raise Unsupported(
                "the server is a node of a Redis Cluster, which has only a part of the keys; use a "
                "server without cluster mode, or a proxy"
            )
        if mode == b"sentinel":
            raise Unsupported(
                "the server is a Redis Sentinel, which stores no blocks; use an address that leads "
                "to the master"
            )

    # What a tier does ----------------------------------------------------------------------------

    def ask(self, names: Sequence[bytes], deadline: Deadline) -> list[bool | Refusal]:
        found = self._do(b"EXISTS", names, b":", [None] * len(names), deadline)
        return [each if isinstance(each, Refusal) else each > 0 for each in found]

    def put(
        self, names: Sequence[bytes], values: Sequence[_Value], deadline: Deadline
    ) -> list[Refusal | None]:
        is_there = self.ask(names, deadline)  # one that is refused may be taken
        absent = [at for at, has in enumerate(is_there) if has is not True]
        refusals: list[Refusal | None] = [None] * len(names)
        some = [names[at] for at in absent]
        nowhere = [None] * len(absent)
        sent = self._do(b"SET", some, b"+$", nowhere, deadline, [values[at] for at in absent])
        for at, answer in zip(absent, sent, strict=True):
            if isinstance(answer, Refusal):
                self._follow(answer)
                refusals[at] = answer
            elif answer not in (0, -1):  # OK, or there is one
                raise Unanswered(f"it answers SET by {answer} bytes")
        return refusals

    def get(
        self, names: Sequence[bytes], into: Sequence[memoryview], deadline: Deadline
    ) -> list[int | Refusal]:
        return self._do(b"GET", names, b"$", into, deadline)

    def remove(self, names: Sequence[bytes], deadline: Deadline) -> None:
        for at in range(0, len(names), _MOST_NAMES):
            self._control(deadline, b"UNLINK", *names[at : at + _MOST_NAMES])

    def clear(self, prefix: bytes, deadline: Deadline) -> None:
        cursor, pattern = b"0", prefix + b"*"  # a prefix is letters and digits
        while True:
            words = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")
            cursor, names = self._control(deadline, *words)
            if names:
                self.remove(names, deadline)
            if cursor == b"0":
                return

    def close(self) -> None:
        self._connection.disconnect()

    def _follow(self, refusal: str) -> None:
        """Raises Cut if the server is no master any more: its address may lead to another one by
        now. Once a second at most: it may be a replica for good."""
        if refusal.startswith("READONLY") and time.monotonic() - self._begun >= FAIR:
            raise Cut(refusal)

    # Blocks --------------------------------------------------------------------------------------

    def _do(
        self,
        command: bytes,
        names: Sequence[bytes],
        kinds: bytes,
        into: Sequence[memoryview | None],
        deadline: Deadline,
        values: Sequence[_Value] | None = None,
    ) -> list[int | Refusal]:
        """Sends one command for each name, and reads the replies.

        Args:
            kinds: the characters by which replies may begin.
            into: memory for the value of each, or None.
            values: what SET sends.

        Returns:
            For each name the number that it answers; the size of the value, or -1; 0 if it answers
            OK; or why it refuses.
        """
        if not names:
            return []
        if not self._is_plain:
            return self._by_client(command, names, into, deadline, values)
        self._send(_commands(command, names, values, self._options), deadline)
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        if not ready.poll(1000 * min(FAIR, deadline.left(1e9))):
            raise Late
        found, fault, number, line = _native.read_replies(
            self._socket.fileno(), deadline.left(1e9), kinds.decode(), list(into)
        )
        match fault:
            case "none":
                return [
                    Refusal(each.decode(errors="replace")) if isinstance(each, bytes) else each
                    for each in cast("list[int | bytes]", found)
                ]
            case "late":
                raise Late
            case "closed":
                raise Cut("it has closed the connection")
            case "system":
                raise Cut(os.strerror(number))
            case _:
                raise Unanswered(f"it answers {line!r}: it does not speak Redis")

    def _send(self, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        waiting = [memoryview(part) for part in parts]
        at = 0
        try:
            while at < len(waiting):
                if deadline.has_passed():
                    raise Late
                self._socket.settimeout(min(FAIR, deadline.left(1e9)))
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

    # By redis-py ---------------------------------------------------------------------------------

    def _by_client(
        self,
        command: bytes,
        names: Sequence[bytes],
        into: Sequence[memoryview | None],
        deadline: Deadline,
        values: Sequence[_Value] | None,
    ) -> list[int | Refusal]:
        """Does as `_do`, by redis-py's client."""
        orders: list[tuple[bytes, ...]] = [(command, name) for name in names]
        if values is not None:
            orders = [
                (*order, b"".join(value), *self._options)
                for order, value in zip(orders, values, strict=True)
            ]
        connection, found = self._connection, []
        with self._by(deadline):
            connection.send_packed_command(connection.pack_commands(orders), check_health=False)
            for memory in into:
                found.append(self._reply(memory))
        return found

    def _reply(self, memory: memoryview | None) -> int | Refusal:
        try:
            reply = self._connection.read_response(disable_decoding=True)
        except self._redis.ResponseError as error:
            return Refusal(self._text(error))
        if reply is None:
            return -1
        if isinstance(reply, int):
            return reply
        if memory is None:
            return 0 if reply == b"OK" else len(reply)
        if len(reply) == memory.nbytes:
            memory[:] = reply
        return len(reply)

    def _control(self, deadline: Deadline, *words: bytes) -> Any:
        with self._by(deadline):
            self._connection.send_command(*words, check_health=False)
            try:
                return self._connection.read_response(disable_decoding=True)
            except self._redis.ResponseError as error:
                self._follow(self._text(error))
                raise Refused(self._text(error)) from error

    def _text(self, error: Exception) -> str:
        """Returns what the server said. redis-py removes the first word of what it knows."""
        codes: dict[type[Exception], str] = {
            self._redis.exceptions.NoPermissionError: "NOPERM ",
            self._redis.ReadOnlyError: "READONLY ",
        }
        return f"{codes.get(type(error), '')}{error}"

    @contextmanager
    def _by(self, deadline: Deadline) -> Iterator[None]:
        """Ends what redis-py does in the block at the deadline. Its own timeouts are of each read:
        a server that sends a byte now and then would have no end."""
        guard = threading.Timer(min(deadline.left(), threading.TIMEOUT_MAX), self._give_up)
        guard.daemon = True
        try:
            guard.start()
        except RuntimeError as error:
            raise Unanswered(f"cannot start a thread: {error}") from error
        redis = self._redis
        try:
            with suppress(AttributeError):  # it is not connected yet
                self._socket.settimeout(max(1e-6, min(FAIR, deadline.left(1e9))))
            yield
        except (redis.RedisError, OSError, UnicodeError) as error:
            why = str(error) or type(error).__name__
            if isinstance(error, redis.TimeoutError) or deadline.has_passed():
                raise Late(why) from error
            if isinstance(error, redis.AuthenticationError) or not hasattr(self, "_socket"):
                raise Unanswered(why) from error
            raise Cut(why) from error
        finally:
            guard.cancel()

    def _give_up(self) -> None:
        with suppress(OSError, AttributeError):
            self._connection._sock.shutdown(socket.SHUT_RDWR)


def _commands(
    command: bytes,
    names: Sequence[bytes],
    values: Sequence[_Value] | None,
    options: Sequence[bytes],
) -> list[bytes | memoryview]:
    """Returns the commands as they are sent, in parts. Rows are parts of their own."""
    words = 2 if values is None else 3 + len(options)
    begin = b"*%d\r\n$%d\r\n%b\r\n" % (words, len(command), command)
    if values is None:
        return [b"%b$%d\r\n%b\r\n" % (begin, len(name), name) for name in names]
    end = b"".join(b"\r\n$%d\r\n%b" % (len(word), word) for word in options) + b"\r\n"
    parts: list[bytes | memoryview] = []
    for name, (header, row) in zip(names, values, strict=True):
        size = len(header) + row.nbytes
        parts.append(b"%b$%d\r\n%b\r\n$%d\r\n%b" % (begin, len(name), name, size, header))
        parts += (row, end)
    return parts
