"""The Redis tier on real servers: what every tier promises, and servers that misbehave."""

import logging
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import (
    AccessRefused,
    InvalidArgument,
    InvalidType,
    SystemFault,
    Unsupported,
    _native,
)
from memlane.tiers.conformance import TierConformance, key, wait_for
from memlane.tiers.tier import DIGEST_BYTES, Done, Namespace
from tests.support import PATIENCE, alarms, assert_in_time, until
from tests.support.missing import needs
from tests.support.redis_servers import REFUSAL, RedisServer, free_port
from tests.support.remote_tiers import ROW, Place, TiersOnServers, load, rows_of, store

pytest.importorskip("redis", reason=needs("redis"))
from memlane.tiers.remote.redis import RedisTier

pytestmark = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)


class TestRedisTier(TierConformance):
    """One server for each test."""

    servers: dict[Path, RedisServer]
    connections = 2

    @pytest.fixture(autouse=True)
    def _servers(self) -> Iterator[None]:
        self.servers = {}
        yield
        for server in self.servers.values():
            server.kill()

    def open(self, place: Path, rows: Any, **options: Any) -> RedisTier:
        if place not in self.servers:
            self.servers[place] = RedisServer(place / "redis")
        options = {"connections": self.connections, "timeout": 60.0} | options
        return RedisTier(self.servers[place].url, rows, **options)


class TestOneConnection(TestRedisTier):
    connections = 1


class TestLargeRows(TestRedisTier):
    """Larger than a batch."""

    row_bytes = 5 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as running:
        yield running


class TestTiersOnRedis(TiersOnServers):
    closings = 20

    @pytest.fixture
    def place(self, server: RedisServer) -> Place:
        return Place(server, RedisTier, server.url)

    @pytest.fixture
    def own(self, place: Place) -> Place:
        return place

    def count_values(self, place: Place) -> int:
        return len(place.server.names())


def test_what_is_there_is_not_sent_again(server: RedisServer) -> None:
    rows = rows_of(64, 65536)
    with RedisTier(server.url, rows) as tier:
        assert store(tier, *range(64)).ok.all()
    received = server.received_bytes()
    with RedisTier(server.url, rows) as tier:
        assert store(tier, *range(64)).ok.all()
    assert server.received_bytes() - received < 65536


def test_an_answer_is_not_older_than_what_was_done(server: RedisServer) -> None:
    """A key that is asked for, and stored before the answer comes, is there."""
    rows = rows_of(1)
    with RedisTier(server.url, rows) as tier:
        for number in range(200):
            assert tier.has([key(number)]) == [None]
            assert wait_for(tier, tier.store([key(number)], [0])).ok.all()
            assert tier.drain(PATIENCE)
            assert tier.has([key(number)]) == [True]


def test_expired_blocks_are_misses(server: RedisServer) -> None:
    with RedisTier(server.url, rows_of(2), ttl=1) as tier:
        assert store(tier, 0, 1).ok.all()

        def are_gone() -> bool:
            done = load(tier, 0, 1)
            assert done.error is None
            return not done.ok.any()

        until(are_gone)
    with RedisTier(server.url, rows_of(2), ttl=3600) as tier:
        assert store(tier, 0, 1).ok.all()
        assert load(tier, 0, 1).ok.all()
        for name in server.names():
            assert 0 < int(server.call("TTL", name)[1:]) <= 3600


@pytest.mark.parametrize("change", ["a byte", "short", "long", "empty", "another version"])
def test_changed_values_are_misses(server: RedisServer, change: str) -> None:
    """Are misses of those keys alone; the row is as it was."""
    rows = rows_of(3)
    with RedisTier(server.url, rows) as tier:
        assert store(tier, 0, 1, 2).ok.all()
        for name in server.names():
            match change:
                case "a byte":
                    server.call("SETRANGE", name, "2000", "\x01\x02")
                case "short":
                    server.call("SET", name, b"x" * 100)
                case "long":
                    server.call("APPEND", name, b"x" * 100)
                case "empty":
                    server.call("SET", name, b"")
                case _:
                    server.call("SETRANGE", name, "0", "MLT9")
        rows[:] = 7
        done = load(tier, 0, 1, 2)
        assert not done.ok.any()
        assert done.error == "a block is not what was stored"
        assert (rows == 7).all()
        assert tier.statistics().corrupt == 3
        assert server.names() == []
        rows[:] = rows_of(3)
        assert store(tier, 0, 1, 2).ok.all()
        assert load(tier, 0, 1, 2).ok.all()


