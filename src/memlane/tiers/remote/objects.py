"""The tier on an object store: S3, Google Cloud Storage, Azure. Needs `memlane[s3]`.

obstore makes the requests. A request costs tens of milliseconds and money, so the blocks of a batch
share one object, a pack. Its name lists them: a list of the names shows every block that is there,
and no object is read for it.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import os
import re
import selectors
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import Any

from memlane._base.arguments import integer_from
from memlane._base.deadline import Deadline, seconds_of
from memlane._base.lifetime import start_thread
from memlane._importing import fork_waits
from memlane._locks import Lock
from memlane.errors import AccessRefused, InvalidArgument, Unsupported, system_fault
from memlane.tiers.remote.blocks import HEADER
from memlane.tiers.remote.packs import KEY_BYTES, Index, Pack, now_ms, path_from, path_of
from memlane.tiers.remote.tier import RemoteTier
from memlane.tiers.remote.transport import (
    ENDING,
    Late,
    Refusal,
    Refused,
    Transport,
    Unanswered,
    digest_of,
)
from memlane.tiers.tier import Namespace, Rows, text

_GAP = 1 << 20  # bytes that are read for nothing rather than asked for twice
_AT_ONCE = 8  # requests of one connection
_PAGE = 1000  # names in one answer of a list, and in one order to delete
_EVERY = 1.0  # seconds between two lists, at least
_SHARE = 4  # the time between two lists is so many times what one takes, at least
_SLACK = 120_000  # milliseconds by which clocks may differ, and that a put may take
_FULL = 600.0  # seconds between two lists of everything
_FIRST = 0.5  # share of the constructor's time that a list of everything may take
_SLICE = 0.5  # seconds of a list of everything that one question or load may take
_LONGEST = 3600.0
_PARTING = 10.0  # seconds that the end of the interpreter waits for obstore's threads, at most
_ANSWERS = range(400, 500)  # HTTP statuses of a server that works
_BUSY = (408, 429)  # those among them of one that does not
_STATUS = re.compile(r"non-2xx status code: (\d{3})")


class ObjectTier(RemoteTier):
    """Blocks in a bucket of an object store, where other machines find them::

        with ObjectTier("s3://bucket/kv", rows, namespace="llama-3-8b") as tier:
            ticket = tier.store(keys, ids)
            for done in tier.poll():
                ...

    The blocks of a batch, up to 32 or 4 MiB, are one object. The names of the objects show which
    blocks are there: the tier lists them when it is opened, and new ones when it is asked for keys
    that it does not know, once a second at most. The clocks of the machines must agree to within
    two minutes. `forget` removes whole objects: the blocks beside a forgotten one become misses.
    Nothing is evicted: give the bucket a lifecycle rule.

    Each block has a CRC-32C seeded with its key: bytes other than those that were stored are a
    miss. A server that does not answer is not tried for a second, then two, up to a minute;
    meanwhile its blocks fail at once, and the log says so once. Anyone who can read the bucket can
    read the blocks, and blocks reveal prompts.

    One batch is under way on each of the `connections`; each has a thread, and memory for a batch
    and a copy of it.
    """

    what = "an object tier"

    def __init__(
        self,
        url: str,
        rows: Any,
        *,
        namespace: str | bytes = b"",
        timeout: float = 10.0,
        connections: int = 4,
        **options: Any,
    ) -> None:
        """Args:
            url: as obstore accepts it: `s3://bucket/prefix`, `gs://bucket/prefix`,
                `az://container/prefix`, or `file:///folder`.
            rows, namespace, timeout, connections: as of every `Tier`; timeout in seconds, also of
                a request.
            options: of obstore's `from_url`, such as `endpoint`, `region`, `access_key_id`,
                `client_options` and `retry_config`. Those of the client, such as `allow_http`, may
                also stand beside the others, or in the environment, as `AWS_ALLOW_HTTP`; what is
                passed here counts before the environment.

        Raises:
            InvalidType, InvalidArgument: an argument is not valid.
            Unsupported: obstore is not installed, or was used before this process was forked.
            AccessRefused: the server refuses these credentials, or this bucket.
            SystemFault: there is no such bucket, or the server cannot be reached.
        """
        try:
            with fork_waits:
                import obstore
        except ImportError:
            raise Unsupported("ObjectTier needs obstore: pip install 'memlane[s3]'") from None
        text("url", url)
        count = integer_from("connections", connections, 1, 64)
        _process.check()
        store = _open(obstore, url, seconds_of(timeout), options)
        folder = Namespace(namespace).id.hex()
        bucket = _Bucket(obstore, store, folder, HEADER.size + Rows(rows).nbytes)

        def connect(_: Deadline) -> _Requests:
            return _Requests(bucket)

        def connect_first(deadline: Deadline) -> _Requests:
            _first_list(bucket, deadline.left())
            return _Requests(bucket)

        super().__init__(
            rows,
            connect,
            connect_first,
            prefix=b"memlane:",
            namespace=namespace,
            timeout=timeout,
            connections=count,
        )


_CLIENT = {
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type"),
    *("http1_only", "http2_only", "http2_keep_alive_interval", "http2_keep_alive_timeout"),
    *("http2_keep_alive_while_idle", "http2_max_frame_size", "pool_idle_timeout"),
    *("pool_max_idle_per_host", "proxy_url", "proxy_ca_certificate", "proxy_excludes"),
    *("randomize_addresses", "timeout", "user_agent"),
}
_PREFIXES = {
    **dict.fromkeys(("s3:", "s3a:"), "aws_"),
    "gs:": "google_",
    **dict.fromkeys(("az:", "azure:", "adl:", "abfs:", "abfss:"), "azure_"),
}


def _client_options(prefixes: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of the HTTP client, by the names that they have behind these prefixes."""
    found = {}
    for key, value in options.items():
        for prefix in prefixes:
            name = key.lower()[len(prefix) :]
            if name in _CLIENT and key.lower() == prefix + name:
                found[name] = value
    return found


