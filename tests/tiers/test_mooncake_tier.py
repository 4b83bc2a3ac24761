"""The Mooncake tier on real masters: what every tier promises, and stores that misbehave."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import (
    InvalidArgument,
    InvalidType,
    SystemFault,
    Unsupported,
)
from memlane.tiers.conformance import TierConformance, content, key, wait_for
from memlane.tiers.remote.mooncake import MooncakeTier
from memlane.tiers.tier import Namespace
from tests.support import PATIENCE, assert_in_time, children_of, until
from tests.support.mooncake_servers import (
    REFUSAL,
    MooncakeMaster,
    Store,
    kill_with_client,
    lasting_master,
    memory,
)
from tests.support.remote_tiers import ROW, Place, TiersOnServers, load, rows_of, store
from tests.support.servers import free_port

pytestmark = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)
VALUE = 16 + ROW


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    """One for all tests that do not hurt it; another process has given it memory."""
    with lasting_master(tmp_path_factory.mktemp("mooncake") / "log") as master:
        yield master


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeMaster]:
    """A server of the test alone. Clients are killed when their tier is closed: Mooncake takes its
    time."""
    monkeypatch.setattr("memlane.tiers.remote.mooncake._ENDING", 0.1)
    with MooncakeMaster(tmp_path / "log") as master:
        yield master


@pytest.fixture
def namespace(tmp_path: Path) -> str:
    """A namespace of the test's own."""
    return str(tmp_path)


class TestMooncakeTier(TierConformance):
    """A namespace for each test."""

    @pytest.fixture(autouse=True)
    def _master(self, shared: MooncakeMaster) -> None:
        self.master = shared

    def open(self, place: Path, rows: Any, **options: Any) -> MooncakeTier:
        space = str(place).encode() + options.pop("namespace", b"")
        options = {"timeout": 60.0} | options
        return MooncakeTier(self.master.address, rows, namespace=space, **options)


class TestTiersOnMooncake(TiersOnServers):
    @pytest.fixture
    def place(self, shared: MooncakeMaster, namespace: str) -> Place:
        return Place(shared, MooncakeTier, shared.address, namespace=namespace)

    @pytest.fixture
    def own(self, own: MooncakeMaster) -> Place:
        return Place(own, MooncakeTier, own.address, segment="16MiB", timeout=20)

    def has_ended(self) -> bool:
        return super().has_ended() and not children_of(os.getpid())


def names_of(namespace: str, *numbers: int) -> list[bytes]:
    space = Namespace(namespace)
    prefix = b"memlane:" + space.id.hex().encode() + b":"
    return [prefix + digest for digest in space.digests([key(number) for number in numbers])]


def until_loaded(tier: MooncakeTier, number: int) -> None:
    until(lambda: load(tier, number, timeout=2).ok.all())


def until_stored(tier: MooncakeTier, number: int) -> None:
    until(lambda: store(tier, number).ok.all())


@pytest.mark.parametrize("row_bytes", [1, 63, 4 << 20, (5 << 20) + 1])
def test_rows_of_all_sizes_are_stored(
    shared: MooncakeMaster, namespace: str, row_bytes: int
) -> None:
    """Also larger than a batch, on one connection."""
    rows = rows_of(3, row_bytes)
    with MooncakeTier(shared.address, rows, connections=1, namespace=namespace) as tier:
        assert store(tier, 0, 1, 2).ok.all()
        rows[:] = 0
        assert load(tier, 0, 1, 2).ok.all()
        np.testing.assert_array_equal(rows, rows_of(3, row_bytes))
        tier.clear()
        assert not load(tier, 0, 1, 2).ok.any()


def test_many_keys_are_asked_for_in_several_messages(
    shared: MooncakeMaster, namespace: str
) -> None:
    """More than a message has place for."""
    rows = rows_of(4)
    keys = [key(number) for number in range(5000)]
    with MooncakeTier(shared.address, rows, namespace=namespace) as tier:
        assert store(tier, 0, 1, 2, 3).ok.all()
        until(lambda: None not in tier.has(keys), "all is known")
        assert tier.has(keys)[:5] == [True, True, True, True, False]
        tier.forget(keys)
        assert not load(tier, 0, 1, 2, 3).ok.any()