def test_values_of_another_key_are_misses(server: RedisServer) -> None:
    """Two values that were exchanged."""
    rows = rows_of(2)
    with RedisTier(server.url, rows) as tier:
        assert store(tier, 0, 1).ok.all()
        first, second = server.names()
        server.call("RENAME", first, "aside")
        server.call("RENAME", second, first)
        server.call("RENAME", "aside", second)
        assert not load(tier, 0, 1).ok.any()


def test_values_of_other_types_are_errors_of_their_block(server: RedisServer) -> None:
    """An error of the server's is one of that block alone."""
    rows = rows_of(2)
    with RedisTier(server.url, rows) as tier:
        assert store(tier, 0).ok.all()
        (name,) = server.names()
        assert store(tier, 1).ok.all()
        server.call("DEL", name)
        server.call("LPUSH", name, "a list")
        done = load(tier, 0, 1)
        assert done.ok.tolist() == [False, True]
        assert "WRONGTYPE" in (done.error or "")
        assert tier.statistics().errors == 1


def test_a_full_server_refuses_stores_and_serves_loads(tmp_path: Path) -> None:
    """Refuses stores; what it has is loaded."""
    options = ("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    with RedisServer(tmp_path / "redis", *options) as server:
        rows = rows_of(64, 1 << 16)
        with RedisTier(server.url, rows) as tier:
            done = store(tier, *range(64))
            assert 0 < done.ok.sum() < 64
            assert "OOM" in (done.error or "")
            there = [number for number in range(64) if done.ok[number]]
            assert load(tier, *there).ok.all()


# Servers that go away -----------------------------------------------------------------------------


def test_a_server_that_is_silent_is_not_waited_for(server: RedisServer) -> None:
    """For longer than a second, whatever the timeout; the next calls end at once."""
    rows = rows_of(2)
    with RedisTier(server.url, rows, timeout=60.0, connections=1) as tier:
        assert store(tier, 0).ok.all()
        server.stop()
        begun = time.monotonic()
        assert not wait_for(tier, tier.load([key(0)], [0])).ok.any()
        assert_in_time(2, begun)
        assert tier.statistics().stalled
        server.go_on()


class Liar:
    """A server that says the same to every command."""

    def __init__(self, *answers: bytes, info: bytes = b"-ERR unknown command\r\n") -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._answers, self._info = answers, info
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                for line in data.split(b"\r\n"):
                    if line in (b"CLIENT", b"SELECT", b"HELLO"):
                        connection.sendall(b"+OK\r\n")
                    elif line == b"EXISTS":  # the question of the constructor
                        connection.sendall(b":0\r\n")
                    elif line == b"INFO":
                        connection.sendall(self._info)
                    elif line in (b"GET", b"SET"):
                        connection.sendall(self._answers[0])
                        if len(self._answers) > 1:
                            return

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.mark.parametrize(
    "answers",
    [
        (b"$-7\r\n",),
        (b"$99999999999999\r\n",),
        (b"$4112\r\nshort", b"and gone"),
        (b"*2\r\n", b"and gone"),
        (b"\r\n", b"and gone"),
        (b"x" * 100_000, b"and gone"),
        (b"$\r\n", b"and gone"),
        (b":1\r\n", b"and gone"),
    ],
)
def test_a_server_that_answers_nonsense_costs_misses(answers: tuple[bytes, ...]) -> None:
    """Whatever it answers: misses and failures, at the deadline at the latest."""
    liar = Liar(*answers)
    rows = rows_of(2)
    try:
        url = f"redis://127.0.0.1:{liar.port}"
        with RedisTier(url, rows, connections=1, timeout=0.5) as tier:
            rows[:] = 7
            assert not load(tier, 0, timeout=None).ok.any()
            assert (rows == 7).all()
            tier.store([key(1)], [1])
            assert tier.drain(PATIENCE)
    finally:
        liar.close()


@pytest.mark.parametrize("info", [b"$-1\r\n", b":5\r\n", b"*0\r\n"])
def test_a_server_whose_facts_are_no_text(info: bytes) -> None:
    """A proxy may answer INFO by anything: it is used as one that lacks the command."""
    liar = Liar(b"$-1\r\n", info=info)
    try:
        with RedisTier(f"redis://127.0.0.1:{liar.port}", rows_of(1)) as tier:
            assert load(tier, 0).error is None
    finally:
        liar.close()


def test_a_server_that_floods_is_left_at_the_deadline() -> None:
    """A value without an end, as fast as it can be read, ends at the deadline all the same."""
    ours, theirs = socket.socketpair()
    theirs.sendall(b"$99999999999\r\n")
    flood = subprocess.Popen(["cat", "/dev/zero"], stdout=theirs, stderr=subprocess.DEVNULL)
    try:
        begun = time.monotonic()
        fault = _native.read_replies(ours.fileno(), 0.3, "$", [bytearray(ROW)])[1]
        assert fault == "late"
        assert_in_time(2, begun)
    finally:
        flood.kill()
        flood.wait()
        ours.close()
        theirs.close()


@pytest.mark.parametrize(
    ("kinds", "reply", "found"),
    [
        ("$", b"-\r\n", [b""]),
        ("$", b"-ERR no\r\n", [b"ERR no"]),
        ("$", b"$-1\r\n", [-1]),
        ("$", b"$-5\r\n", None),
        ("$", b":5\r\n", None),
        (":", b":5\r\n", [5]),
        ("+$", b"+OK\r\n", [0]),
        ("+$", b"+QUEUED\r\n", None),
        ("+$", b"$-1\r\n", [-1]),
    ],
)
def test_replies_are_parsed(kinds: str, reply: bytes, found: list[object] | None) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(reply)
        seen, fault, _, line = _native.read_replies(ours.fileno(), 5, kinds, [bytearray(16)])
        if found is None:
            assert (fault, line) == ("nonsense", reply.strip())
        else:
            assert (seen, fault) == (found, "none")


def test_a_reply_that_nobody_has_asked_for_is_nonsense() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"$2\r\nab\r\n$-1\r\n")
        memory = bytearray(2)
        assert _native.read_replies(ours.fileno(), 5, "$", [memory])[1] == "nonsense"
        assert memory == b"ab"