def _open(obstore: Any, url: str, timeout: float, options: dict[str, Any]) -> Any:
    """Returns the store of that URL. No request is made."""
    errors = obstore.exceptions
    limit = timedelta(seconds=min(_LONGEST, max(1.0, timeout)))
    client = {"timeout": limit, "connect_timeout": min(limit, timedelta(seconds=5))}
    retry = {"max_retries": 2, "retry_timeout": limit}
    settings: dict[str, Any] = {"automatic_cleanup": True} if url.startswith("file:") else {}
    prefixes = [each for start, each in _PREFIXES.items() if url.startswith(start)]
    # obstore reads those of the environment only if it is given none, and panics at those that
    # stand beside the options of the store.
    client |= _client_options(prefixes, os.environ)
    beside = _client_options(["", *prefixes], options)
    settings |= {k: v for k, v in options.items() if not _client_options(["", *prefixes], {k: v})}
    try:
        settings["client_options"] = client | beside | (options.get("client_options") or {})
        settings["retry_config"] = retry | (options.get("retry_config") or {})
        store = obstore.store.from_url(url, **settings)
    except BaseException as error:
        is_refusal = isinstance(error, (errors.BaseError, ValueError, TypeError, KeyError))
        if not is_refusal and type(error).__name__ != "PanicException":  # it is no Exception
            raise
        if "LocalFileSystem" in str(error):
            why = f"cannot use the object store: {_text(error)}"
            raise system_fault(errno.ENOENT, why) from None
        raise InvalidArgument(
            f"obstore does not accept this url or these options: {_text(error)}"
        ) from None  # what it says may have a password
    if isinstance(store, obstore.store.HTTPStore):
        raise InvalidArgument(f"url must be of an object store, not {url.partition(':')[0]}")
    return store


def _first_list(bucket: _Bucket, timeout: float) -> None:
    """Lists what is there, in a thread of its own: the caller's may run an event loop. Raises what
    the constructor raises."""
    results: SimpleQueue[BaseException | None] = SimpleQueue()

    def run() -> None:
        requests = _Requests(bucket)
        try:
            bucket.refresh(requests, time.monotonic() + timeout, seconds=_FIRST * timeout)
            results.put(None)
        except BaseException as error:
            results.put(error)
        finally:
            requests.close()

    start_thread(threading.Thread(target=run, name="memlane-tier-list", daemon=True))
    failure = results.get()
    if failure is None:
        return
    cause = failure.__cause__
    status = _status(cause) if cause else None
    if isinstance(cause, bucket.refusals) or status in (401, 403):
        raise AccessRefused(f"the object store refuses this client: {failure}") from None
    number = errno.ENOENT if status == 404 else errno.EIO
    if isinstance(failure, Late):
        number = errno.ETIMEDOUT
    raise system_fault(number, f"cannot use the object store: {failure}") from None