@pytest.mark.parametrize("change", ["a byte", "short", "long", "empty", "another version"])
def test_changed_values_are_misses(shared: MooncakeMaster, namespace: str, change: str) -> None:
    """Are misses of those keys alone; the row is as it was, and they can be stored again."""
    rows = rows_of(3)
    names = names_of(namespace, 0, 1)
    with (
        MooncakeTier(shared.address, rows, namespace=namespace) as tier,
        Store(shared) as raw,
    ):
        assert store(tier, 0, 1, 2).ok.all()
        for name in names:
            value = bytearray(raw.read(name, VALUE))
            match change:
                case "a byte":
                    value[2000] ^= 1
                case "short":
                    del value[100:]
                case "long":
                    value += b"x" * 100
                case "empty":
                    del value[9:]
                case _:
                    value[:4] = b"MLT9"
            raw.write(name, bytes(value))
        rows[:] = 7
        done = load(tier, 0, 1, 2)
        assert done.ok.tolist() == [False, False, True]
        assert done.error == "a block is not what was stored"
        assert (rows[:2] == 7).all()
        assert tier.statistics().corrupt == 2
        assert not raw.has(names[0])
        rows[:] = rows_of(3)
        assert store(tier, 0, 1, 2).ok.all()
        assert load(tier, 0, 1, 2).ok.all()


def test_values_of_another_key_are_misses(shared: MooncakeMaster, namespace: str) -> None:
    """Two values that were exchanged."""
    rows = rows_of(2)
    names = names_of(namespace, 0, 1)
    with (
        MooncakeTier(shared.address, rows, namespace=namespace) as tier,
        Store(shared) as raw,
    ):
        assert store(tier, 0, 1).ok.all()
        first, second = (raw.read(name, VALUE) for name in names)
        raw.write(names[0], second)
        raw.write(names[1], first)
        assert not load(tier, 0, 1).ok.any()


# Space --------------------------------------------------------------------------------------------


def test_a_store_without_memory_refuses_blocks(own: MooncakeMaster) -> None:
    """Refuses blocks, and answers."""
    rows = rows_of(2)
    with MooncakeTier(own.address, rows) as tier:
        done = store(tier, 0, 1)
        assert (done.ok.any(), done.error) == (False, "the store has no space (code -200)")
        assert (load(tier, 0).error, tier.statistics().stalled) == (None, False)
        assert tier.statistics().errors == 2


def test_a_full_store_refuses_or_evicts(own: MooncakeMaster) -> None:
    """Refuses blocks, or evicts; what it has is right."""
    rows = rows_of(128, 1 << 18)
    expected = rows.copy()
    with MooncakeTier(own.address, rows, segment="16MiB") as tier:
        for round_ in range(3):
            done = store(tier, *range(128))
            if round_ == 0:
                assert 0 < done.ok.sum() < 128
                assert done.error == "the store has no space (code -200)"
            rows[:] = 7
            found = load(tier, *range(128)).ok
            assert found.any()
            np.testing.assert_array_equal(rows[found], expected[found])
            assert (rows[~found] == 7).all()
            rows[:] = expected


