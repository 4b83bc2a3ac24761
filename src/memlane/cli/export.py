"""`memlane export`: metrics, the same as JSON, and a live page, over HTTP."""

from __future__ import annotations

import io
import ipaddress
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from itertools import chain
from socketserver import TCPServer
from typing import Any

from memlane._base.blame import blocked, listed
from memlane._base.descriptors import is_readable_within, new_event
from memlane.cli import metrics_of_all
from memlane.cli.ls import as_json
from memlane.cli.writing import json_text, title
from memlane.errors import MemlaneError, system_fault
from memlane.inspect.decisions import Process, process_of
from memlane.inspect.looks import Look, Looks
from memlane.inspect.segment import free_space
from memlane.inspect.waits import Wait, headline, title_of
from memlane.metrics import exposition
from memlane.metrics.catalogue import measure
from memlane.metrics.tally import Tally, taken

AFTER = 0.5  # seconds, after which a wait is shown
_SEARCH_EVERY = 10.0  # seconds between two searches for who holds what; 0.1 s of a core each
_MOST_WATCHED = 256  # processes, by a descriptor each
_FRESH = 0.2  # seconds that a look serves for all who ask
_PATIENCE = 10.0  # seconds that a client may take for its request
_MOST_CLIENTS = 32
_MOMENT = 1.0  # seconds that a thread may take to end
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)


class _Ends:
    """Wakes one thread when a watched process ends, or another thread wants it."""

    def __init__(self) -> None:
        self._event = new_event()
        self._poller = select.poll()
        self._poller.register(self._event, select.POLLIN)
        self._watched: dict[Process, int] = {}  # pidfds

    def watch(self, processes: set[Process]) -> set[Process]:
        """Watches these, and no others; returns those that have ended before."""
        for old in self._watched.keys() - processes:
            self._forget(old)
        ended = set()
        for new in list(processes - self._watched.keys())[: _MOST_WATCHED - len(self._watched)]:
            try:
                self._watched[new] = os.pidfd_open(new.pid)
            except ProcessLookupError:
                ended.add(new)
            except OSError:  # no pidfds, or no descriptors: looks find the death
                break
            else:
                self._poller.register(self._watched[new], select.POLLIN)
        return ended

    def _forget(self, process: Process) -> None:
        descriptor = self._watched.pop(process)
        self._poller.unregister(descriptor)
        os.close(descriptor)

    def wait(self, seconds: float) -> set[Process]:
        """Returns those that have ended, when one has; they are not watched any more."""
        ready = {descriptor for descriptor, _ in self._poller.poll(1000 * max(0.0, seconds) + 1)}
        if self._event in ready:
            os.eventfd_read(self._event)
        ended = {each for each, descriptor in self._watched.items() if descriptor in ready}
        for each in ended:
            self._forget(each)
        return ended

    def wake(self) -> None:
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Not beside a call."""
        self.watch(set())
        os.close(self._event)


class Source:
    """The source of all pages: one look serves all requests that come at the same time. A thread
    finds out who holds what, so that no answer waits for that, and looks when a participant ends:
    an engine that a death ends is gone long before the next scrape."""

    def __init__(self, pid: int | None) -> None:
        self._looks = Looks(pid, AFTER, search_every=float("inf"))
        self._looks.search()
        self._lock = threading.Lock()
        self._look: Look | None = None
        self._tally = Tally()
        self._ends = _Ends()
        self._participants: set[Process] = set()
        self._is_over = False
        self._thread = threading.Thread(target=self._search, name="memlane-search", daemon=True)
        self._thread.start()

    def _search(self) -> None:
        due = time.monotonic() + _SEARCH_EVERY
        while not self._is_over:
            with suppress(MemlaneError, OSError):  # such as no descriptor left: the next one may do
                ended = self._ends.watch(self._participants)
                ended = ended or self._ends.wait(due - time.monotonic())
                if ended:
                    with self._lock:  # else they would be waited for again if this look fails
                        self._participants -= ended
                    self._take()
                elif time.monotonic() >= due:
                    due = time.monotonic() + _SEARCH_EVERY
                    self._looks.search()
                    self._take()

    def close(self) -> None:
        self._is_over = True
        self._ends.wake()
        self._thread.join()
        self._ends.close()

    def _take(self) -> Look:
        with self._lock:
            self._look = taken(self._looks, self._tally)
            people = chain.from_iterable(
                each.participants for each in self._look.segments if each.kind == "queue"
            )
            found = set(filter(None, map(process_of, people)))
            if not found <= self._participants:
                self._ends.wake()
            self._participants = found
            return self._look

    def look(self) -> Look:
        """Raises SystemFault as `memlane.inspect.segments`."""
        look = self._look
        if look is None or time.monotonic() - look.at >= _FRESH:
            look = self._take()
        return look

    def metrics(self) -> str:
        look = self.look()
        with self._lock:
            return exposition.text(measure(look, free_space(), self._tally))

    def as_json(self) -> dict[str, Any]:
        """Bytes and seconds, as `memlane ls --json`, and who is stuck."""
        look = self.look()
        names: dict[int, str] = {}
        for segment in look.segments:
            for who in segment.participants:
                if who.pid is not None and not who.is_remote:
                    names[who.pid] = names.get(who.pid) or title_of(who)
        return {
            "at": time.time() - (time.monotonic() - look.at),
            "host": socket.gethostname(),
            "shm": free_space(),
            "segments": [as_json(segment, None) for segment in look.segments],
            "names": {str(pid): name for pid, name in names.items()},
            "stuck": [
                _stuck(wait) for wait in look.waits if not (wait.is_in_turn or wait.is_start)
            ],
        }


def _stuck(wait: Wait) -> dict[str, Any]:
    awaited = listed(wait.facts)
    if wait.absent_elsewhere:
        awaited += f" and {wait.absent_elsewhere} readers on other hosts"
    first = headline(wait, title(wait.segment, wait.label))
    return {
        "segment": wait.segment,
        "waiter": wait.waiter.pid,
        "awaited": [who.pid for who in wait.awaited],
        "seconds": wait.seconds,
        "sentence": f"{blocked(first, awaited)}. {wait.advice}",
    }


@cache
def page() -> str:
    """The live page: one file, which asks for `/json` twice a second."""
    return (files("memlane.cli") / "page.html").read_text("utf-8")


AnySource = Source | metrics_of_all.Source


class Server(ThreadingHTTPServer):
    """Serves until `shutdown`."""

    daemon_threads = True

    def __init__(self, host: str, port: int, source: AnySource, names: Iterable[str] = ()) -> None:
        """Raises OSError if the port is taken, or the address not of this host.

        Args:
            names: host names that clients may ask for, beside those of this host.
        """
        self.source = source
        self.is_local = _is_loopback(host)
        self.names = {"localhost", host.lower(), *(name.lower() for name in names)}
        if not self.is_local:
            self.names.add(socket.gethostname().lower())
            # A name server may be silent, so nobody waits for this host's full name.
            threading.Thread(target=self._learn_full_name, daemon=True).start()
        self._room = threading.BoundedSemaphore(_MOST_CLIENTS)
        self._lock = threading.Lock()
        self._silent: dict[socket.socket, None] = {}  # without a request as yet, the oldest first
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Answer)

    def server_bind(self) -> None:
        """Without the look-up of a name, which its base does here."""
        TCPServer.server_bind(self)

    def _learn_full_name(self) -> None:
        self.names.add(socket.getfqdn().lower())

    def admits(self, header: str | None) -> bool:
        """Returns whether a page of that host may ask: else any page in a browser could, by a name
        of its own that leads here. Addresses are nobody's names."""
        if header is None:
            return False
        host = header.rpartition("]")[0].lstrip("[") or header.partition(":")[0]
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host.lower() in self.names
        return address.is_loopback or not self.is_local

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # no descriptor left: the client waits on, and would be asked for at once
            time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Makes room if there are too many: the oldest silent client goes, or else this one."""
        if not self._room.acquire(blocking=False):
            self._end_a_silent_one()
            if not self._room.acquire(timeout=_MOMENT):
                self.shutdown_request(request)
                return
        with self._lock:
            self._silent[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread left
            self._forget(request)
            raise

    def _end_a_silent_one(self) -> None:
        with self._lock:
            oldest = next(iter(self._silent), None)
            if oldest is not None:
                del self._silent[oldest]
                with suppress(OSError):  # it has gone
                    oldest.shutdown(socket.SHUT_RDWR)  # which ends its thread

    def note_request(self, client: socket.socket) -> None:
        """Notes that the client has sent its request."""
        with self._lock:
            self._silent.pop(client, None)

    def _forget(self, client: socket.socket) -> None:
        self.note_request(client)
        self._room.release()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone, or is too slow, is no error."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Hurried(io.RawIOBase):
    """Reads a client's request, within `_PATIENCE` in all."""

    def __init__(self, client: socket.socket) -> None:
        self._client, self._end = client, time.monotonic() + _PATIENCE

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._client.settimeout(left)
        return self._client.recv_into(buffer)