# The bucket ---------------------------------------------------------------------------------------


class _Bucket:
    """State that the connections share: the store, the index of what is there, and the lists of it.

    Attributes:
        obstore, store: the module, and its store.
        folder: of the namespace.
        value_bytes: size of a block with its header.
        index: what is there, as far as it was listed.
        refusals: obstore's exceptions for a client that may not do this.
    """

    def __init__(self, obstore: Any, store: Any, folder: str, value_bytes: int) -> None:
        self.obstore, self.store = obstore, store
        self.folder, self.value_bytes = folder, value_bytes
        self.index = Index()
        errors = obstore.exceptions
        self.refusals: tuple[type[BaseException], ...] = (
            errors.PermissionDeniedError,
            errors.UnauthenticatedError,
        )
        self._listing = threading.Lock()  # what follows is read and changed with it
        self._everything: AsyncIterator[Any] | None = None  # a list that has not ended
        self._everything_at = -inf  # when the last one began
        self._begun = 0.0  # the one that has not ended
        self._next = -inf  # when there may be another list
        self._listed = -inf  # when the last one began
        self._listed_ms = 0  # the same, since the epoch

    def refresh(
        self, requests: _Requests, end: float, *, seconds: float | None = None, fully: bool = False
    ) -> None:
        """Lists what is new, if the last list is old enough. Raises Unanswered or Refused.

        Args:
            end: the deadline, on the clock `time.monotonic()`.
            seconds: how long a list of everything may take now; it goes on with the next call.
            fully: lists in any case, and to the end.
        """
        asked = time.monotonic()
        with _LockedUntil(self._listing, end):
            now = time.monotonic()
            is_time = fully or now >= self._next
            if self._everything is None and is_time and now >= self._everything_at + _FULL:
                self._begun = self._begin_list()
                self._everything = self._list(None)
                self.index.begin_round()
            if self._everything is not None:
                until = inf if fully else now + (_SLICE if seconds is None else seconds)
                try:
                    is_all = requests.run(partial(self._read, self._everything, until), end)
                except BaseException:
                    self._everything = None  # what it has read of a page is lost with it
                    self._next = time.monotonic() + _EVERY
                    raise
                if is_all:
                    self._everything, self._everything_at = None, self._begun
                    self.index.end_round()
                    self._next = max(self._next, self._begun + _EVERY)
            if time.monotonic() >= self._next or (fully and self._listed < asked):
                since = path_from(self.folder, self._listed_ms - _SLACK)
                before = self._listed, self._listed_ms
                begun = self._begin_list()
                try:
                    requests.run(partial(self._read, self._list(since), inf), end)
                except BaseException:
                    self._listed, self._listed_ms = before
                    self._next = time.monotonic() + _EVERY
                    raise
                now = time.monotonic()
                self._next = max(begun + _EVERY, now + _SHARE * (now - begun))

    def _begin_list(self) -> float:
        self._listed, self._listed_ms = time.monotonic(), now_ms()
        return self._listed

    def _list(self, since: str | None) -> AsyncIterator[Any]:
        stream: AsyncIterator[Any] = self.obstore.list(
            self.store, self.folder, offset=since, chunk_size=_PAGE
        )
        return stream

    async def _read(self, stream: AsyncIterator[Any], until: float) -> bool:
        """Reads a list. Returns False if it has more at that time."""
        async for page in stream:
            self.index.add(self._packs(page))
            if time.monotonic() >= until:
                return False
        return True

    def _packs(self, page: Iterable[Any]) -> list[Pack]:
        packs = (Pack.named(self.folder, each["path"], each["size"]) for each in page)
        return [pack for pack in packs if pack is not None]

    def remove(self, requests: _Requests, keys: Sequence[bytes], end: float) -> None:
        """Removes all packs that have one of these keys."""
        self.refresh(requests, end, fully=True)
        paths = self.index.having(keys)
        requests.run(partial(self._delete, paths), end)

    def clear(self, requests: _Requests, end: float) -> None:
        """Removes all packs of the namespace."""
        with _LockedUntil(self._listing, end):
            self._everything = None
            self._everything_at = -inf  # what is not removed is found again
            self.index.begin_round()
            removed: list[str] = []
            try:
                requests.run(partial(self._clear, removed), end)
            except Late:
                if removed:
                    raise Refused(
                        f"it has removed {len(removed)} objects in time, and has more"
                    ) from None
                raise
            self.index.end_round()

    async def _clear(self, removed: list[str]) -> None:
        paths = [
            pack.path async for page in self._list(None) for pack in self._packs(page)
        ]  # first: some stores do not like to be changed under a list
        for at in range(0, len(paths), _PAGE):
            some = paths[at : at + _PAGE]
            await self._delete(some)
            removed += some

    async def _delete(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        try:
            await self.obstore.delete_async(self.store, [*paths])
        except FileNotFoundError:  # of one of them: the others may still be there

            async def delete(path: str) -> None:
                with suppress(FileNotFoundError):
                    await self.obstore.delete_async(self.store, path)

            await _all(partial(delete, path) for path in paths)
        self.index.drop(paths)


class _LockedUntil:
    """A lock that is waited for until a time; then it raises Late."""

    def __init__(self, lock: threading.Lock, end: float) -> None:
        self._lock, self._end = lock, end

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=max(0.0, self._end - time.monotonic())):
            raise Late

    def __exit__(self, *_: object) -> None:
        self._lock.release()