def test_a_segment_goes_with_its_tier(own: MooncakeMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are misses then, at once."""
    monkeypatch.setattr("memlane.tiers.remote.mooncake._ENDING", 10)
    rows = rows_of(2)
    with MooncakeTier(own.address, rows) as other:
        with MooncakeTier(own.address, rows, segment="16MiB") as tier:
            assert store(tier, 0, 1).ok.all()
            assert load(other, 0, 1).ok.all()
        done = load(other, 0, 1)
        assert (done.ok.any(), done.error) == (False, None)


def test_a_client_that_is_killed(own: MooncakeMaster) -> None:
    """With the memory that it gave: blocks are misses, and the next client takes over."""
    rows = rows_of(2)
    with MooncakeTier(own.address, rows, segment="16MiB") as tier:
        before = set(children_of(os.getpid())) - {own.pid}
        (child,) = before
        assert store(tier, 0).ok.all()
        os.kill(child, signal.SIGKILL)
        until_stored(tier, 1)
        rows[:] = 7
        assert load(tier, 1).ok.all()
        np.testing.assert_array_equal(rows[1], content(1, ROW))
        assert set(children_of(os.getpid())) - {own.pid, child}


def test_memory_of_a_process_that_is_killed(own: MooncakeMaster) -> None:
    """Its blocks are misses or errors, in time, until the master forgets it."""
    rows = rows_of(4)
    with MooncakeTier(own.address, rows) as tier:
        with memory(own, "16MiB") as process:
            assert store(tier, 0, 1).ok.all()
            kill_with_client(process)
            rows[:] = 7
            begun = time.monotonic()
            assert not load(tier, 0, 1, timeout=3).ok.any()
            assert_in_time(4, begun)
            assert (rows == 7).all()
            until(lambda: load(tier, 0, timeout=3).error is None, "the master has noticed")
        rows[:] = rows_of(4)
        with memory(own, "16MiB"):
            until_stored(tier, 2)
            assert load(tier, 2).ok.all()


def is_stopped(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_memory_of_a_process_that_is_stopped(own: MooncakeMaster) -> None:
    """Its blocks are misses at the deadline, though Mooncake waits for a minute."""
    rows = rows_of(2)
    with MooncakeTier(own.address, rows) as tier, memory(own, "16MiB") as process:
        assert store(tier, 0, 1).ok.all()
        rows[:] = 7
        (client,) = children_of(process.pid)
        os.kill(client, signal.SIGSTOP)
        until(lambda: all(is_stopped(task) for task in Path(f"/proc/{client}/task").iterdir()))
        begun = time.monotonic()
        assert not load(tier, 0, timeout=0.5).ok.any()
        assert time.monotonic() - begun > 0.4
        assert_in_time(2, begun)
        tier.forget([key(0)])
        os.kill(client, signal.SIGCONT)
        until_loaded(tier, 1)
        assert (rows[0] == 7).all()


# Two processes ------------------------------------------------------------------------------------

OTHER = """
import sys
import numpy as np
from memlane.tiers.conformance import content, key, wait_for
from memlane.tiers.remote.mooncake import MooncakeTier
rows = np.zeros((8, 4096), np.uint8)
with MooncakeTier(sys.argv[1], rows, namespace=sys.argv[2], timeout=60) as tier:
    for line in sys.stdin:
        word, number = line.split()
        if word == "forget":
            tier.forget([key(int(number))])
            print("done", flush=True)
            continue
        if word == "store":
            rows[0] = content(int(number), 4096)
        done = wait_for(tier, getattr(tier, word)([key(int(number))], [0]))
        same = (rows[0] == content(int(number), 4096)).all()
        print(bool(done.ok[0] and same), flush=True)
        rows[:] = 0
"""


class Other:
    """Another process, with a tier."""

    def __init__(self, master: MooncakeMaster, namespace: str) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", OTHER, master.address, namespace]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def __call__(self, what: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextmanager
def other_process(master: MooncakeMaster, namespace: str) -> Iterator[Other]:
    other = Other(master, namespace)
    with other.process:
        yield other


def test_two_processes_see_each_others_blocks(shared: MooncakeMaster, namespace: str) -> None:
    """And what one forgets, also while the other reads it, is gone for both."""
    rows = rows_of(8)
    with (
        MooncakeTier(shared.address, rows, namespace=namespace) as tier,
        other_process(shared, namespace) as other,
    ):
        assert store(tier, 1).ok.all()
        assert other("load 1") == "True"
        assert other("store 2") == "True"
        rows[:] = 0
        assert load(tier, 1, 2).ok.all()
        np.testing.assert_array_equal(rows[2], content(2, ROW))
        assert other("forget 1") == "done"
        assert not load(tier, 1).ok.any()
        tier.forget([key(2)])
        assert other("load 2") == "False"
        assert other("store 1") == "True"
        assert load(tier, 1).ok.all()


# Masters that go away -----------------------------------------------------------------------------


def test_closing_without_a_master_takes_bounded_time(
    own: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bounded time, also with memory that cannot be given back."""
    monkeypatch.setattr("memlane.tiers.remote.mooncake._ENDING", 0.5)
    tier = MooncakeTier(own.address, rows_of(2), segment="16MiB")
    assert store(tier, 0).ok.all()
    own.stop()
    tier.load([key(0)], [0], 1)
    begun = time.monotonic()
    tier.close(2)
    assert_in_time(4, begun)
    assert set(children_of(os.getpid())) <= {own.pid}


def test_a_master_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(SystemFault, match="cannot use the Mooncake master"):
        MooncakeTier(f"127.0.0.1:{free_port()}", rows_of(1), timeout=1)
    with pytest.raises(SystemFault, match="cannot use the Mooncake master"):
        MooncakeTier("no.such.host.invalid:1", rows_of(1), timeout=1)
    assert_in_time(8, begun)


def test_a_master_that_says_nothing() -> None:
    """The constructor ends all the same."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(SystemFault, match="it did not answer in time"):
            MooncakeTier(address, rows_of(1), timeout=1)
        assert_in_time(3, begun)


# Arguments ----------------------------------------------------------------------------------------


def test_invalid_arguments_are_refused(shared: MooncakeMaster) -> None:
    rows = rows_of(1)
    for master in ("", "host", "host:", ":1", "host:port", "host:0", "host:65536"):
        with pytest.raises(InvalidArgument, match="master must be"):
            MooncakeTier(master, rows)
    for segment in (-1, "7 GB"):
        with pytest.raises(InvalidArgument):
            MooncakeTier(shared.address, rows, segment=segment)
    wrong: list[dict[str, Any]] = [
        *({"connections": "2"}, {"segment": None}, {"segment": 1.5}),
        *({"metadata": None}, {"protocol": 7}, {"device": None}, {"host": 7}, {"log": 7}),
        {"segment": True},
    ]
    for options in wrong:
        with pytest.raises(InvalidType):
            MooncakeTier(shared.address, rows, **options)
    with pytest.raises(InvalidType):
        MooncakeTier(7, rows)  # type: ignore[arg-type]
    assert not [thread for thread in threading.enumerate() if "memlane-tier" in thread.name]


def test_settings_that_mooncake_refuses(shared: MooncakeMaster) -> None:
    """More memory than there is, and a log in no folder."""
    for options in ({"segment": "1000TiB"}, {"log": "/no/such/folder"}):
        with pytest.raises(SystemFault, match="cannot use the Mooncake master"):
            MooncakeTier(shared.address, rows_of(1), **options)  # type: ignore[arg-type]


def test_an_error_says_how_to_install_mooncake(
    shared: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(Unsupported, match=r"pip install 'memlane\[mooncake\]'"):
        MooncakeTier(shared.address, rows_of(1))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("libibverbs.so.1: cannot open shared object file", "apt-get install libibverbs1"),
        ("libother.so.1: cannot open shared object file", "cannot import mooncake.store"),
    ],
)
def test_an_error_names_a_library_that_is_missing(
    shared: MooncakeMaster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: str,
    words: str,
) -> None:
    """Another package of that name, whose library cannot be loaded."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "store.py").write_text(f"raise ImportError({error!r})")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Unsupported, match=words):
        MooncakeTier(shared.address, rows_of(1))


def test_the_log_goes_to_its_file_only(
    shared: MooncakeMaster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Mooncake says what it does there, and nowhere else."""
    log = tmp_path / "mooncake.log"
    with MooncakeTier(shared.address, rows_of(1), log=str(log)) as tier:
        assert not load(tier, 0).ok.any()
    assert "client_id" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    assert capfd.readouterr() == ("", "")


# Life ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), 9)"])
def test_the_end_of_the_interpreter_waits_for_nothing(own: MooncakeMaster, ending: str) -> None:
    """Waits for nothing, with a tier that has no deadline, and a master that is stopped; nothing
    stays, though a forked child has all descriptors."""
    code = f"""
import os, sys, time
import numpy as np
from memlane.tiers.remote.mooncake import MooncakeTier
rows = np.zeros((2, 4096), np.uint8)
tier = MooncakeTier({own.address!r}, rows, timeout=float("inf"), segment="16MiB")
tier.store([b"a"], [0])
tier.drain()
child, = (int(each) for each in open("/proc/self/task/%d/children" % os.getpid()).read().split())
print(child, flush=True)
fork = os.fork()
if fork == 0:
    os.close(1), os.close(2), time.sleep({PATIENCE}), os._exit(0)
print(fork, flush=True)
os.kill({own.pid}, 19)
tier.load([b"a"], [1])
{ending}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    own.go_on()
    client, fork = map(int, done.stdout.split())
    assert (done.returncode, done.stderr) == (-9 if "kill" in ending else 0, "")
    until(lambda: client not in _living(), "its process has ended")
    os.kill(fork, signal.SIGKILL)


def _living() -> set[int]:
    found = set()
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if ") Z" not in (each / "stat").read_text():
                found.add(int(each.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


def test_an_interrupt_of_the_terminal(shared: MooncakeMaster, namespace: str) -> None:
    """Is the engine's: the client goes on."""
    with MooncakeTier(shared.address, rows_of(2), namespace=namespace) as tier:
        (child,) = children_of(os.getpid())
        assert os.getpgid(child) != os.getpgid(0)
        os.kill(child, signal.SIGINT)
        assert store(tier, 0).ok.all()
        assert children_of(os.getpid()) == [child]


def test_stores_that_were_given_up(own: MooncakeMaster) -> None:
    """Do not come after what is asked for later: of several for one key the last waits longest."""
    rows = rows_of(2)
    with MooncakeTier(own.address, rows, segment="16MiB", timeout=20) as tier:
        assert store(tier, 1).ok.all()
        own.stop()
        for _ in range(4):
            assert not wait_for(tier, tier.store([key(0)], [0], 0.1)).ok.any()
        resume = threading.Timer(0.3, own.go_on)
        resume.start()
        tier.forget([key(0)])
        time.sleep(0.3)  # a wait for what must not happen
        assert load(tier, 0, 1).ok.tolist() == [False, True]
        resume.join()


def test_blocks_that_were_not_read_can_be_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: a store of new ones does not fail for those of a moment ago."""
    monkeypatch.setattr("memlane.tiers.remote.mooncake._ENDING", 0.1)
    with MooncakeMaster(tmp_path / "log", "-default_kv_lease_ttl=60000") as master:
        rows = rows_of(32, 1 << 18)
        with MooncakeTier(master.address, rows, segment="16MiB", timeout=20) as tier:
            for number in range(8):
                keys = [b"%d %d" % (number, each) for each in range(32)]
                until(lambda: wait_for(tier, tier.store(keys, [*range(32)])).ok.any())  # noqa: B023
            until(lambda: store(tier, 1).ok.all())


def test_many_short_deadlines_do_not_add_up(own: MooncakeMaster) -> None:
    """At a master that says nothing: the calls that Mooncake is stuck in do not add up."""
    rows = rows_of(2)
    with MooncakeTier(own.address, rows, segment="16MiB", connections=1, timeout=20) as tier:
        assert store(tier, 0).ok.all()
        (child,) = (each for each in children_of(os.getpid()) if each != own.pid)
        before = len(os.listdir(f"/proc/{child}/task"))
        own.stop()
        for _ in range(20):
            assert not load(tier, 0, timeout=0.03).ok.any()
        assert len(os.listdir(f"/proc/{child}/task")) <= before + 6
        own.go_on()
        until_loaded(tier, 0)
