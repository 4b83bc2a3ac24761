"""Engines' files in /dev/shm: what nobody uses is found and removed, what may be in use is kept."""

import ctypes
import mmap
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from memlane._base import processes
from memlane.inspect.foreign import files as foreign_files
from memlane.inspect.foreign.files import Kept, Sight, Unused, reason_to_keep
from tests.support import NO_FILES, Link, own_pid_namespace, start, unshare_refusal
from tests.support.missing import package
from tests.support.regions import new_id, region_of

SHM = Path("/dev/shm")
PAGE = mmap.PAGESIZE
IN_USE = Sight(pids=(7,))
needs_unshare = pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())


def made_long_ago(path: Path) -> None:
    """Before this process, and all others that may have made it, were started."""
    os.utime(path, (0, 0))


@pytest.fixture
def path() -> Iterator[Path]:
    """An engine's file that nobody has open, and whose maker cannot live any more."""
    path = SHM / f"psm_{uuid.uuid4().hex}"
    path.write_bytes(b"\1" * PAGE)
    path.chmod(0o600)
    made_long_ago(path)
    yield path
    with suppress(FileNotFoundError):
        path.unlink()


def seen(path: Path, *, is_named: bool = False) -> Unused | Kept | None:
    """Returns the finding about the file; `is_named`: it was asked for by its name."""
    free, kept = foreign_files.unused([path.name] if is_named else None)
    files: list[Unused | Kept] = [*free, *kept]
    return next((file for file in files if file.path == str(path)), None)


def unused_at(path: Path) -> Unused:
    file = seen(path)
    assert isinstance(file, Unused), file
    return file