async def _all(work: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Runs all, a few at once. Raises the first of the errors once all have ended."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def do(one: Callable[[], Awaitable[None]]) -> None:
        async with places:
            await one()

    results = await asyncio.gather(*map(do, work), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


# Requests -----------------------------------------------------------------------------------------


class _Requests(Transport):
    """The requests of one thread. They are asynchronous, because those end at their deadline, and
    several are made at once. The connections are obstore's own."""

    def __init__(self, bucket: _Bucket) -> None:
        self._bucket = bucket
        self._loop: asyncio.AbstractEventLoop | None = None  # from its first use on
        self._task: asyncio.Task[Any] | None = None
        self._busy = Lock()

    # What a tier does ----------------------------------------------------------------------------

    def put(
        self,
        names: Sequence[bytes],
        values: Sequence[tuple[bytes, memoryview]],
        deadline: Deadline,
    ) -> list[Refusal | None]:
        refusals: list[Refusal | None] = [None] * len(names)
        keys = _keys(names)
        size = self._bucket.value_bytes
        found = self._bucket.index.find(keys, size)
        new = [at for at, pack in enumerate(found) if pack is None or pack.value_bytes != size]
        if not new:
            return refusals
        data = b"".join(part for at in new for part in values[at])  # not the caller's: may be late
        packed = [keys[at] for at in new]
        pack = Pack(path_of(self._bucket.folder, packed), packed, len(data))
        try:
            self.run(partial(self._put, pack.path, data), deadline.end)
        except Refused as error:
            for at in new:
                refusals[at] = Refusal(error)
            return refusals
        self._bucket.index.add([pack])
        return refusals

    async def _put(self, path: str, data: bytes) -> None:
        bucket = self._bucket
        try:
            await bucket.obstore.put_async(bucket.store, path, data, use_multipart=False)
        except FileNotFoundError as error:
            raise Refused(_text(error)) from error  # there is no such bucket

    def get(
        self, names: Sequence[bytes], into: Sequence[memoryview], deadline: Deadline
    ) -> list[int | Refusal]:
        found: list[int | Refusal] = [-1] * len(names)
        keys = _keys(names)
        missing = self._get_known(keys, range(len(names)), into, found, deadline.end)
        if missing:
            try:
                self._bucket.refresh(self, deadline.end)
            except Refused as error:
                for at in missing:
                    found[at] = Refusal(error)
                return found
            self._get_known(keys, missing, into, found, deadline.end)
        return found

    def _get_known(
        self,
        keys: Sequence[bytes],
        places: Sequence[int],
        into: Sequence[memoryview],
        found: list[int | Refusal],
        end: float,
    ) -> list[int]:
        """Gets what is in the index. Returns the places of what is not."""
        missing: list[int] = []
        by_pack: dict[str, list[tuple[int, int]]] = defaultdict(list)  # offset and place
        packs: dict[str, Pack] = {}
        size = self._bucket.value_bytes
        there = self._bucket.index.find([keys[at] for at in places], size)
        for at, pack in zip(places, there, strict=True):
            if pack is None:
                missing.append(at)
            elif pack.value_bytes != size:
                found[at] = pack.value_bytes
            else:
                packs[pack.path] = pack
                by_pack[pack.path].append((pack.keys.index(keys[at]) * size, at))
        runs = [
            (packs[path], run) for path, wanted in by_pack.items() for run in _runs(wanted, size)
        ]
        if not runs:
            return missing
        failures: list[Unanswered] = []

        async def get(pack: Pack, run: list[tuple[int, int]]) -> None:
            try:
                got: int | Refusal = await self._get_run(pack, run, into)
            except Unanswered as error:
                failures.append(error)
                got = Refusal(error)
            except Refused as error:
                got = Refusal(error)
            for _, at in run:
                found[at] = got

        try:
            self.run(partial(_all, [partial(get, *each) for each in runs]), end)
        except Refused as error:
            for _, run in runs:
                for _, at in run:
                    found[at] = Refusal(error)
        if len(failures) == len(runs):
            raise Unanswered(str(failures[0]))
        return missing

    async def _get_run(
        self, pack: Pack, run: list[tuple[int, int]], into: Sequence[memoryview]
    ) -> int | Refusal:
        """Gets blocks that lie near each other in a pack. Returns what `get` returns for each."""
        size = self._bucket.value_bytes
        first, last = run[0][0], run[-1][0] + size
        bucket = self._bucket
        try:
            answer = await bucket.obstore.get_async(
                bucket.store, pack.path, options={"range": (first, last)}
            )
            if answer.meta["size"] != pack.size:
                return 0
            data = memoryview(await answer.bytes_async())
        except FileNotFoundError:
            bucket.index.drop([pack.path])
            return -1
        except Exception as error:
            if await self._is_cut(pack, error):
                return 0
            raise self._as_own(error) from error
        if data.nbytes != last - first:
            return 0
        for offset, at in run:
            into[at][:] = data[offset - first : offset - first + size]
        return size

    async def _is_cut(self, pack: Pack, error: BaseException) -> bool:
        """Returns whether the error came because the object is shorter than the list showed."""
        status = _status(error)
        if status is not None or "HTTP" in str(error):
            return status == 416
        bucket = self._bucket
        with suppress(Exception):  # the error itself is reported
            meta = await bucket.obstore.head_async(bucket.store, pack.path)
            return bool(meta["size"] != pack.size)
        return False

    def ask(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
        keys = _keys(names)
        size = self._bucket.value_bytes
        found = self._bucket.index.find(keys, size)
        if any(pack is None or pack.value_bytes != size for pack in found):
            self._bucket.refresh(self, deadline.end)
            found = self._bucket.index.find(keys, size)
        return [pack is not None and pack.value_bytes == size for pack in found]

    def remove(self, names: Sequence[bytes], deadline: Deadline) -> None:
        self._bucket.remove(self, _keys(names), deadline.end)

    def clear(self, prefix: bytes, deadline: Deadline) -> None:
        self._bucket.clear(self, deadline.end)

    def close(self) -> None:
        with self._busy:
            if self._loop is not None:
                self._loop.close()
                self._loop = None

    # The event loop ------------------------------------------------------------------------------

    def run(self, work: Callable[[], Awaitable[Any]], end: float) -> Any:
        """Runs `work` in this thread until that time. Raises Unanswered or Refused."""
        with self._busy:
            _process.busy.add(self)
            try:
                if _process.is_over:
                    raise Refused(ENDING)
                if self._loop is None:
                    self._loop = _Loop()
                self._task = self._loop.create_task(_until(work, end))
                result, error = self._loop.run_until_complete(self._task)
            finally:
                _process.busy.discard(self)
                self._task = None
        if error is None:
            return result
        if isinstance(error, (Unanswered, Refused)):
            raise error
        if isinstance(error, TimeoutError):
            raise Late
        if isinstance(error, asyncio.CancelledError):
            raise Refused(ENDING)
        raise self._as_own(error) from error  # also a panic of obstore's

    def _as_own(self, error: BaseException) -> Unanswered | Refused:
        status = _status(error)
        is_answer = status in _ANSWERS and status not in _BUSY
        kind = Refused if is_answer or isinstance(error, self._bucket.refusals) else Unanswered
        return kind(_text(error))

    def give_up(self, end: float) -> None:
        """Ends what is under way, and waits for that until then; called by another thread."""
        while time.monotonic() < end:
            loop, task = self._loop, self._task
            if loop is not None and task is not None:
                with suppress(RuntimeError):  # it was closed meanwhile
                    loop.call_soon_threadsafe(task.cancel)
            if self._busy.acquire(timeout=0.1):  # it may have begun since
                self._busy.release()
                return


class _Loop(asyncio.SelectorEventLoop):
    """Notes the futures that obstore's threads complete."""

    def __init__(self) -> None:
        # A selector that a forked child cannot change under its parent, as it can epoll.
        super().__init__(selectors.PollSelector())

    def create_future(self) -> asyncio.Future[Any]:
        """Returns a new one; obstore makes one for each request."""
        future = super().create_future()
        _process.futures.add(future)
        return future


async def _until(
    work: Callable[[], Awaitable[Any]], end: float
) -> tuple[Any, BaseException | None]:
    """Returns what `work` returns, and what it raises: an error that is raised further would be in
    a cycle with its task, and keep the rows that are being stored."""
    try:
        async with asyncio.timeout(max(0.0, end - time.monotonic())):
            return await work(), None
    except BaseException as error:
        return None, error


def _keys(names: Sequence[bytes]) -> list[bytes]:
    """Returns the keys by which the index knows these names."""
    return [digest_of(name)[:KEY_BYTES] for name in names]


def _runs(wanted: Sequence[tuple[int, int]], size: int) -> list[list[tuple[int, int]]]:
    """Groups offsets and places so that one request reads each group."""
    runs: list[list[tuple[int, int]]] = []
    for each in sorted(wanted):
        if runs and each[0] - (runs[-1][-1][0] + size) <= _GAP:
            runs[-1].append(each)
        else:
            runs.append([each])
    return runs


def _status(error: BaseException) -> int | None:
    """Returns the HTTP status that the server answered with, if it did."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _text(error: BaseException) -> str:
    """Returns the text of an error on one line, without the part for obstore's developers."""
    line = " ".join(str(error).partition("\n\nDebug source")[0].split())
    return line[:400] or type(error).__name__


# The process --------------------------------------------------------------------------------------


class _Process:
    """Ends all requests before the interpreter ends: obstore's threads take its lock when a request
    ends, and drop the request's future with it. Then it would end the process with SIGABRT.

    Attributes:
        busy: those that may be making a request.
        futures: those that a thread of obstore may still complete, or be completing.
        is_over: the interpreter ends; no request begins.
    """

    def __init__(self) -> None:
        self.busy: set[_Requests] = set()
        self.futures: weakref.WeakSet[asyncio.Future[Any]] = weakref.WeakSet()
        self.is_over = False
        self._pid = 0

    def check(self) -> None:
        """Raises Unsupported in a forked child: obstore's threads are the parent's."""
        if self._pid == 0:
            self._pid = os.getpid()
            atexit.register(self._end)
        elif self._pid != os.getpid():
            raise Unsupported("this process was forked from one that uses obstore: spawn it")

    def _end(self) -> None:
        if self._pid != os.getpid():
            return
        self.is_over = True
        end = time.monotonic() + _PARTING
        for requests in [*self.busy]:
            requests.give_up(end)
        with fork_waits:
            import obstore

        while self.futures and time.monotonic() < end:
            obstore.store.MemoryStore()  # a call drops what a thread without the lock has left
            time.sleep(0.001)  # no thread of obstore says when it is done


_process = _Process()