def test_a_question_that_is_refused(server: RedisServer) -> None:
    """The answers behind the first are not taken for those of what is asked next."""
    rows = rows_of(8)
    with RedisTier(server.url, rows, connections=1) as tier:
        server.call("ACL", "SETUSER", "default", "-exists")
        tier.has([key(number) for number in range(8)])
        assert store(tier, *range(8)).ok.all()
        assert load(tier, *range(8)).ok.all()
        assert not tier.statistics().stalled


# Servers that are several ------------------------------------------------------------------------


class Address:
    """A port that leads new connections to one server or another, as the name of a service does."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._socket.accept()
                theirs = self.server.connect()
                for pair in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, here: socket.socket, there: socket.socket) -> None:
        with suppress(OSError):
            while data := here.recv(1 << 16):
                there.sendall(data)
        with suppress(OSError):
            there.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def test_a_tier_follows_a_failover(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The old master keeps its connections and refuses stores; the address leads to the new one."""
    rows = rows_of(8)
    with RedisServer(tmp_path / "old") as old, RedisServer(tmp_path / "new") as new:
        address = Address(old)
        with (
            # Of several, one that is idle meanwhile follows later, and refuses a block for itself.
            RedisTier(address.url, rows, connections=1) as tier,
            caplog.at_level(logging.WARNING),
        ):
            assert store(tier, 0, 1, 2, 3).ok.all()
            old.call("REPLICAOF", "127.0.0.1", str(new.port))
            until(lambda: b"READONLY" in old.call("SET", "any", "thing"))
            assert "READONLY" in (store(tier, 4).error or "READONLY")
            address.server = new
            until(lambda: store(tier, 5).ok.all(), "it has connected to the new master")
            assert store(tier, 5, 6, 7).ok.all()
            assert load(tier, 5, 6, 7).ok.all()
            lines = [record.message for record in caplog.records if "READONLY" in record.message]
            assert len(lines) == len({*lines}) <= 1
        address.close()