class Answer(BaseHTTPRequestHandler):
    """Answers one client."""

    server: Server
    server_version = "memlane"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Hurried(self.connection))

    def do_GET(self) -> None:  # so named by its base
        self.server.note_request(self.connection)
        if not self.server.admits(self.headers.get("Host")):
            self._answer(421, "text/plain", "this host name is not served here; use the address\n")
            return
        source = self.server.source
        made: dict[str, tuple[str, Callable[[], str]]] = {
            "/metrics": (exposition.CONTENT_TYPE, source.metrics)
        }
        if isinstance(source, Source):
            made["/json"] = ("application/json", lambda: json_text(source.as_json()))
            made["/"] = ("text/html; charset=utf-8", page)
        kind, make = made.get(self.path.partition("?")[0], ("", str))
        if not kind:
            self._answer(404, "text/plain", f"served: {', '.join(made)}\n")
            return
        try:
            text = make()
        except (MemlaneError, OSError) as error:
            self._answer(503, "text/plain", f"{error}\n")
            return
        self._answer(200, kind, text)

    do_HEAD = do_GET

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", _POLICY)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: one line a scrape says nothing."""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _pidfd_of(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise system_fault(error.errno or 0, f"cannot watch process {pid}") from None


def _end_with(server: Server, process: int) -> None:
    """Ends the server when the process of that pidfd has ended."""
    is_readable_within(process, None)
    os.close(process)
    server.shutdown()


def run(
    host: str,
    port: int,
    pid: int | None,
    ends_with: int | None,
    names: Sequence[str],
    everyone: bool,
) -> None:
    """Serves, also under these names, until it is interrupted, or that process has ended; what all
    users have, as metrics alone. Raises OSError as `Server`, and SystemFault."""
    process = None if ends_with is None else _pidfd_of(ends_with)
    source = metrics_of_all.Source() if everyone else Source(pid)
    try:
        with Server(host, port, source, names) as server:
            if process is not None:
                threading.Thread(target=_end_with, args=(server, process), daemon=True).start()
            where, bound = server.server_address[:2]
            shown = f"[{where!s}]" if ":" in str(where) else str(where)
            served = "metrics" if everyone else " (also /metrics and /json)"
            print(f"memlane: http://{shown}:{bound}/{served}", flush=True)
            server.serve_forever()
    finally:
        source.close()
