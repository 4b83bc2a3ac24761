"""The disk tier on real files: what every tier promises, and what only its own files show."""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import (
    Closed,
    InvalidArgument,
    InvalidType,
    LayoutMismatch,
    SegmentRefused,
    SystemFault,
    _native,
    inspect,
)
from memlane.tiers import DiskTier, disk
from memlane.tiers.conformance import TierConformance, content, key, wait_for
from memlane.tiers.tier import Namespace, capacity_in_bytes
from tests.support import PATIENCE, Link, assert_in_time, start, until
from tests.support.disk_tiers import capacity_of, check_all, tier_on
from tests.support.seccomp import has_io_uring


class TestDiskTier(TierConformance):
    """Past the page cache, by io_uring, where that is possible."""

    is_local = True
    direct: bool | None = None
    engine = "io_uring" if has_io_uring() else "threads"

    def open(self, place: Path, rows: Any, capacity: int = 100, **options: Any) -> DiskTier:
        """On a folder of the test's."""
        nbytes = capacity_of(capacity, self.row_bytes)
        options = {"policy": "lru", "direct": self.direct, **options}
        tier = DiskTier(place / "kv", rows, nbytes, **options)
        assert tier.engine == tier.statistics().engine == self.engine
        return tier


class TestBuffered(TestDiskTier):
    """Through the page cache, with rows that are no multiple of its pages."""

    row_bytes = 5000
    direct = False
    engine = "threads"


class TestUnaligned(TestDiskTier):
    """Past the page cache, with rows that are not aligned as O_DIRECT wants."""

    row_bytes = 300_001
    direct = True


