"""The process that runs Mooncake's client for one `MooncakeTier`. It imports nothing of memlane.

Mooncake's `setup` and `close` hold the interpreter's lock while they wait for a master, `close` for
a second at best; its threads do not survive a fork. In a process of their own they block no engine,
and can be killed.

The first message on the control socket, argument 1, is the configuration; it is answered once the
client is set up. Each later one brings the socket of a connection; an empty one is the end. A
connection receives orders, some with the descriptor of the memory for orders of that kind. Each
order has one answer. All are JSON.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

MOST_BYTES = 1 << 18  # of a message
_OK_AFTERWARDS = {-200, -600, -702, -703, -704, -705, -706, -707, -900, -901, -1700}
_CLOSING = 10  # seconds that Mooncake's `close` may take
_kept: list[Any] = []  # memory that a transfer which failed may still be using
_changed = threading.Condition()
_changing: list[set[str]] = []  # with the condition: names that a connection stores or removes


@contextmanager
def _changing_alone(names: set[str]) -> Iterator[None]:
    """Waits until no other connection changes any of these, not even one that was given up."""
    with _changed:
        _changed.wait_for(lambda: all(map(names.isdisjoint, _changing)))
        _changing.append(names)
    try:
        yield
    finally:
        with _changed:
            _changing[:] = [each for each in _changing if each is not names]
            _changed.notify_all()


def _wait_for_stores(prefix: str) -> None:
    """Waits for those that have begun; others may go on beginning."""
    with _changed:
        before = [each for each in _changing if any(name.startswith(prefix) for name in each)]
        _changed.wait_for(lambda: not any(one is each for one in before for each in _changing))


class _Memory:
    """Memory of one connection, registered with Mooncake."""

    def __init__(self, store: Any, descriptor: int, size: int) -> None:
        self._store = store
        self._map = mmap.mmap(descriptor, size)
        self._first: Any = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._first)
        if code := store.register_buffer(self.address, size):
            raise OSError(f"register_buffer returned {code}")

    def leave(self) -> None:
        self._store.unregister_buffer(self.address)
        self._first = None
        self._map.close()


class _Connection:
    def __init__(self, store: Any, link: socket.socket, refusal: str) -> None:
        self._store = store
        self._link = link
        self._refusal = refusal  # the answer to all orders, if there is one
        self._memories: dict[str, _Memory] = {}
        self._may_be_used = False  # by a transfer that has failed

    def run(self) -> None:
        with self._link, suppress(OSError):  # the other side has gone
            while True:
                data, descriptors, _, _ = socket.recv_fds(self._link, MOST_BYTES, 1)
                if not data:
                    break
                try:
                    answer = self._do(json.loads(data), descriptors)
                except Exception as error:
                    answer = f"{type(error).__name__}: {error}"
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
                self._link.send(json.dumps(answer).encode())
        for memory in self._memories.values():
            self._leave(memory)

    def _leave(self, memory: _Memory) -> None:
        if self._may_be_used:
            _kept.append(memory)
        else:
            memory.leave()

    def _do(self, order: dict[str, Any], descriptors: list[int]) -> Any:
        if self._refusal:
            return self._refusal
        if descriptors:
            if before := self._memories.pop(order["kind"], None):
                self._leave(before)
            memory = _Memory(self._store, descriptors[0], order["memory"])
            self._memories[order["kind"]] = memory
        names = order["names"]
        match order["kind"]:
            case "put":
                with _changing_alone({*names}):
                    self._check_wanted()
                    # 0 also for what is there, or is just being stored. To ask which would give
                    # all of it a lease: it could not be evicted for a while.
                    return self._checked(self._store.batch_put_from(names, *self._places(order)))
            case "get":
                sizes = self._checked(self._store.batch_get_into(names, *self._places(order)))
                return [
                    self._store.get_size(name) if size == -600 else size  # too large, or no client
                    for name, size in zip(names, sizes, strict=True)
                ]
            case "ask":
                return self._store.batch_is_exist(names)
            case "remove":
                with _changing_alone({*names}):
                    self._check_wanted()
                    return self._store.batch_remove(names, True)  # also while somebody reads it
            case "clear":  # prefixes are of letters, digits and colons
                _wait_for_stores(names[0])
                self._check_wanted()
                return [self._store.remove_by_regex(f"^{names[0]}.*", True)]
        raise ValueError(order["kind"])

    def _check_wanted(self) -> None:
        """Raises ConnectionAbortedError: the order was given up while it waited, and must not be
        done after later ones."""
        over = select.poll()
        over.register(self._link, select.POLLIN)
        if over.poll(0):
            raise ConnectionAbortedError

    def _places(self, order: dict[str, Any]) -> tuple[list[int], list[int]]:
        sizes, stride = order["sizes"], order["stride"]
        at = self._memories[order["kind"]].address
        return [at + number * stride for number in range(len(sizes))], sizes

    def _checked(self, codes: list[int]) -> list[int]:
        self._may_be_used |= any(code < 0 and code not in _OK_AFTERWARDS for code in codes)
        return codes


def _set_up(settings: dict[str, Any]) -> tuple[Any, str]:
    """Returns the client, and an empty text; or why there is none."""
    try:
        store = import_module("mooncake.store").MooncakeDistributedStore()
    except ImportError as error:
        return None, f"import: {error}"
    code = store.setup(
        settings["host"],
        settings["metadata"],
        settings["segment"],
        0,  # no buffer of its own: all memory is the connections'
        settings["protocol"],
        settings["device"],
        settings["master"],
    )
    return store, f"setup: Mooncake's setup returned {code}" if code else ""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent decides when to end
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(control.recv(MOST_BYTES))
    sys.path[:] = settings["path"]
    ready = select.poll()
    with suppress(OSError):  # a sandbox that has no such descriptors: its end closes the socket
        ready.register(os.pidfd_open(settings["parent"]), select.POLLIN)
    if os.getppid() != settings["parent"]:
        os._exit(0)
    store, error = _set_up(settings)
    control.send(error.encode() or b"ready")
    if error:
        os._exit(1)
    ready.register(control, select.POLLIN)
    most = 4 * settings["connections"]  # a few that were given up, which Mooncake ends in time
    while True:
        (found, _), *_ = ready.poll()
        if found != control.fileno():
            break
        _, descriptors, _, _ = socket.recv_fds(control, MOST_BYTES, 1)
        if not descriptors:
            break
        link = socket.socket(fileno=descriptors[0])
        stuck = threading.active_count() - 1
        refusal = f"its client is at {stuck} calls already" if stuck >= most else ""
        threading.Thread(target=_Connection(store, link, refusal).run, daemon=True).start()
    if settings["segment"]:  # its blocks are gone: the master must know
        signal.alarm(_CLOSING)
        store.close()
    os._exit(0)


if __name__ == "__main__":
    main()
