"""The object tier on stores that are real, and on servers that misbehave."""

import asyncio
import base64
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import AccessRefused, InvalidArgument, InvalidType, SystemFault, Unsupported
from memlane.tiers.conformance import TierConformance, content, key
from memlane.tiers.tier import Namespace
from tests.support import PATIENCE, assert_in_time, until
from tests.support.missing import needs
from tests.support.object_servers import (
    REFUSAL,
    Bucket,
    ObjectServer,
    lasting_server,
)
from tests.support.remote_tiers import ROW, Place, TiersOnServers, load, rows_of, store
from tests.support.servers import free_port

pytest.importorskip("obstore", reason=needs("obstore"))
from memlane.tiers.remote.objects import ObjectTier

pytestmark = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)


@pytest.fixture(scope="module", autouse=True)
def shared() -> Iterator[ObjectServer]:
    """One for all tests that do not hurt it."""
    with lasting_server() as running:
        yield running


class TestObjectTier(TierConformance):
    """A bucket for each test."""

    @pytest.fixture(autouse=True)
    def _server(self, shared: ObjectServer) -> None:
        self.server = shared

    def open(self, place: Path, rows: Any, **options: Any) -> ObjectTier:
        url = self.server.create(bucket_of(place))
        options = {"timeout": 60.0, **self.server.options} | options
        return ObjectTier(f"{url}/some/prefix", rows, **options)


class TestFiles(TierConformance):
    """A folder for each test."""

    def open(self, place: Path, rows: Any, **options: Any) -> ObjectTier:
        return ObjectTier(folder(place), rows, **({"timeout": 60.0} | options))


def bucket_of(place: Path) -> str:
    """A name that a bucket may have."""
    return "b-" + place.name.lower().replace("_", "-")[:50].strip("-")


def folder(place: Path) -> str:
    """The URL of a store in it."""
    (place / "store").mkdir(exist_ok=True)
    return f"file://{place}/store"


class BucketPlace(Place):
    """A bucket on a server, and tiers on it."""

    server: ObjectServer

    def __init__(self, server: ObjectServer, name: str) -> None:
        self.name, self.url = name, server.create(name)
        super().__init__(server, ObjectTier, self.url, **{"timeout": PATIENCE} | server.options)
        self.bucket = Bucket(self.url, **server.options)

    def start(self) -> None:
        super().start()
        self.server.create(self.name)


@pytest.fixture
def place(shared: ObjectServer, tmp_path: Path) -> BucketPlace:
    return BucketPlace(shared, bucket_of(tmp_path))


@pytest.fixture
def own(tmp_path: Path) -> Iterator[BucketPlace]:
    """On a server of the test's own."""
    with ObjectServer() as server:
        yield BucketPlace(server, "bucket")


class TestTiersOnObjectStores(TiersOnServers):
    def count_values(self, place: BucketPlace) -> int:
        return len(place.bucket.names())


def name_of(*numbers: int, milliseconds: int | None = None, namespace: bytes = b"") -> str:
    """Returns the name of an object with these blocks, as a tier would have made it."""
    space = Namespace(namespace)
    digests = [digest[:12] for digest in space.digests([key(number) for number in numbers])]
    now = time.time_ns() // 1_000_000 if milliseconds is None else milliseconds
    text = base64.urlsafe_b64encode(b"".join(digests)).decode()
    return f"{space.id.hex()}/{now:012x}{os.urandom(4).hex()}/{text}"


# What is stored -----------------------------------------------------------------------------------


def test_blocks_share_objects_and_are_stored_once(place: BucketPlace) -> None:
    """32 share an object; what is there is not stored again."""
    rows = rows_of(300, 10_001)
    with place.tier(rows) as tier:
        assert store(tier, *range(300)).ok.all()
    assert len(place.bucket.names()) == 10
    with place.tier(rows) as again:
        assert store(again, *range(300)).ok.all()
        expected = rows.copy()
        rows[:] = 0
        assert load(again, *range(299, -1, -7)).ok.all()
        np.testing.assert_array_equal(rows[299::-7], expected[299::-7])
        assert not rows[0].any()
    assert len(place.bucket.names()) == 10