class TestThreads(TestDiskTier):
    """Past the page cache, without io_uring."""

    engine = "threads"

    @pytest.fixture(autouse=True)
    def _no_ring(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(disk, "_MAY_RING", False)


class TestUnalignedThreads(TestThreads):
    """The same, with rows that are not aligned as O_DIRECT wants."""

    row_bytes = 300_001
    direct = True


class TestTuned(TestDiskTier):
    """With the default policy."""

    def open(self, place: Path, rows: Any, capacity: int = 100, **options: Any) -> DiskTier:
        """As the others."""
        return super().open(place, rows, capacity, **{"policy": "tuned", **options})


ROW = 4096


def store_all(tier: DiskTier, rows: Any, numbers: Iterable[int]) -> None:
    """Stores these blocks, one after the other."""
    for number in numbers:
        rows[0] = content(number, ROW)
        assert wait_for(tier, tier.store([key(number)], [0])).ok.all()


@pytest.fixture
def rows() -> Any:
    """Two rows of a page."""
    return np.zeros((2, ROW), np.uint8)


@pytest.fixture
def folder(tmp_path: Path, rows: Any) -> Path:
    """The folder of a tier of ten blocks that has blocks 0 to 4."""
    with tier_on(tmp_path / "kv", rows, capacity=10) as tier:
        store_all(tier, rows, range(5))
    return tmp_path / "kv"


def there(tier: DiskTier, count: int = 20) -> list[int]:
    """The numbers of the blocks that it has."""
    has = tier.has([key(number) for number in range(count)])
    return [number for number in range(count) if has[number]]


def test_its_files_are_private(folder: Path) -> None:
    """The folder, its files, and nothing else."""
    assert folder.stat().st_mode & 0o777 == 0o700
    files = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert files == {"0.data": 0o600, "0.headers": 0o600, "0.uses": 0o600}


def test_its_space_is_reserved(folder: Path) -> None:
    """All files have their whole size on disk, which is at most the capacity."""
    sizes = [file.stat() for file in folder.iterdir()]
    assert all(each.st_blocks * 512 >= each.st_size for each in sizes)
    assert sum(each.st_size for each in sizes) <= capacity_of(10, ROW)


def test_bytes_that_changed_on_disk_are_a_miss(
    folder: Path, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A miss of that block alone, one line, and the key is not found again."""
    with tier_on(folder, rows, capacity=10) as tier:
        with open(folder / "0.data", "r+b") as file:
            file.seek(2 * ROW + 17)  # slots are used in order
            byte = file.read(1)[0]
            file.seek(2 * ROW + 17)
            file.write(bytes([byte ^ 1]))
        done = wait_for(tier, tier.load([key(1), key(2)], [0, 1]))
        assert (done.ok.tolist(), done.error) == ([True, False], "a block is not what was stored")
        assert there(tier) == [0, 1, 3, 4]
        assert tier.statistics().corrupt == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not what was stored" in caplog.text


def test_a_slot_with_another_header_is_a_miss(folder: Path, rows: Any) -> None:
    """The CRC is seeded with the key: right bytes under a wrong key are a miss."""
    with open(folder / "0.headers", "r+b") as file:
        file.seek(4096)
        first = file.read(64)
        file.seek(4096 + 64)  # of slot 1; its data stays
        file.write(first)
    with tier_on(folder, rows, capacity=10) as tier:
        assert check_all(tier, rows, range(5)) >= 3  # of 0, 2, 3, 4 and not of 1
        assert 1 not in there(tier)


def test_a_header_that_is_gone_is_a_miss(tmp_path: Path) -> None:
    """Counted, and the key is not found again."""
    rows = np.zeros((8, ROW), np.uint8)
    with tier_on(tmp_path / "kv", rows, capacity=3) as tier:
        assert wait_for(tier, tier.store([key(1)], [1])).ok.all()
        headers = tmp_path / "kv/0.headers"
        headers.write_bytes(bytes(headers.stat().st_size))
        done = wait_for(tier, tier.load([key(1), key(2)], [2, 3]))
        assert (done.ok.any(), done.error) == (False, None)
        assert tier.drain()
        assert (tier.has([key(1)]), tier.statistics().missed) == ([False], 2)


def test_another_capacity_keeps_the_blocks_that_fit(folder: Path, rows: Any) -> None:
    """A larger one keeps everything, a smaller one drops what lies behind it."""
    with tier_on(folder, rows, capacity=12) as tier:
        assert there(tier) == [0, 1, 2, 3, 4]
        assert tier.statistics().slots == 12
        store_all(tier, rows, range(5, 12))
        assert there(tier) == list(range(12))
    with tier_on(folder, rows, capacity=3) as tier:
        assert there(tier) == [0, 1, 2]
        check_all(tier, rows, range(3))
        store_all(tier, rows, [15])
    with tier_on(folder, rows, capacity=12) as tier:
        assert len(there(tier)) == 3


def test_observers_see_how_long_blocks_take(tmp_path: Path, rows: Any) -> None:
    """Each block once, and what was looked up and written; as in its statistics."""
    with tier_on(tmp_path, rows, capacity=20, policy="lru") as tier:
        wait_for(tier, tier.store([key(1), key(2)], [0, 1]))
        wait_for(tier, tier.store([key(3)], [0]))
        wait_for(tier, tier.load([key(1), key(2)], [0, 1]))
        assert tier.has([key(1), key(9)]) == [True, False]
        assert tier.peek([key(1), key(9)]) == [True, False]  # no request asks
        with tier.hold([key(2)]):
            pass
        wait_for(tier, tier.load([key(8)], [0]))  # the facts are published by a call
        now = tier.statistics()
        (shown,) = (each for each in inspect.segments() if each.counters.get("written"))
    assert (now.lookups, now.found) == (2, 1)
    assert now.written == 3 * (rows.shape[1] + 64)
    for name in ("lookups", "found", "written"):
        assert shown.counters[name] == getattr(now, name)
    times = {name: sum(each.counts) for name, each in shown.times.items()}
    assert times == {"store_seconds": 3, "load_seconds": 2}
    assert all(each.seconds > 0 for each in shown.times.values())


def test_bytes_written_past_the_page_cache_are_those_of_slots(tmp_path: Path) -> None:
    rows = np.zeros((2, 5000), np.uint8)
    with tier_on(tmp_path, rows, capacity=20, direct=True) as tier:
        wait_for(tier, tier.store([key(1)], [0]))
        assert tier.statistics().written == 8192 + 64


def fill_headers(folder: Path, slots: int) -> None:
    """Fills the headers of a tier that was opened there: every slot has a block, though nothing was
    stored."""
    space, headers = Namespace("").id, bytearray()
    for number in range(slots):
        header = os.urandom(24) + space + struct.pack("=QIII", number, ROW, 0, 0)
        headers += header + struct.pack("=I", _native.crc32c(header))
    with open(folder / "0.headers", "r+b") as file:
        file.seek(4096)
        file.write(headers)


def longest_alone(opens: Callable[[], DiskTier]) -> tuple[float, float]:
    """The longest time that another thread did not run while a tier was opened, and the whole
    time; both of the opening thread's processor."""
    clock, is_over = time.pthread_getcpuclockid(threading.get_ident()), threading.Event()
    seen = [time.clock_gettime(clock)]

    def look() -> None:
        while not is_over.is_set():
            seen.append(time.clock_gettime(clock))

    other = threading.Thread(target=look)
    other.start()
    begun = time.clock_gettime(clock)
    with opens():
        end = time.clock_gettime(clock)
        is_over.set()
        other.join()
    return max(end - seen[-1], *np.diff(seen)), end - begun


def test_other_threads_run_while_a_tier_is_recovered(tmp_path: Path) -> None:
    rows, slots = np.zeros((1, ROW), np.uint8), 40_000

    def opens() -> DiskTier:
        return DiskTier(tmp_path, rows, capacity_of(slots, ROW), policy="lru", margin=0)

    with opens() as tier:
        slots = tier.statistics().slots
    fill_headers(tmp_path, slots)
    with opens() as tier:
        assert tier.statistics().recovered == slots

    def is_shared() -> bool:
        alone, whole = longest_alone(opens)
        return alone < 0.4 * whole

    until(is_shared, "another thread runs")


def test_the_order_of_the_stores_outlives_a_restart(folder: Path, rows: Any) -> None:
    """The block that was stored first is evicted first."""
    with tier_on(folder, rows, capacity=10) as tier:
        store_all(tier, rows, range(5, 12))
        assert there(tier) == list(range(2, 12))


@pytest.mark.parametrize("evicted", [False, True], ids=["store", "store_evicted"])
def test_a_store_is_a_use_unless_a_cache_before_the_tier_evicts(
    folder: Path, rows: Any, evicted: bool
) -> None:
    with tier_on(folder, rows, 3) as tier:
        store_all(tier, rows, range(3))
        again = tier.store_evicted if evicted else tier.store
        assert wait_for(tier, again([key(0)], [0])).ok.all()
        store_all(tier, rows, [3])
        assert tier.has([key(number) for number in range(4)]) == [not evicted, evicted, True, True]


def test_a_tuned_tier_learns_from_look_ups_and_stores(tmp_path: Path) -> None:
    """As vLLM calls it: `hold` for each key until one is not there, again if the request waits; a
    load of those, and stores of the others. Most keys come once; a touch is never called."""
    rows = np.zeros((200, 64), np.uint8)
    nbytes = capacity_of(100, 64)
    with DiskTier(tmp_path / "kv", rows, nbytes, timeout=PATIENCE) as tier:
        last = tier.statistics()
        for number in range(3000):  # it takes a while to learn: longer where its thread waits
            wanted = [*range(80), *range(1000 * number + 1000, 1000 * number + 1120)]
            keys = [key(each) for each in wanted]
            there = tier.hold(keys).there
            tier.hold(keys)
            run = there.index(False)
            if run:
                wait_for(tier, tier.load(keys[:run], range(run)))
            for at in range(run, len(keys), 20):  # as a step of an engine computes them
                step = keys[at : at + 20]
                wait_for(tier, tier.store(step, range(len(step))))
            if number % 20 == 19:
                before, last = last, tier.statistics()
                loaded, declined = last.loaded - before.loaded, last.declined - before.declined
                if loaded > 0.7 * 20 * 80 and declined > 0.7 * 20 * 120:
                    break
        else:
            pytest.fail(f"at last it loads {loaded} of 1600 and declines {declined} of 2400")


def test_rows_of_another_size_empty_the_tier(
    folder: Path, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It begins empty, and says so."""
    with tier_on(folder, np.zeros((2, 2 * ROW), np.uint8), capacity=10) as tier:
        assert there(tier) == []
    assert "was written with rows of 4096 bytes, now 8192: its blocks are dropped" in caplog.text


def test_other_namespaces_go_first(folder: Path, rows: Any) -> None:
    """Their slots are used before any of this one's; until then they are there for them."""
    with tier_on(folder, rows, capacity=10, namespace="b") as tier:
        assert there(tier) == []
        store_all(tier, rows, range(5))  # in the free slots
    with tier_on(folder, rows, capacity=10) as tier:
        assert there(tier) == [0, 1, 2, 3, 4]
    with tier_on(folder, rows, capacity=10, namespace="b") as tier:
        store_all(tier, rows, range(5, 8))
        assert there(tier) == list(range(8))
    with tier_on(folder, rows, capacity=10) as tier:
        assert there(tier) == [3, 4]


@pytest.mark.parametrize(
    ("name", "change", "error", "text"),
    [
        ("0.headers", b"something else", SegmentRefused, "exists and is no disk tier's"),
        ("0.headers", bytes(64) + b"else", SegmentRefused, "exists and is no disk tier's"),
        ("0.headers", b"MEMLTIER\x09", LayoutMismatch, "has format 9; this memlane reads 1"),
    ],
)
def test_other_files_are_left_as_they_are(
    folder: Path, rows: Any, name: str, change: bytes, error: type[Exception], text: str
) -> None:
    """They are left as they are."""
    before = (folder / "0.data").read_bytes()
    with open(folder / name, "r+b") as file:
        file.write(change)
    with pytest.raises(error, match=text):
        tier_on(folder, rows, capacity=10)
    assert (folder / "0.data").read_bytes() == before
    assert (folder / name).read_bytes().startswith(change)


def test_a_damaged_first_page_empties_the_tier(
    folder: Path, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a power cut: it begins empty, and says so."""
    with open(folder / "0.headers", "r+b") as file:
        file.seek(20)
        file.write(b"\xff")
    with tier_on(folder, rows, capacity=10) as tier:
        assert there(tier) == []
    assert "the first page of the tier" in caplog.text


def test_links_are_not_followed(tmp_path: Path, rows: Any) -> None:
    (tmp_path / "0.headers").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SegmentRefused, match="is a symbolic link"):
        tier_on(tmp_path, rows, capacity=10)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"capacity": 4096}, "capacity must hold a row of 4096 bytes, not 4096"),
        ({"capacity": 0}, "capacity must be at least 1"),
        ({"capacity": "5 GB"}, "capacity must be bytes, or text"),
        ({"capacity": 1.5}, "capacity must be an integer"),
        ({"opener": "a/b"}, "opener must be"),
        ({"opener": ""}, "opener must be"),
        ({"opener": 1}, "opener must be a string"),
        ({"namespace": 1}, "namespace must be str or bytes"),
        ({"policy": "mru"}, "policy must be one of"),
        ({"timeout": "soon"}, "timeout must be"),
        ({"direct": "yes"}, "direct must be"),
    ],
)
def test_bad_options_make_nothing(
    tmp_path: Path, rows: Any, options: dict[str, Any], text: str
) -> None:
    """Nothing is made."""
    with pytest.raises((InvalidArgument, InvalidType), match=text):
        DiskTier(tmp_path / "kv", rows, **{"capacity": "1MiB", **options})
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("place", ["file", "file/kv"])
def test_a_folder_that_is_none(tmp_path: Path, rows: Any, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemFault, match="cannot make the folder"):
        DiskTier(tmp_path / place, rows, "1MiB")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("100", 100), ("1KiB", 1024), ("1.5 MiB", 3 << 19), ("2TiB", 2 << 40), (7, 7)],
)
def test_a_capacity_may_be_text(text: Any, nbytes: int) -> None:
    assert capacity_in_bytes(text) == nbytes


class Stubborn:
    """A policy that lets nothing go."""

    def touch(self, key: bytes) -> None:
        """Nothing is learnt."""

    def insert(self, key: bytes) -> bool:
        return True

    def evict(self, incoming: bytes, is_free: Any) -> bytes | None:
        raise RuntimeError(f"{len(incoming)} bytes")

    def remove(self, key: bytes) -> None:
        """Nothing is known of it."""

    def clear(self) -> None:
        """As above."""


def test_a_policy_that_raises(tmp_path: Path, rows: Any) -> None:
    """Its error reaches the caller of `store`; it sees digests; the tier goes on."""
    with tier_on(tmp_path, rows, capacity=2, policy=Stubborn()) as tier:
        store_all(tier, rows, range(2))
        with pytest.raises(RuntimeError, match="24 bytes"):
            tier.store([key(3)], [0])
        assert there(tier) == [0, 1]
        assert check_all(tier, rows, range(4)) == 2


def test_what_finds_no_slot_is_declined(tmp_path: Path, rows: Any) -> None:
    """All slots are held: no error, and counted."""
    with tier_on(tmp_path, rows, capacity=1) as tier:
        store_all(tier, rows, [0])
        with tier.hold([key(0)]):
            done = wait_for(tier, tier.store([key(1)], [1]))
        assert (done.ok.tolist(), done.error) == ([False], None)
        assert tier.statistics().declined == 1


class Refusing(Stubborn):
    """A policy that raises where an earlier life's blocks are taken in."""

    def insert(self, key: bytes) -> bool:
        raise RuntimeError("not this one")


def test_a_policy_that_raises_at_the_start(folder: Path, rows: Any) -> None:
    """The tier is not opened, and its files are free again."""
    with pytest.raises(RuntimeError, match="not this one"):
        tier_on(folder, rows, capacity=10, policy=Refusing())
    with tier_on(folder, rows, capacity=10) as tier:
        assert there(tier) == [0, 1, 2, 3, 4]


def test_garbage_is_collected_while_it_closes(tmp_path: Path) -> None:
    """The end of its rows may run anything."""
    rows = np.zeros((2, ROW), np.uint8)
    weakref.finalize(rows, gc.collect)
    tier = tier_on(tmp_path, rows, capacity=10)
    del rows
    tier.close()


class Engine:
    """Closes its tier when it is collected, as part of a circle."""

    def __init__(self, tier: DiskTier) -> None:
        self.tier, self.own = tier, self

    def __del__(self) -> None:
        self.tier.close()


def closed_by_garbage(_link: Link, folder: Path, name: str) -> None:
    """Role: one of the first objects that a call makes collects garbage, which closes the tier."""
    for drawn in range(1, 4):
        _closed_by_garbage(folder / str(drawn), name, drawn)


def _closed_by_garbage(folder: Path, name: str, drawn: int) -> None:
    gc.disable()
    tier = tier_on(folder, np.zeros((2, ROW), np.uint8), capacity=1000)
    native, digests = tier._native, tier._namespace.digests([key(at) for at in range(100)])
    calls: dict[str, Callable[[], Any]] = {
        "has": lambda: native.has(digests),
        "hold": lambda: native.hold(digests),
        "alerts": native.alerts,
        "facts": native.facts,
        "statistics": native.statistics,
        "poll": lambda: native.poll(tier._reports, tier._reports),
    }
    call = calls[name]
    gc.collect()
    kept = [([], {}) for _ in range(200)]  # so that a list or dict is allocated, not had again
    Engine(tier)
    gc.set_threshold(drawn)
    with suppress(Closed):  # it was collected before
        gc.enable()
        call()
    gc.disable()
    del kept


@pytest.mark.parametrize("name", ["has", "hold", "alerts", "facts", "statistics", "poll"])
def test_garbage_that_is_collected_in_a_call_closes_the_tier(tmp_path: Path, name: str) -> None:
    """The call answers from what it has read before; what is freed is overwritten here."""
    overwriting = ("env", "MALLOC_PERTURB_=90", sys.executable)
    start(closed_by_garbage, tmp_path, name, method="spawn", command=overwriting).result()


def test_two_threads_may_close_it(tmp_path: Path, rows: Any) -> None:
    for _ in range(50):
        tier = tier_on(tmp_path, rows, capacity=10)
        barrier = threading.Barrier(2)

        def close(tier: DiskTier = tier, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            tier.close()

        threads = [threading.Thread(target=close) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


def test_another_file_of_that_name_is_refused(tmp_path: Path, rows: Any) -> None:
    """Is refused, and left as it is."""
    (tmp_path / "train.data").write_bytes(b"precious")
    with pytest.raises(SegmentRefused, match=r"train.data exists and is no disk tier's"):
        tier_on(tmp_path, rows, capacity=10, opener="train")
    assert (tmp_path / "train.data").read_bytes() == b"precious"


def test_what_was_evicted_in_vain_is_forgotten(tmp_path: Path) -> None:
    """Its slot was not written to: the old block must not come back after a restart."""
    rows = np.zeros((8, ROW), np.uint8)
    keys = [key(number) for number in range(8)]
    with tier_on(tmp_path, rows, capacity=8) as tier:
        assert wait_for(tier, tier.store(keys, range(8))).ok.all()
        wait_for(tier, tier.store([key(100 + at) for at in range(8)], range(8), timeout=0))
        assert tier.drain(PATIENCE)
        tier.forget(keys)
    with tier_on(tmp_path, rows, capacity=8) as tier:
        assert not any(tier.has(keys))


def test_a_corrupt_block_stays_forgotten(folder: Path, rows: Any) -> None:
    with tier_on(folder, rows, capacity=10) as tier:
        with open(folder / "0.data", "r+b") as file:
            file.write(b"other")
        assert not wait_for(tier, tier.load([key(0)], [0])).ok.any()
    with tier_on(folder, rows, capacity=10) as tier:
        assert there(tier) == [1, 2, 3, 4]


class Interrupted(Exception):
    """Raised by a signal's handler."""


@contextmanager
def handling(handler: Callable[[], None]) -> Iterator[None]:
    """SIGALRM calls it."""
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt() -> None:
    """A handler."""
    raise Interrupted


def test_a_handler_that_raises_in_poll(tmp_path: Path, rows: Any) -> None:
    """Loses no report, wherever it comes: the descriptor and the next poll have it."""
    with tier_on(tmp_path, rows, capacity=10) as tier, handling(interrupt):
        store_all(tier, rows, [0])
        interrupted = 0
        for number in range(2000):
            ticket = tier.load([key(0)], [1])
            tier.drain(PATIENCE)
            done = None
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number % 60))
                done = tier.poll()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted as error:
                signal.setitimer(signal.ITIMER_REAL, 0)
                frames = traceback.extract_tb(error.__traceback__)
                interrupted += "poll" in [each.name for each in frames]
            if done is None:
                assert select.select([tier.fileno()], [], [], 0)[0]
                done = tier.poll()
            assert [each.ticket for each in done] == [ticket]
        assert interrupted > 10


def test_a_handler_that_polls_in_poll(tmp_path: Path, rows: Any) -> None:
    """Each report arrives once, here or there."""
    with tier_on(tmp_path, rows, capacity=10) as tier:
        store_all(tier, rows, [0])
        inner: list[int] = []
        with handling(lambda: inner.extend(done.ticket for done in tier.poll())):
            outer, begun = [], []
            for number in range(2000):
                begun.append(tier.load([key(0)], [1]))
                tier.drain(PATIENCE)
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number % 60))
                outer += [done.ticket for done in tier.poll()]
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert inner
        assert sorted(outer + inner) == begun


def test_a_log_that_raises(folder: Path, rows: Any) -> None:
    """The report of the poll that wanted to warn comes with the next one."""

    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise Interrupted(record.msg)

    log, handler = logging.getLogger("memlane"), Raising()
    with tier_on(folder, rows, capacity=10) as tier:
        with open(folder / "0.data", "r+b") as file:
            file.write(b"other")
        ticket = tier.load([key(0)], [0])
        tier.drain(PATIENCE)
        log.addHandler(handler)
        try:
            with pytest.raises(Interrupted):
                tier.poll()
        finally:
            log.removeHandler(handler)
        assert select.select([tier.fileno()], [], [], 0)[0]
        assert [done.ticket for done in tier.poll()] == [ticket]


def test_a_poll_that_is_interrupted_beside_a_policy(tmp_path: Path, rows: Any) -> None:
    """The report comes with the next one, and the interruption is not hidden."""

    class Slow(Stubborn):
        def insert(self, key: bytes) -> bool:
            entered.set()
            assert leave.wait(30)
            return True

    entered, leave = threading.Event(), threading.Event()
    leave.set()
    with tier_on(tmp_path, rows, capacity=10, policy=Slow()) as tier:
        ticket = tier.store([key(1)], [0])
        assert tier.drain(PATIENCE)
        entered.clear()
        leave.clear()
        storing = threading.Thread(target=tier.store, args=([key(2)], [1]))

        def interrupted() -> None:
            storing.start()
            assert entered.wait(30)
            raise Interrupted

        tier._warn_of_trouble = interrupted  # type: ignore[method-assign]
        with pytest.raises(Interrupted):
            tier.poll()
        del tier._warn_of_trouble
        leave.set()
        storing.join()
        assert ticket in [done.ticket for done in tier.poll()]


def test_a_thread_drains_while_another_polls(tmp_path: Path, rows: Any) -> None:
    """It is woken by the last call's end, whoever has noticed that."""
    with tier_on(tmp_path, rows, capacity=10) as tier:
        store_all(tier, rows, [0])
        is_over = threading.Event()

        def polls() -> None:
            while not is_over.is_set():
                select.select([tier.fileno()], [], [], 0.01)
                tier.poll()

        thread = threading.Thread(target=polls)
        thread.start()
        try:
            for _ in range(500):
                tier.load([key(0)], [1])
                began = time.monotonic()
                assert tier.drain(PATIENCE)
                assert_in_time(15, began)
        finally:
            is_over.set()
            thread.join()


def test_the_descriptor_is_quiet_when_nothing_is_to_report(tmp_path: Path, rows: Any) -> None:
    """However a report and a poll cross."""
    with tier_on(tmp_path, rows, capacity=10, direct=False) as tier:
        store_all(tier, rows, [0])
        for _ in range(5000):
            tier.load([key(0)], [1])
            while not tier.poll():
                pass
            for _ in range(100):
                if not select.select([tier.fileno()], [], [], 0)[0]:
                    break
                assert tier.poll() == []
            else:
                pytest.fail("it stays readable")


def test_rows_that_change_while_it_is_opened(tmp_path: Path) -> None:
    """The checked rows must be those that are used."""
    rows = np.zeros((2, ROW), np.uint8)

    class Shrinking:
        def __fspath__(self) -> str:
            rows.resize((1, ROW), refcheck=False)
            return str(tmp_path / "kv")

    with pytest.raises(InvalidArgument, match="the rows have changed while the tier was opened"):
        DiskTier(Shrinking(), rows, "1MiB")


def test_a_hold_does_not_keep_a_closed_tier(folder: Path, rows: Any) -> None:
    tier = tier_on(folder, rows, capacity=10)
    hold = tier.hold([key(1)])
    tier.close()
    with tier_on(folder, rows, capacity=10):
        hold.release()


def test_what_is_there_is_not_evicted_for_its_neighbour(tmp_path: Path, rows: Any) -> None:
    with tier_on(tmp_path, rows, capacity=2) as tier:
        store_all(tier, rows, [1, 2])
        done = wait_for(tier, tier.store([key(1), key(3)], [0, 1]))
        assert done.ok.tolist() == [True, True]
        assert there(tier) == [1, 3]


def test_stored_forgotten_and_stored_again(tmp_path: Path) -> None:
    """A third call is reported as the second, which it finds under way."""
    rows = np.zeros((16, 1 << 20), np.uint8)
    with tier_on(tmp_path, rows, capacity=40, timeout=60) as tier:
        tier.store([key(1)], [0])
        tier.store([key(100 + at) for at in range(14)], range(1, 15))
        tier.forget([key(1)])
        second = tier.store([key(1), key(2)], [0, 15])
        third = tier.store([key(1)], [0])
        assert tier.drain(PATIENCE)
        done = {each.ticket: each.ok.tolist() for each in tier.poll()}
        assert (done[second], done[third]) in (([True, True], [True]), ([False, True], [False]))
