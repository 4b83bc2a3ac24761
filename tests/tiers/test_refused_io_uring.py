"""A disk tier where io_uring is refused: at its start, or while it works. No block is lost."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from memlane.tiers import DiskTier
from tests.support import PATIENCE, Link, start
from tests.support.missing import needed
from tests.support.seccomp import has_io_uring, refuse

pytestmark = needed("io_uring", has_io_uring())
COUNT = 100
KEYS = [number.to_bytes(32, "big") for number in range(COUNT)]


@contextmanager
def tier_on(folder: str) -> Iterator[tuple[DiskTier, np.ndarray]]:
    rows = np.zeros((COUNT, 8192), np.uint8)
    with DiskTier(folder, rows, 1 << 20 << 4, policy="lru", timeout=PATIENCE) as tier:
        yield tier, rows


def check_blocks(tier: DiskTier, rows: np.ndarray) -> None:
    """Stores and loads a hundred, more than are under way at a time."""
    tier.clear()
    wanted = np.random.default_rng(1).integers(0, 256, rows.shape, np.uint8)
    rows[:] = wanted
    for call in (tier.store, tier.load):
        call(KEYS, np.arange(COUNT))
        assert tier.drain()
        (done,) = tier.poll()
        assert done.ok.all(), done.error
        rows[:] = 0 if call == tier.store else rows
    np.testing.assert_array_equal(rows, wanted)


def refused(_link: Link, call: str, error: int, engine: str) -> None:
    """Role: a tier in a container without that call."""
    refuse(call, error)
    with tempfile.TemporaryDirectory() as folder, tier_on(folder) as (tier, rows):
        assert tier.engine == engine
        check_blocks(tier, rows)


@pytest.mark.parametrize(
    ("call", "error", "engine"),
    [
        ("io_uring_setup", errno.EPERM, "threads"),
        ("io_uring_setup", errno.ENOSYS, "threads"),
        ("io_uring_register", errno.ENOMEM, "io_uring"),
        ("io_uring_enter", errno.EPERM, "io_uring"),
    ],
)
def test_a_container_forbids_it(call: str, error: int, engine: str) -> None:
    """Threads do the work; memory that cannot be registered is used as it is."""
    start(refused, call, error, engine).result()


def refused_later(_link: Link, error: int) -> None:
    """Role: a tier that works, and then may not enter its ring."""
    with tempfile.TemporaryDirectory() as folder, tier_on(folder) as (tier, rows):
        check_blocks(tier, rows)
        refuse("io_uring_enter", error)
        for _ in range(3):
            check_blocks(tier, rows)


@pytest.mark.parametrize("error", [errno.EPERM, errno.EAGAIN])
def test_it_is_forbidden_later(error: int) -> None:
    """The thread reads and writes without it."""
    start(refused_later, error).result()


def test_the_file_has_become_shorter(tmp_path: Path) -> None:
    """Blocks beyond the file's new end are misses; the others are loaded."""
    with tier_on(str(tmp_path)) as (tier, rows):
        check_blocks(tier, rows)
        os.truncate(tmp_path / "0.data", 50 * 8192 + 4096)
        tier.load(KEYS, np.arange(COUNT))
        assert tier.drain()
        (done,) = tier.poll()
        assert np.count_nonzero(done.ok) == 50
        assert done.error == "a block is not what was stored"
        assert tier.statistics().corrupt == 50