def test_a_server_that_is_a_replica_for_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It refuses stores, with one line in the log, and its blocks are loaded."""
    rows = rows_of(4)
    with RedisServer(tmp_path / "one") as server, RedisServer(tmp_path / "two") as other:
        with RedisTier(server.url, rows) as tier:
            assert store(tier, 0).ok.all()
        other.call("REPLICAOF", "127.0.0.1", str(server.port))
        until(lambda: len(other.names()) == 1)
        with RedisTier(other.url, rows) as tier, caplog.at_level(logging.WARNING):
            for number in (1, 2, 3):
                assert "READONLY" in (store(tier, number).error or "")
            assert load(tier, 0).ok.all()
            assert not tier.statistics().stalled
        lines = [record.message for record in caplog.records if "refused" in record.message]
        assert lines == [f"the server of a Redis tier has refused blocks (1): {READONLY}"]


READONLY = "READONLY You can't write against a read only replica."


def test_a_node_of_a_cluster_is_refused_by_name(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path / "redis", cluster=True) as server,
        pytest.raises(Unsupported, match="a node of a Redis Cluster"),
    ):
        RedisTier(server.url, rows_of(1))


def test_a_sentinel_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "sentinel.conf").write_text("")
    path = str(tmp_path / "redis" / "sentinel.conf")
    with (
        RedisServer(tmp_path / "redis", "--sentinel", config=path) as server,
        pytest.raises(Unsupported, match="a Redis Sentinel"),
    ):
        RedisTier(server.url, rows_of(1))


def test_a_key_that_is_refused_is_not_there_and_the_others_are(server: RedisServer) -> None:
    rows = rows_of(2)
    begins = {Namespace(b"").digests([key(each)])[0][:1]: each for each in range(500)}
    (good, first), (_, second) = [pair for pair in begins.items() if pair[0].isalnum()][:2]
    with RedisTier(server.url, rows) as tier:
        tier.store([key(first), key(second)], [0, 1])
        assert tier.drain(PATIENCE)
        space = server.names()[0][:-DIGEST_BYTES]
    with RedisTier(server.url, rows) as tier:
        assert server.call("ACL", "SETUSER", "default", "resetkeys", b"~" + space + good + b"*")
        asked = [key(first), key(second)]
        until(lambda: None not in tier.has(asked))
        assert tier.has(asked) == [True, False]


# Who may use it -----------------------------------------------------------------------------------


def test_a_wrong_password_is_refused(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", "--requirepass", "secret") as server:
        rows = rows_of(1)
        for user in ("", ":wrong@"):
            with pytest.raises(AccessRefused, match="refuses this client"):
                RedisTier(f"redis://{user}127.0.0.1:{server.port}", rows)
        with RedisTier(f"redis://:secret@127.0.0.1:{server.port}", rows) as tier:
            assert store(tier, 0).ok.all()
            assert load(tier, 0).ok.all()


def test_a_tier_speaks_tls(tmp_path: Path) -> None:
    """With the authority's certificate; with another it is refused."""
    folder = tmp_path / "redis"
    with RedisServer(folder, tls=True) as server:
        rows = rows_of(40, 100_000)
        url = f"rediss://localhost:{server.tls_port}"
        expected = rows.copy()
        with RedisTier(url, rows, ssl_ca_certs=str(folder / "ca.crt")) as tier:
            assert store(tier, *range(40)).ok.all()
            rows[:] = 0
            assert load(tier, *range(40)).ok.all()
            np.testing.assert_array_equal(rows, expected)
        with pytest.raises(AccessRefused, match="certificate"):
            RedisTier(url, rows)


def test_a_server_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    rows = rows_of(1)
    for url in (f"redis://127.0.0.1:{free_port()}", f"unix://{tmp_path}/nothing"):
        with pytest.raises(SystemFault, match="cannot use the Redis server"):
            RedisTier(url, rows)


def test_invalid_arguments_are_refused(server: RedisServer) -> None:
    rows = rows_of(1)
    for url in ("http://x", "", "redis://127.0.0.1:port"):
        with pytest.raises(InvalidArgument, match="does not accept this url"):
            RedisTier(url, rows)
    with pytest.raises(InvalidType):
        RedisTier(7, rows)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        RedisTier(server.url, rows, ttl=0)
    for unknown in ({"no_such_option": 1}, {"encoding": "no such"}):
        with pytest.raises(InvalidArgument, match="redis-py does not accept these options"):
            RedisTier(server.url, rows, **unknown)  # type: ignore[arg-type]
    assert threading.active_count() == len(threading.enumerate())
    assert not [thread for thread in threading.enumerate() if "memlane-tier" in thread.name]


def test_loads_overtake_stores(server: RedisServer) -> None:
    """Somebody waits for a load; what is stored can wait."""
    rows = rows_of(201, 1 << 20)
    with RedisTier(server.url, rows, connections=1, timeout=PATIENCE) as tier:
        assert store(tier, 200).ok.all()
        stores = tier.store([key(number) for number in range(200)], [*range(200)])
        loading = tier.load([key(200)], [200])
        first = wait_for_any(tier)
        assert first.ticket == loading
        assert wait_for(tier, stores).ok.all()


def wait_for_any(tier: RedisTier) -> Done:
    while not (done := tier.poll()):
        assert select.select([tier.fileno()], [], [], PATIENCE)[0]
    return done[0]


def test_idle_connections_that_the_server_ends_cost_no_block(server: RedisServer) -> None:
    """Cost another connection, no block."""
    with RedisTier(server.url, rows_of(2), connections=1) as tier:
        for _ in range(3):
            assert store(tier, 0, 1).ok.all()
            server.call("CLIENT", "KILL", "TYPE", "normal")  # as its `timeout` does
            assert load(tier, 0, 1).ok.all()


