"""The tier on Mooncake Store. Needs `memlane[mooncake]`.

Mooncake's client runs in a process of its own, which may hang, be killed and be started again; see
`mooncake_host`. Blocks go through memory that is shared with it, so only this process touches the
rows.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from memlane._base.arguments import integer_from
from memlane._base.deadline import Deadline, seconds_of
from memlane._base.descriptors import beyond_standard_streams
from memlane._base.lifetime import start_thread
from memlane.errors import InvalidArgument, Unsupported, system_fault
from memlane.tiers.remote.mooncake_host import MOST_BYTES
from memlane.tiers.remote.tier import RemoteTier
from memlane.tiers.remote.transport import Cut, Late, Refusal, Refused, Transport, Unanswered
from memlane.tiers.tier import DIGEST_BYTES, capacity_in_bytes, text

_HOST = Path(__file__).with_name("mooncake_host.py")
_MOST_NAMES = 500  # of a message: some 100 bytes each
_STARTING = 30.0  # seconds that the client may take to set up, in the background
_FILLING = 1 << 30  # bytes of a segment for which it may take a second more
_ENDING = 3.0  # seconds that it may take to release its memory
_LONGEST_RPC = 30.0  # seconds; Mooncake's own
_SHORTEST_RPC = 5.0
_BEING_STORED, _NO_SUCH_KEY, _ALREADY_THERE = -703, -704, -705
_WHY = {
    -200: "the store has no space",
    _BEING_STORED: "another client is storing it",
    -707: "its lease ended while it was read",
    -800: "its bytes could not be transferred",
}
_STORED = (0, _ALREADY_THERE)
_NOT_THERE = (_BEING_STORED, _NO_SUCH_KEY)
_RPC = (-900, -901)


class MooncakeTier(RemoteTier):
    """Blocks in the memory of the machines of a Mooncake Store, whose master evicts them::

        with MooncakeTier("master:50051", rows, segment="16GiB") as tier:
            ticket = tier.store(keys, ids)
            for done in tier.poll():
                ...

    Each block has a CRC-32C seeded with its key: bytes other than those that were stored are a
    miss. A master that does not answer is not tried for a second, then two, up to a minute;
    meanwhile its blocks fail at once, and the log says so once. Anyone who can reach the master can
    read the blocks, and blocks reveal prompts.

    A batch of up to 32 blocks, or 4 MiB, is under way on each connection; each has a thread, and
    memory for three batches. Mooncake's client has a process of its own, which ends with the tier,
    or with this process.
    """

    what = "a Mooncake tier"

    def __init__(
        self,
        master: str,
        rows: Any,
        *,
        namespace: str | bytes = b"",
        timeout: float = 5.0,
        connections: int = 2,
        segment: int | str = 0,
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        device: str = "",
        host: str | None = None,
        log: str | None = None,
    ) -> None:
        """Args:
            master: `host:port`, or as Mooncake accepts it (`etcd://...`).
            rows, namespace, timeout, connections: as of every `Tier`; timeout in seconds.
            segment: memory that this tier adds to the store, in bytes, or as "16GiB". It is removed
                with the tier, and so are the blocks in it. For each GiB the constructor may take a
                second longer than the one to five seconds that the master has to answer.
            metadata: where clients find each other: Mooncake's metadata server, or P2PHANDSHAKE.
            protocol: "tcp" or "rdma".
            device: the RDMA device, as Mooncake accepts it.
            host: where other clients reach this machine; None: its address towards the master.
            log: a file to which Mooncake's messages are added; None: they are dropped.

        Raises:
            InvalidType, InvalidArgument: an argument is not valid.
            Unsupported: Mooncake, or a library that it needs, is not installed.
            SystemFault: the master does not answer, Mooncake refuses the settings, there is no
                memory for the segment, or the log cannot be written to.
        """
        count = integer_from("connections", connections, 1, 64)
        for name, value in (("metadata", metadata), ("protocol", protocol), ("device", device)):
            text(name, value)
        nbytes = 0 if _is_zero(segment) else capacity_in_bytes(segment)
        settings = {
            "master": _address(master),
            "segment": nbytes,
            "metadata": metadata,
            "protocol": protocol,
            "device": device,
            "connections": count,
            "host": host if host is None else text("host", host),
        }
        if log is not None:
            text("log", log)
        if find_spec("mooncake") is None:
            raise Unsupported("MooncakeTier needs Mooncake: pip install 'memlane[mooncake]'")
        rpc = min(_LONGEST_RPC, max(_SHORTEST_RPC, seconds_of(timeout)))
        client = self._client = _Client(settings, rpc, log)

        def connect(deadline: Deadline) -> _Connection:
            return _Connection(client, deadline)

        def connect_first(deadline: Deadline) -> _Connection:
            seconds = deadline.left()
            try:
                made = connect(Deadline(seconds + nbytes / _FILLING))
                made.ask([b"memlane:" + bytes(DIGEST_BYTES)], Deadline(seconds))
                return made
            except _NotInstalled as error:
                raise Unsupported(str(error)) from None
            except (Unanswered, Refused) as error:
                number = getattr(error.__cause__, "errno", None) or errno.EIO
                why = f"cannot use the Mooncake master {master}: {error}"
                raise system_fault(number, why) from None

        try:
            super().__init__(
                rows,
                connect,
                connect_first,
                prefix=b"memlane:",
                namespace=namespace,
                timeout=timeout,
                connections=count,
            )
        except BaseException:
            client.close()
            raise

    def close(self, timeout: float | None = None) -> None:
        """Drains and closes the tier. Then Mooncake's client releases the segment, for which it has
        three seconds more.

        Args:
            timeout: as of `drain`.

        Raises:
            TimedOut: something is still under way, and the tier is still open: its rows must stay.
            InvalidType, InvalidArgument: as `drain`.
        """
        super().close(timeout)
        self._client.close()


class _NotInstalled(Unanswered):
    """Something that Mooncake needs is not installed."""


class _Process:
    """A process with a client. Each method is called by one thread at a time."""

    def __init__(self, settings: dict[str, Any], rpc: float, log: str | None) -> None:
        environment = os.environ.copy()
        environment.setdefault("MC_RPC_TIMEOUT_MS", str(int(1000 * rpc)))
        environment.setdefault("MC_RPC_CONNECT_TIMEOUT_MS", str(int(1000 * rpc)))
        environment.setdefault("MC_STORE_CLIENT_METRIC", "0")
        self._control, other = _pair()
        with other:
            output = os.open(log or os.devnull, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                # -P: its folder has modules that are named as packages.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_HOST), str(other.fileno())],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[other.fileno()],
                    process_group=0,
                )
            finally:
                os.close(output)
        self._descriptor = beyond_standard_streams(os.pidfd_open(self._process.pid))
        self._reaper = threading.Thread(
            target=self._process.wait, name="memlane-tier-client", daemon=True
        )
        start_thread(self._reaper)
        self._begun = time.monotonic()
        self._patience = _STARTING + settings["segment"] / _FILLING
        self._is_ready = False
        self._control.send(
            json.dumps(settings | {"parent": os.getpid(), "path": [*map(str, sys.path)]}).encode()
        )

    def wait_until_ready(self, deadline: Deadline) -> None:
        """Waits until the client is set up. Raises Unanswered."""
        if self._is_ready:
            return
        try:
            self._control.settimeout(max(1e-6, deadline.left(1e9)))
            answer = self._control.recv(MOST_BYTES).decode()
        except TimeoutError:
            if time.monotonic() - self._begun > self._patience:
                self.kill()
            raise Late from None
        except OSError as error:
            raise Unanswered(f"the process of its client has ended: {error}") from error
        if answer == "ready":
            self._is_ready = True
            return
        kind, _, text = answer.partition(": ")
        if kind != "import":
            raise Unanswered(text or "the process of its client has ended")
        if "libibverbs" in text:
            raise _NotInstalled(
                f"MooncakeTier needs libibverbs1: apt-get install libibverbs1: {text}"
            )
        raise _NotInstalled(f"MooncakeTier cannot import mooncake.store: {text}")

    def open(self, deadline: Deadline) -> socket.socket:
        """Returns a connection to the process. Raises Unanswered."""
        try:
            own, other = _pair()
        except OSError as error:
            raise Unanswered(f"no connection to its client: {error}") from error
        with other:
            try:
                self._control.settimeout(max(1e-6, deadline.left(1e9)))
                socket.send_fds(self._control, [b"open"], [other.fileno()])
            except TimeoutError:
                own.close()
                raise Late from None
            except OSError as error:
                own.close()
                raise Unanswered(f"the process of its client has ended: {error}") from error
        return own

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Returns whether the process has ended, after waiting at most `seconds`."""
        over = select.poll()
        over.register(self._descriptor, select.POLLIN)
        return bool(over.poll(1000 * seconds))

    def end(self) -> None:
        """Makes the process end. Does not wait."""
        if not self._is_ready:
            self.kill()
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # also if a forked child has it

    def kill(self) -> None:
        with suppress(OSError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self) -> None:
        """Waits until the process has ended and was reaped."""
        self._reaper.join(_ENDING)

    def __del__(self) -> None:
        if hasattr(self, "_control"):
            self._control.close()
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class _Client:
    """The process that has the client; another one is started if it has ended."""

    def __init__(self, settings: dict[str, Any], rpc: float, log: str | None) -> None:
        self._arguments = (settings, rpc, log)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def open(self, deadline: Deadline) -> socket.socket:
        """Returns a connection to the process. Raises Unanswered."""
        if not self._lock.acquire(timeout=deadline.left(threading.TIMEOUT_MAX)):
            raise Late
        try:
            if self._process is None or self._process.has_ended():
                settings, rpc, log = self._arguments
                host = settings["host"] or _own_address(settings["master"])
                try:
                    self._process = _Process(settings | {"host": host}, rpc, log)
                except (OSError, RuntimeError) as error:  # no thread is left
                    raise Unanswered(f"cannot start the process of its client: {error}") from error
            self._process.wait_until_ready(deadline)
            return self._process.open(deadline)
        finally:
            self._lock.release()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                process.end()
                if not process.has_ended(_ENDING):
                    process.kill()
                process.wait()

    def __del__(self) -> None:
        if os.getpid() == self._pid and self._process is not None:
            self._process.end()