def map_without_descriptor(link: Link, path: str, is_read_only: bool) -> None:
    """Role: maps the file as NCCL does, and keeps no descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        *(ctypes.c_int,) * 3,
        ctypes.c_long,
    )
    file = os.open(path, os.O_RDONLY if is_read_only else os.O_RDWR)
    protection = mmap.PROT_READ if is_read_only else mmap.PROT_READ | mmap.PROT_WRITE
    assert libc.mmap(None, PAGE, protection, mmap.MAP_SHARED, file, 0) != ctypes.c_void_p(-1).value
    os.close(file)
    link.tell(os.getpid())
    link.hear()


def keep_open(link: Link, path: str) -> None:
    """Role: has the file open, and does not map it."""
    with open(path, "rb"):
        link.tell(os.getpid())
        link.hear()


def test_a_dead_process_leaves_its_file(path: Path) -> None:
    """Open: kept, and the process named. Killed: unused, and removed with all that it took."""
    holder = start(keep_open, str(path))
    pid = holder.hear()
    kept = seen(path)
    assert isinstance(kept, Kept)
    assert (kept.pids, kept.reason) == ((pid,), f"in use by pid {pid}")
    holder.kill()
    file = unused_at(path)
    assert (file.name, file.size, file.used) == (path.name, PAGE, PAGE)
    assert foreign_files.remove([file]) == ([file], [])
    assert not path.exists()


@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_mapping_without_a_descriptor_is_use(path: Path, is_read_only: bool) -> None:
    holder = start(map_without_descriptor, str(path), is_read_only)
    pid = holder.hear()
    kept = seen(path)
    assert isinstance(kept, Kept)
    assert kept.pids == (pid,)
    holder.tell()
    holder.result()
    unused_at(path)


def test_use_under_another_name_is_use(path: Path) -> None:
    """Files are compared by inode: a second name, and none of ours, is the same file."""
    other = SHM / f"elsewhere-{uuid.uuid4().hex}"
    os.link(path, other)
    holder = start(keep_open, str(other))
    pid = holder.hear()
    other.unlink()
    kept = seen(path)
    assert isinstance(kept, Kept)
    assert kept.pids == (pid,)
    holder.kill()


@pytest.mark.parametrize("role", [keep_open, map_without_descriptor])
def test_use_that_begins_meanwhile_stops_the_removal(path: Path, role: object) -> None:
    file = unused_at(path)
    arguments = (str(path),) if role is keep_open else (str(path), False)
    holder = start(role, *arguments)  # type: ignore[arg-type]
    pid = holder.hear()
    removed, (kept,) = foreign_files.remove([file])
    assert (removed, kept.pids) == ([], (pid,))
    assert path.exists()
    holder.kill()


def test_another_file_of_that_name_stays(path: Path) -> None:
    """The engine that was started meanwhile has put its own file there."""
    file = unused_at(path)
    path.unlink()
    path.write_bytes(b"new")
    removed, (kept,) = foreign_files.remove([file])
    assert (removed, kept.reason) == ([], "it was removed or replaced meanwhile")
    assert path.read_bytes() == b"new"


def test_a_file_that_is_gone_is_no_error(path: Path) -> None:
    file = unused_at(path)
    path.unlink()
    removed, (kept,) = foreign_files.remove([file])
    assert (removed, kept.name) == ([], path.name)


def make_block(link: Link) -> None:
    """Role: writes a block, closes it, and lives on, as one does that sends its name."""
    block = SharedMemory(create=True, size=PAGE)
    resource_tracker.unregister(f"/{block.name}", "shared_memory")
    block.buf[:5] = b"hello"
    block.close()
    link.tell(block.name)
    link.hear()


def test_a_block_on_its_way_to_another_process_is_kept() -> None:
    """Nobody has it open, but its maker lives, and may have sent the name to somebody."""
    maker = start(make_block)
    path = SHM / maker.hear()
    try:
        kept = seen(path)
        assert isinstance(kept, Kept), kept
        assert "may have made it" in kept.reason
        assert isinstance(seen(path, is_named=True), Unused)
        maker.tell()
        maker.result()
        kept = seen(path)  # whoever got the name may be about to open it
        assert isinstance(kept, Kept), kept
    finally:
        path.unlink()


def test_who_was_started_later_has_not_made_it(path: Path) -> None:
    """Only what is old goes, and what no living Python process of the time can have made."""
    begun = processes.boot_time() + (processes.start_ticks(os.getpid()) or 0) / os.sysconf(
        "SC_CLK_TCK"
    )
    os.utime(path, (begun + 10, begun + 10))
    kept = seen(path)
    assert isinstance(kept, Kept), kept
    assert re.search(r"may have made it|\d+ s ago", kept.reason)
    made_long_ago(path)
    unused_at(path)


@pytest.mark.parametrize("kind", foreign_files.KINDS, ids=lambda kind: kind.prefix)
def test_every_engine_is_known(kind: foreign_files.Kind) -> None:
    path = SHM / f"{kind.prefix}{uuid.uuid4().hex}"
    path.touch(0o600)
    made_long_ago(path)
    try:
        unused_at(path)
    finally:
        path.unlink()


@pytest.mark.parametrize("name", ["sem.mp-{}", "memlane-{}", "my_psm_{}"])
def test_other_names_are_not_looked_at(name: str) -> None:
    path = SHM / name.format(uuid.uuid4().hex)
    path.touch(0o600)
    try:
        assert seen(path) is None
    finally:
        path.unlink()


@pytest.mark.parametrize("make", NO_FILES)
def test_only_regular_files_are_looked_at(path: Path, make: object) -> None:
    path.unlink()
    make(path)  # type: ignore[operator]
    try:
        assert seen(path) is None
    finally:
        path.rmdir() if path.is_dir() else path.unlink()


def test_links_are_not_followed(path: Path) -> None:
    link = SHM / f"psm_{uuid.uuid4().hex}"
    link.symlink_to(path)
    try:
        assert seen(link) is None
    finally:
        link.unlink()


def test_a_region_of_memlane_is_in_use() -> None:
    package("torch")
    with region_of(new_id()) as region:
        kept = seen(Path(region.mmap_path))
        assert isinstance(kept, Kept)
        assert kept.pids == (os.getpid(),)


def test_what_is_handed_over_waits_for_its_creator() -> None:
    """SGLang's processes send each other files that neither of them has open in between."""
    path = SHM / f"sgl_shm_mm_{os.getpid()}_{uuid.uuid4().hex[:8]}"
    path.touch(0o600)
    try:
        kept = seen(path)
        assert isinstance(kept, Kept)
        assert str(os.getpid()) in kept.reason
    finally:
        path.unlink()


