"""A region that does not fit is refused beforehand: file system, cgroup, memory."""

from pathlib import Path

import pytest

from memlane import MessageQueue, ShmExhausted, ShmRingBuffer
from memlane._base import segments as space
from tests.support.queues import refuses, segments
from tests.support.regions import PAGE, new_id, path_of, region_of
from tests.support.stores import Ring

pytestmark = pytest.mark.unit

GIB = 1 << 30
MEMINFO = "MemTotal: 64000000 kB\nMemAvailable: 8388608 kB\nSwapFree: 1048576 kB\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(limit: object, used: int, cache: int = 0, shmem: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\nfile {cache}\nshmem {shmem}\n",
    }


def put(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


def test_memory_that_is_not_available_is_refused(tmp_path: Path) -> None:
    """Available memory and free swap."""
    root = tree(tmp_path, {})
    assert space.memory_room(root) == 9 * GIB
    with refuses(MemoryError, match="no more memory available") as caught:
        space.check_space("/dev/shm", 10 * GIB, 100 * GIB, root)
    assert isinstance(caught.value, ShmExhausted)
    assert (caught.value.need, caught.value.free) == (10 * GIB, 9 * GIB)
    space.check_space("/dev/shm", 9 * GIB, 100 * GIB, root)


def test_a_full_file_system_is_refused_with_a_hint(tmp_path: Path) -> None:
    """The hint says what to do in a container."""
    with refuses(MemoryError) as caught:
        space.check_space("/dev/shm", 2 * GIB, GIB, tree(tmp_path, {}))
    text = str(caught.value)
    for word in (str(2 * GIB), str(GIB), "--shm-size", "emptyDir", "/dev/shm"):
        assert word in text


def test_the_tightest_limit_of_a_cgroup_counts(tmp_path: Path) -> None:
    """The tightest limit of the group and of those above it; clean cache counts as free."""
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            **put("sys/fs/cgroup/pod/box", v2("max", 7)),
            **put("sys/fs/cgroup/pod", v2(4 * GIB, 3 * GIB, 2 * GIB, GIB)),
            **put("sys/fs/cgroup", v2(6 * GIB, 3 * GIB)),
        },
    )
    free, group = space.cgroup_room(root)
    assert free == 2 * GIB
    assert group.endswith("/pod")
    with refuses(MemoryError, match="--memory.*resources.limits.memory"):
        space.check_space("/dev/shm", 2 * GIB + 1, 100 * GIB, root)
    space.check_space("/dev/shm", 2 * GIB, 100 * GIB, root)


def test_the_limit_of_a_cgroup_of_version_1_counts(tmp_path: Path) -> None:
    """As in a container: the path is the host's, and the group's files are at the top."""
    files = {
        "memory.limit_in_bytes": str(3 * GIB),
        "memory.usage_in_bytes": str(GIB),
        "memory.stat": "total_cache 100\ntotal_shmem 100\n",
    }
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/\n4:memory:/docker/123\n0::/\n",
            **put("sys/fs/cgroup/memory", files),
        },
    )
    assert space.cgroup_room(root)[0] == 2 * GIB


@pytest.mark.parametrize("text", ["", "0::/\n", "4:memory:/\n"])
def test_a_cgroup_without_limits_has_room(tmp_path: Path, text: str) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": text})
    assert space.cgroup_room(root)[0] >= 1 << 60


def test_more_than_the_machine_has() -> None:
    """R4: refused at once, and no file is left."""
    instance = new_id()
    with refuses(MemoryError) as caught:
        region_of(instance, blocks=1 << 20, cell=1 << 30)
    assert isinstance(caught.value, ShmExhausted)
    assert caught.value.need > caught.value.free >= 0
    assert not path_of(instance).exists()


def test_a_machine_without_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """fallocate would not refuse it; later the kernel would kill a process."""
    monkeypatch.setattr(space, "memory_room", lambda *_: 8 * PAGE - 1)
    instance = new_id()
    with refuses(ShmExhausted, match="no more memory available"):
        region_of(instance)
    assert not path_of(instance).exists()


SEGMENTS = {
    "ring": lambda: ShmRingBuffer(1, 1 << 20, 8),
    "queue": lambda: MessageQueue(1, 1, max_chunk_bytes=1 << 20, max_chunks=128),
    "store": lambda: Ring(8 << 20, create=True),
}


@pytest.mark.parametrize("kind", SEGMENTS)
def test_segments_that_the_cgroup_has_no_memory_for(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would kill this process while reserving; nothing is left."""
    before = segments()
    monkeypatch.setattr(space, "cgroup_room", lambda *_: ((8 << 20) - 1, "/box"))
    with refuses(ShmExhausted, match="memory limit of cgroup /box, which") as caught:
        SEGMENTS[kind]()
    assert caught.value.need >= 8 << 20 > caught.value.free
    assert segments() == before