class _Connection(Transport):
    """A connection to the client's process, with memory that is shared with it."""

    def __init__(self, client: _Client, deadline: Deadline) -> None:
        self._link = client.open(deadline)
        # One for each kind: what a load that failed may still write to is never what a store reads.
        self._memories: dict[str, mmap.mmap] = {}

    # What a tier does ----------------------------------------------------------------------------

    def put(
        self,
        names: Sequence[bytes],
        values: Sequence[tuple[bytes, memoryview]],
        deadline: Deadline,
    ) -> list[Refusal | None]:
        sizes = [len(header) + row.nbytes for header, row in values]
        places, order = self._places("put", sizes)
        for place, (header, row) in zip(places, values, strict=True):
            place[: len(header)] = header
            np.copyto(np.frombuffer(place[len(header) :], np.uint8), np.frombuffer(row, np.uint8))
        codes = _answers(self._call(deadline, "put", _texts(names), **order))
        return [None if code in _STORED else _refusal(code) for code in codes]

    def get(
        self, names: Sequence[bytes], into: Sequence[memoryview], deadline: Deadline
    ) -> list[int | Refusal]:
        places, order = self._places("get", [memory.nbytes for memory in into])
        found: list[int | Refusal] = []
        sizes = _answers(self._call(deadline, "get", _texts(names), **order))
        for size, place, memory in zip(sizes, places, into, strict=True):
            if size >= 0:
                found.append(size)
                if size == memory.nbytes:
                    np.copyto(np.frombuffer(memory, np.uint8), np.frombuffer(place, np.uint8))
            else:
                found.append(-1 if size in _NOT_THERE else _refusal(size))
        return found

    def ask(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
        there = [
            code
            for some in _parts(_texts(names))
            for code in _answers(self._call(deadline, "ask", some))
        ]
        if wrong := [code for code in there if code < 0]:
            raise Refused(str(_refusal(wrong[0])))
        return [code > 0 for code in there]

    def remove(self, names: Sequence[bytes], deadline: Deadline) -> None:
        for some in _parts(_texts(names)):
            for code in _answers(self._call(deadline, "remove", some)):
                if code < 0 and code != _NO_SUCH_KEY:
                    raise Refused(str(_refusal(code)))

    def clear(self, prefix: bytes, deadline: Deadline) -> None:
        (code,) = _answers(self._call(deadline, "clear", [prefix.decode()]))
        if code < 0:
            raise Refused(str(_refusal(code)))

    def close(self) -> None:
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)  # also if a forked child has it
        self._link.close()

    # Messages ------------------------------------------------------------------------------------

    def _places(self, kind: str, sizes: list[int]) -> tuple[list[memoryview], dict[str, Any]]:
        """Returns memory for values of these sizes, and the part of an order that describes it."""
        stride = -(-max(sizes) // 64) * 64
        needed = stride * len(sizes)
        order: dict[str, Any] = {"sizes": sizes, "stride": stride}
        memory = self._memories.get(kind)
        if memory is None or len(memory) < needed:
            descriptor = -1
            try:
                descriptor = beyond_standard_streams(
                    os.memfd_create("memlane-mooncake", os.MFD_CLOEXEC)
                )
                os.ftruncate(descriptor, needed)
                memory = self._memories[kind] = mmap.mmap(descriptor, needed)
            except OSError as error:
                if descriptor >= 0:
                    os.close(descriptor)
                raise Unanswered(f"no memory for a batch: {error}") from error
            order |= {"memory": needed, "descriptor": descriptor}
        view = memoryview(memory)
        return [view[at * stride : at * stride + size] for at, size in enumerate(sizes)], order

    def _call(
        self,
        deadline: Deadline,
        kind: str,
        names: Sequence[str],
        descriptor: int = -1,
        **order: Any,
    ) -> Any:
        order |= {"kind": kind, "names": names}
        try:
            self._arm(deadline)
            fds = [] if descriptor < 0 else [descriptor]
            socket.send_fds(self._link, [json.dumps(order).encode()], fds)
            self._arm(deadline)
            data = self._link.recv(MOST_BYTES)
        except TimeoutError:
            raise Late from None
        except OSError as error:
            raise Cut(f"the process of its client has ended: {error}") from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if not data:
            raise Cut("the process of its client has ended")
        answer = json.loads(data)
        if isinstance(answer, str):
            raise Unanswered(answer)
        return answer

    def _arm(self, deadline: Deadline) -> None:
        if deadline.has_passed():
            raise Late
        self._link.settimeout(max(1e-6, deadline.left(1e9)))


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own, other = (socket.socket(fileno=beyond_standard_streams(each.detach())) for each in pair)
    return own, other


def _texts(names: Sequence[bytes]) -> list[str]:
    """Returns names as text, which Mooncake's are: the digest in hexadecimal digits."""
    return [name[:-DIGEST_BYTES].decode() + name[-DIGEST_BYTES:].hex() for name in names]


def _parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for at in range(0, len(names), _MOST_NAMES):
        yield names[at : at + _MOST_NAMES]


def _answers(codes: list[int]) -> list[int]:
    """Returns the code of each block. Raises Unanswered if the master did not answer."""
    if wrong := [code for code in codes if code in _RPC]:
        kind = "does not answer" if wrong[0] == -901 else "cannot be reached"
        raise Unanswered(f"the Mooncake master {kind} (code {wrong[0]})")
    return codes


def _refusal(code: int) -> Refusal:
    return Refusal(f"{_WHY.get(code, 'Mooncake refuses it')} (code {code})")


def _is_zero(segment: object) -> bool:
    return not isinstance(segment, (str, bool)) and segment == 0


def _address(master: object) -> str:
    address = text("master", master)
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
    if "://" not in address and not (host and is_port):
        raise InvalidArgument(f"master must be host:port, or as etcd://..., not {address!r}")
    return address


def _own_address(master: str) -> str:
    """Returns the address of this machine towards the master. Raises Unanswered."""
    if "://" in master:
        return socket.gethostname()
    host, _, port = master.rpartition(":")
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, number) as probe:
            probe.connect(address)  # sends nothing
            own: str = probe.getsockname()[0]
            return own
    except OSError as error:
        raise Unanswered(str(error)) from error