def test_rows_that_are_larger_than_a_batch(place: BucketPlace) -> None:
    rows = rows_of(3, 5 << 20)
    expected = rows.copy()
    with place.tier(rows) as tier:
        assert store(tier, 0, 1, 2).ok.all()
        rows[:] = 0
        assert load(tier, 2, 0, 1).ok.all()
        np.testing.assert_array_equal(rows, expected)
    assert len(place.bucket.names()) == 3


def test_blocks_of_several_threads_are_stored(place: BucketPlace) -> None:
    rows = rows_of(64)
    expected = rows.copy()
    with place.tier(rows) as tier:

        def run(first: int) -> None:
            for number in range(first, 64, 4):
                tier.store([key(number)], [number])

        threads = [threading.Thread(target=run, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tier.drain(PATIENCE)
        rows[:] = 0
        assert load(tier, *range(64)).ok.all()
        np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize(
    "change", ["a byte", "short", "cut", "long", "empty", "another version", "exchanged", "gone"]
)
@pytest.mark.parametrize("kind", ["s3", "file"])
def test_changed_objects_are_misses(
    place: BucketPlace, tmp_path: Path, change: str, kind: str
) -> None:
    """Are misses; the row is as it was, and the blocks can be stored again."""
    options: dict[str, Any] = place.server.options if kind == "s3" else {}
    url = place.url if kind == "s3" else folder(tmp_path)
    bucket = Bucket(url, **options)
    rows = rows_of(4)
    with ObjectTier(url, rows, connections=1, **options) as tier:
        assert store(tier, 0, 1, 2).ok.all()
        (first,) = bucket.names()
        assert store(tier, 3).ok.all()
        (second,) = {*bucket.names()} - {first}
        values = {name: bucket.read(name) for name in (first, second)}
        value = values[first]
        match change:
            case "a byte":
                value = bytes(each ^ (at % (ROW + 16) == 2000) for at, each in enumerate(value))
            case "short":
                value = value[:-100]
            case "cut":
                value = value[: len(value) // 3]
            case "long":
                value += bytes(100)
            case "empty":
                value = b""
            case "another version":
                value = value.replace(b"MLT1", b"MLT9")
            case "exchanged":
                value = values[second] * 3
            case _:
                bucket.remove(first)
        if change != "gone":
            bucket.write(first, value)
        rows[:] = 7
        done = load(tier, 1, 2)
        assert not done.ok.any()
        assert done.error == (None if change == "gone" else "a block is not what was stored")
        assert (rows == 7).all()
        assert tier.statistics().corrupt == (0 if change == "gone" else 2)
        assert load(tier, 3).ok.all()
        assert bucket.names() == [second]
        rows[:] = rows_of(4)
        assert store(tier, 0, 1, 2).ok.all()
        rows[:] = 0
        assert load(tier, 0, 1, 2).ok.all()
        np.testing.assert_array_equal(rows[:3], rows_of(3))


def test_rows_of_another_size_are_misses(place: BucketPlace) -> None:
    """Rows of another size under the same keys are misses, and both can be stored."""
    small, large = rows_of(2), rows_of(2, 2 * ROW)
    with place.tier(small) as one, place.tier(large) as two:
        assert store(one, 0, 1).ok.all()
        time.sleep(1.1)
        assert two.has([key(0)]) != [True]
        assert two.drain()
        assert two.has([key(0)]) == [False]
        assert store(two, 0, 1).ok.all()
        small[:], large[:] = 0, 0
        assert load(one, 0, 1).ok.all()
        assert load(two, 0, 1).ok.all()
        np.testing.assert_array_equal(small, rows_of(2))
        np.testing.assert_array_equal(large, rows_of(2, 2 * ROW))


def test_other_objects_are_left_alone(place: BucketPlace) -> None:
    """Whatever their names are."""
    space = Namespace(b"").id.hex()
    others = ["x", f"{space}/x", f"{space}/{'0' * 20}/abc", f"{space}/{'0' * 20}/{'A' * 15}+"]
    for name in others:
        place.bucket.write(name, b"theirs")
    rows = rows_of(2)
    with place.tier(rows) as tier:
        assert store(tier, 0, 1).ok.all()
        assert load(tier, 0, 1).ok.all()
        tier.clear()
        assert not load(tier, 0, 1).ok.any()
    assert place.bucket.names() == sorted(others)


# Several tiers ------------------------------------------------------------------------------------


def test_two_tiers_see_each_other(place: BucketPlace) -> None:
    """Within a second or two, by a question or by a load."""
    rows, others = rows_of(4), rows_of(4)
    with place.tier(rows) as one, place.tier(others) as two:
        assert store(one, 0, 1).ok.all()
        begun = time.monotonic()
        until(lambda: two.has([key(0)]) == [True])
        assert_in_time(4, begun)
        others[:] = 0
        assert load(two, 0, 1).ok.all()
        np.testing.assert_array_equal(others[:2], rows[:2])
        assert store(two, 2).ok.all()
        time.sleep(1.1)
        assert load(one, 2).ok.all()


def test_a_writer_whose_clock_is_behind(place: BucketPlace) -> None:
    """By a minute, its blocks are found all the same."""
    rows = rows_of(2)
    with place.tier(rows) as tier:
        assert store(tier, 0).ok.all()
        (name,) = place.bucket.names()
        value = place.bucket.read(name)
        tier.forget([key(0)])
        assert not load(tier, 0).ok.any()
        a_minute_ago = time.time_ns() // 1_000_000 - 60_000
        place.bucket.write(name_of(0, milliseconds=a_minute_ago), value)
        time.sleep(1.1)
        assert load(tier, 0).ok.all()


def test_forgetting_removes_what_others_stored(place: BucketPlace) -> None:
    """All objects with the block are removed, also those that nobody here knows."""
    with place.tier(rows_of(4)) as one, place.tier(rows_of(4)) as two:
        assert store(one, 0, 1).ok.all()
        assert store(two, 1, 2).ok.all()  # it has not looked since
        assert store(two, 3).ok.all()
        assert len(place.bucket.names()) == 3
        one.forget([key(1)])
        assert len(place.bucket.names()) == 1
        assert not load(two, 0, 1, 2).ok.any()
        assert not load(one, 0, 1, 2).ok.any()
        assert load(two, 3).ok.all()


def test_a_block_in_two_objects_survives_the_loss_of_one(place: BucketPlace) -> None:
    """If one of them is removed the other is read."""
    rows = rows_of(2)
    with place.tier(rows) as one, place.tier(rows_of(2)) as two:
        assert store(one, 0, 1).ok.all()
        first = place.bucket.names()
        assert store(two, 0).ok.all()
        time.sleep(1.1)
        assert not load(one, 99 % 2, timeout=0).error == ""  # noqa: SIM201
        one.has([key(77)])
        assert one.drain()
        place.bucket.remove(*first)
        assert not load(one, 1).ok.any()
        rows[:] = 0
        assert load(one, 0).ok.all()
        np.testing.assert_array_equal(rows[0], content(0, ROW))


def test_what_a_lifecycle_rule_removes(place: BucketPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is found to be gone by the next list of everything, without a load."""
    with place.tier(rows_of(2)) as tier:
        assert store(tier, 0, 1).ok.all()
        place.bucket.remove(*place.bucket.names())
        monkeypatch.setattr("memlane.tiers.remote.objects._FULL", 0.0)
        time.sleep(1.1)  # as long as an answer is believed, and between two lists
        tier.has([key(9)])
        assert tier.drain()
        tier.has([key(0)])
        assert tier.drain()
        assert tier.has([key(0)]) == [False]
        assert store(tier, 0).ok.all()
        assert len(place.bucket.names()) == 1


def test_a_list_of_many_pages_is_completed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages for which the constructor has no time are listed when they are asked for."""
    url = folder(tmp_path)
    bucket = Bucket(url)
    for number in range(0, 6000, 2):
        bucket.write(name_of(number, number + 1, milliseconds=number), bytes(2 * 32))
    keys = [key(number) for number in range(6000)]

    def known(tier: ObjectTier) -> int:
        tier.has(keys)
        assert tier.drain(PATIENCE)
        return tier.has(keys).count(True)

    with ObjectTier(url, rows_of(1, 16)) as tier:
        assert known(tier) == 6000
    monkeypatch.setattr("memlane.tiers.remote.objects._FIRST", 0.0)
    monkeypatch.setattr("memlane.tiers.remote.objects._SLICE", 0.0)
    with ObjectTier(url, rows_of(1, 16), timeout=PATIENCE) as tier:
        assert known(tier) == 4000  # a page by the constructor, and one by the question
        time.sleep(1.1)  # as long as an answer is believed
        assert known(tier) == 6000


# Servers that go away -----------------------------------------------------------------------------


def test_a_bucket_that_vanishes_is_a_refusal_or_a_miss(place: BucketPlace) -> None:
    """Is a refusal, or a miss, and no reason to leave the server alone."""
    rows = rows_of(2)
    with place.tier(rows) as tier:
        assert store(tier, 0).ok.all()
        place.bucket.remove(*place.bucket.names())
        place.server.remove(place.name)
        done = store(tier, 1)
        assert not done.ok.any()
        assert "NoSuchBucket" in (done.error or "")
        assert not load(tier, 0).ok.any()
        with pytest.raises(SystemFault, match="NoSuchBucket"):
            tier.clear()
        assert not tier.statistics().stalled
        place.server.create(place.name)
        assert store(tier, 0, 1).ok.all()
        assert load(tier, 0, 1).ok.all()


class Liar:
    """An HTTP server that has one object, with a block, and answers requests for it by these
    bytes: of nothing else, or of a whole answer."""

    def __init__(self, answer: bytes) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._answer = answer
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.options: dict[str, Any] = {"endpoint": self.endpoint, "region": "r"}
        self.options |= {"access_key_id": "a", "secret_access_key": "b"}
        self.options["client_options"] = {"allow_http": True}
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            connection.settimeout(10)
            while request := lines.readline():
                length = 0
                while (line := lines.readline()).strip():
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                lines.read(length)
                if b"list-type=2" in request:
                    connection.sendall(answer_of(200, self._list()))
                    continue
                connection.sendall(self._answer)
                return

    def _list(self) -> bytes:
        return f"""<?xml version="1.0"?><ListBucketResult><Name>b</Name><IsTruncated>false
            </IsTruncated><Contents><Key>{name_of(0)}</Key><Size>{ROW + 16}</Size>
            <LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"1"</ETag></Contents>
            </ListBucketResult>""".replace("false\n            ", "false").encode()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def answer_of(status: int, body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    lines = [
        b"HTTP/1.1 %d Text" % status,
        b"Content-Length: %d" % (len(body) if length is None else length),
        b'ETag: "1"',
        b"Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT",
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


RANGE = b"Content-Range: bytes 0-%d/%d" % (ROW + 15, ROW + 16)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\r\n",
        b"x" * 100_000,
        answer_of(200, bytes(ROW + 16)),
        answer_of(206, bytes(ROW + 16), RANGE),
        answer_of(206, bytes(100), RANGE, length=ROW + 16),
        answer_of(206, bytes(100), RANGE),
        answer_of(206, bytes(2 * ROW), RANGE),
        answer_of(206, bytes(ROW + 16), b"Content-Range: bytes 5-9/7"),
        answer_of(206, b"", b"Content-Range: bytes 0-1/99999999999999999999"),
        answer_of(204, b""),
        answer_of(302, b"", b"Location: http://127.0.0.1:1/"),
        answer_of(400, b"<Error>no</Error>"),
        answer_of(418, b"\xff\xfe"),
        answer_of(500, b"out of order"),
        answer_of(503, b"slow down"),
    ],
)
def test_a_server_that_answers_nonsense_costs_misses(answer: bytes) -> None:
    """Whatever it answers: misses and failures, at the deadline at the latest."""
    liar = Liar(answer)
    rows = rows_of(2)
    try:
        with ObjectTier("s3://b", rows, connections=1, timeout=1, **liar.options) as tier:
            rows[:] = 7
            begun = time.monotonic()
            assert not load(tier, 0, timeout=None).ok.any()
            assert (rows == 7).all()
            tier.store([key(1)], [1])
            assert tier.drain(PATIENCE)
            assert_in_time(3, begun)
    finally:
        liar.close()


def test_the_rows_after_stores_that_fail() -> None:
    """Are the caller's again once the tier is closed, without a collection."""
    memory = bytearray(4 * ROW)
    liar = Liar(answer_of(500, b"out of order"))
    rows = memoryview(memory).cast("B", (4, ROW))
    gc.disable()
    try:
        with ObjectTier("s3://b", rows, connections=1, **liar.options) as tier:
            assert not store(tier, 1, 2).ok.any()
            tier.load([key(0)], [0])
        rows.release()
        memory.extend(b"x")
    finally:
        gc.enable()
        liar.close()


def test_a_signature_is_not_logged(tmp_path: Path) -> None:
    """That of a URL for Azure, which its errors have."""
    liar = Liar(answer_of(403, b"no"))
    options: dict[str, Any] = {"account_name": "a", "endpoint": f"{liar.endpoint}/a"}
    options |= {"sas_key": "sv=2024&sig=SECRET", "client_options": {"allow_http": True}}
    try:
        with pytest.raises(AccessRefused, match="refuses this client") as caught:
            ObjectTier("az://container", rows_of(1), **options)
        assert "SECRET" not in str(caught.value)
    finally:
        liar.close()


# Who may use it -----------------------------------------------------------------------------------


def test_wrong_credentials_are_refused() -> None:
    with ObjectServer(INITIAL_NO_AUTH_ACTION_COUNT="1") as server:
        server.create("bucket")
        rows = rows_of(1)
        with pytest.raises(AccessRefused, match="refuses this client"):
            ObjectTier("s3://bucket", rows, **server.options)


def test_a_bucket_that_is_not_there_is_an_error(shared: ObjectServer, tmp_path: Path) -> None:
    rows = rows_of(1)
    with pytest.raises(SystemFault, match="NoSuchBucket") as caught:
        ObjectTier("s3://no-such-bucket", rows, **shared.options)
    assert isinstance(caught.value, OSError)
    with pytest.raises(SystemFault, match="cannot use the object store"):
        ObjectTier(f"file://{tmp_path}/nothing", rows)


def test_a_server_that_is_not_there_is_an_error(shared: ObjectServer) -> None:
    rows = rows_of(1)
    options = shared.options | {"endpoint": f"http://127.0.0.1:{free_port()}"}
    with pytest.raises(SystemFault, match="cannot use the object store"):
        ObjectTier("s3://bucket", rows, **options)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options["endpoint"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(SystemFault, match="did not answer in time"):
            ObjectTier("s3://bucket", rows, timeout=1, **options)
        assert_in_time(3, begun)


def test_invalid_arguments_are_refused(shared: ObjectServer) -> None:
    rows = rows_of(1)
    for url in ("", "bucket", "ftp://x/y", "http://x", "s3://", "az://container"):
        with pytest.raises(InvalidArgument, match="url"):
            ObjectTier(url, rows)
    with pytest.raises(InvalidType):
        ObjectTier(7, rows)  # type: ignore[arg-type]
    for options in (
        {"no_such_option": 1},
        {"client_options": {"timeout": "foo"}},
        {"client_options": {"no": "foo"}},
        {"client_options": 7},
    ):
        with pytest.raises(InvalidArgument):
            ObjectTier("s3://bucket", rows, **(shared.options | options))
    assert not [thread for thread in threading.enumerate() if "memlane-tier" in thread.name]


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({"AWS_ALLOW_HTTP": "true"}, {}),
        ({}, {"allow_http": True}),
        ({}, {"aws_allow_http": "true"}),
        ({}, {"AWS_ALLOW_HTTP": "true", "timeout": 60}),
        ({"AWS_ALLOW_HTTP": "false"}, {"client_options": {"allow_http": True}}),
    ],
)
def test_options_of_the_client_come_before_the_environment(
    own: Place, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], options: Any
) -> None:
    """Count in the environment, beside those of the store, and as `client_options`, which come
    first."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    server = {name: value for name, value in own.server.options.items() if name != "client_options"}
    with ObjectTier(own.url, rows_of(1), **(server | options)) as tier:
        assert store(tier, 0).ok.all()


def test_a_panic_of_obstore_is_one_of_our_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Rust it is no Exception, and would end a program that handles all of them."""

    class PanicException(BaseException):
        pass

    def panic(*_: Any, **__: Any) -> Any:
        raise PanicException("a prefix was expected")

    monkeypatch.setattr("obstore.store.from_url", panic)
    with pytest.raises(InvalidArgument, match="or these options: a prefix was expected"):
        ObjectTier("s3://bucket", rows_of(1))


def test_an_error_says_how_to_install_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(Unsupported, match=r"pip install 'memlane\[s3\]'"):
        ObjectTier("memory:///", rows_of(1))


# Threads, loops and processes ---------------------------------------------------------------------


def test_it_can_be_opened_in_an_event_loop(place: BucketPlace) -> None:
    rows = rows_of(2)

    async def run() -> None:
        with place.tier(rows) as tier:
            ready = asyncio.Event()
            asyncio.get_running_loop().add_reader(tier.fileno(), ready.set)
            tier.store([key(0), key(1)], [0, 1])
            await ready.wait()
            asyncio.get_running_loop().remove_reader(tier.fileno())
            assert [done.ok.all() for done in tier.poll()] == [True]

    asyncio.run(run())


def test_a_tier_of_a_forked_child_is_refused(place: BucketPlace) -> None:
    """Is refused: obstore's threads are not there. What the parent has goes on."""
    with place.tier(rows_of(2)) as tier:
        assert store(tier, 0).ok.all()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                place.tier(rows_of(1))
            except Unsupported:
                del tier
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert store(tier, 1).ok.all()
        assert load(tier, 0, 1).ok.all()


def test_a_thread_of_obstore_may_outlast_the_interpreter(tmp_path: Path) -> None:
    """The report is there, and the thread that made it needs the interpreter's lock once more.

    Fails without the guard: the process ended with SIGABRT, as the thread found no interpreter.
    """
    code = f"""
import asyncio.selector_events as events, sys, threading, time
import numpy as np
from memlane.tiers.remote.objects import ObjectTier

write = events.BaseSelectorEventLoop._write_to_self

def late(loop):
    write(loop)
    if isinstance(threading.current_thread(), threading._DummyThread):  # not one of Python's
        time.sleep(0.5)

class Lingers:
    def __del__(self, sleep=time.sleep):  # the interpreter has ended, and the process goes on
        sleep(1)

events.BaseSelectorEventLoop._write_to_self = late
sys.lingers = Lingers()
tier = ObjectTier({folder(tmp_path)!r}, np.zeros((1, 4096), np.uint8))
tier.store([b"a"], [0])
tier.drain()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