def test_what_is_handed_over_waits_for_its_reader(path: Path) -> None:
    """Its creator has died, but an engine runs that may open it."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    sent = SHM / f"sgl_shm_mm_{child}_{uuid.uuid4().hex[:8]}"
    sent.touch(0o600)
    made_long_ago(sent)
    try:
        engine = start(keep_open, str(path))
        pid = engine.hear()
        kept = seen(sent)
        assert isinstance(kept, Kept)
        assert f"an engine is running (pid {pid})" in kept.reason
        engine.kill()
        unused_at(sent)
    finally:
        sent.unlink()


def look(link: Link, path: str, is_named: bool) -> Unused | Kept | None:
    """Role: what a process says that sees no other process."""
    return seen(Path(path), is_named=is_named)


@needs_unshare
def test_a_file_that_another_pid_namespace_uses_is_kept(path: Path) -> None:
    """The kernel knows who uses the file, even if /proc cannot show it; but nobody knows from there
    who made it, so it goes by its name only."""

    def said(*, is_named: bool = True) -> Unused | Kept | None:
        peer = start(look, str(path), is_named, method="spawn", command=own_pid_namespace())
        answer = peer.result()
        assert answer is None or isinstance(answer, (Unused, Kept))
        return answer

    holder = start(map_without_descriptor, str(path), True)
    holder.hear()
    kept = said()
    assert isinstance(kept, Kept)
    assert kept.reason == "in use by a process that is not visible from here"
    holder.kill()
    assert isinstance(said(), Unused)
    assert isinstance(said(is_named=False), Kept)


KEPT = [
    (IN_USE, "in use by pid 7"),
    (replace(IN_USE, lease="alone"), "in use by pid 7"),
    (Sight(lease="shared"), "not visible"),
    (Sight(lease="alone", creator=7), "its creator lives"),
    (Sight(lease="alone", engine=7), "an engine is running"),
    (Sight(lease="alone", maker=7), "pid 7 may have made it"),
    (Sight(lease="alone", age=4.2), "4 s ago"),
    (Sight(lease="alone", age=1e6, is_whole=False), "another container may have made it"),
    (Sight(unseen=(3, 4, 5, 6, 7, 8)), "pid 3, 4, 5, 6 and 2 more may have it open"),
    (Sight(hides=True), "hides"),
    (Sight(is_whole=False), "other containers"),
]


@pytest.mark.parametrize(("sight", "reason"), KEPT)
def test_what_may_be_in_use_is_kept(sight: Sight, reason: str) -> None:
    assert reason in str(reason_to_keep(sight))


FREE = [
    Sight(),
    Sight(lease="alone"),
    Sight(lease="alone", unseen=(1,), hides=True, is_whole=False),
    Sight(lease="alone", is_named=True, maker=7, creator=7, engine=7, age=0.0, is_whole=False),
]


@pytest.mark.parametrize("sight", FREE)
def test_what_is_known_to_be_unused_is_not_kept(sight: Sight) -> None:
    assert reason_to_keep(sight) is None


def test_the_caller_may_know_that_there_is_no_other_container() -> None:
    assert reason_to_keep(Sight(is_whole=False), trusts_view=True) is None
    assert reason_to_keep(Sight(lease="shared"), trusts_view=True) is not None
    assert reason_to_keep(Sight(lease="shared", is_named=True)) is not None