def test_polls_of_several_threads(server: RedisServer) -> None:
    """Each report comes once."""
    with RedisTier(server.url, rows_of(8)) as tier:
        assert store(tier, *range(8)).ok.all()
        tickets: set[int] = set()
        seen: list[int] = []
        over = threading.Event()

        def poll() -> None:
            while not over.is_set():
                seen.extend(done.ticket for done in tier.poll())

        threads = [threading.Thread(target=poll) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(2000):
            tickets.add(tier.load([key(number % 8)], [number % 8]))
        assert tier.drain(PATIENCE)
        over.set()
        for thread in threads:
            thread.join()
        seen.extend(done.ticket for done in tier.poll())
        assert sorted(seen) == sorted(tickets)


def test_a_server_that_is_stopped_for_a_moment_is_waited_for(server: RedisServer) -> None:
    """By the constructor."""
    server.stop()
    resume = threading.Timer(0.4, server.go_on)
    resume.start()
    with RedisTier(f"redis://127.0.0.1:{server.port}", rows_of(2)) as tier:
        assert store(tier, 0, 1).ok.all()
    resume.join()


def test_a_short_deadline_while_it_connects_is_not_the_servers_fault(server: RedisServer) -> None:
    """Is not the server's fault either."""
    url = f"redis://127.0.0.1:{server.port}"
    with RedisTier(url, rows_of(8), connections=8) as tier:
        assert store(tier, 0).ok.all()  # at most two are connected
        server.stop()
        for number in range(8):
            tier.load([key(number)], [number], 0.05)
        assert tier.drain(PATIENCE)
        assert {done.error for done in tier.poll()} == {"the deadline has passed"}
        assert not tier.statistics().stalled
        server.go_on()
        assert load(tier, 0).ok.all()


def test_a_server_that_dribbles_cannot_hold_the_constructor(tmp_path: Path) -> None:
    """In its greeting: the constructor ends all the same."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def dribble() -> None:
            connection, _ = listener.accept()
            with connection:
                while not over.wait(0.05):
                    try:
                        connection.sendall(b"x")
                    except OSError:
                        return

        thread = threading.Thread(target=dribble)
        thread.start()
        begun = time.monotonic()
        with pytest.raises(SystemFault):
            RedisTier(f"redis://127.0.0.1:{listener.getsockname()[1]}", rows_of(1), timeout=1)
        assert_in_time(5, begun)
        over.set()
        thread.join()


def test_a_log_that_raises(server: RedisServer) -> None:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError(record)

    logger, handler = logging.getLogger("memlane"), Raises()
    logger.addHandler(handler)
    try:
        with RedisTier(server.url, rows_of(2), timeout=5) as tier:
            assert store(tier, 0).ok.all()
            server.kill()
            assert not load(tier, 0).ok.any()
            server.start()
            until(lambda: store(tier, 0).ok.all())
    finally:
        logger.removeHandler(handler)


def test_a_server_that_may_not_be_written_to(server: RedisServer) -> None:
    """A refusal is an answer: loads go on."""
    with RedisTier(server.url, rows_of(2)) as tier:
        assert store(tier, 0).ok.all()
        server.call("REPLICAOF", "127.0.0.1", "1")
        for call in (partial(tier.forget, [key(0)]), partial(store, tier, 1)):
            try:
                done = call()
            except SystemFault as error:
                assert "READONLY" in str(error)  # noqa: PT017
            else:
                assert "READONLY" in done.error
            assert not tier.statistics().stalled
            assert load(tier, 0).ok.all()


def test_nothing_to_wait_for(server: RedisServer) -> None:
    tier = RedisTier(server.url, rows_of(2))
    assert store(tier, 0, 1).ok.all()
    assert tier.drain(0)
    tier.close(0)


def test_a_poll_in_a_handler_returns_each_report_once(server: RedisServer) -> None:
    """Whatever it interrupts, each report comes once."""
    with RedisTier(server.url, rows_of(8)) as tier:
        assert store(tier, *range(8)).ok.all()
        seen: list[int] = []
        tickets = []

        with alarms(lambda: seen.extend(done.ticket for done in tier.poll()), 0.0003):
            for number in range(1500):
                tickets.append(tier.load([key(number % 8)], [number % 8]))
                seen.extend([done.ticket for done in tier.poll()])
        assert tier.drain(PATIENCE)
        seen.extend(done.ticket for done in tier.poll())
        assert sorted(seen) == sorted(tickets)
