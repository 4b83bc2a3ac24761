"""R14: a file of a region's name that is not this user's is refused, and left as it is."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from memlane import SegmentRefused, ShmExhausted, WrongProcess
from tests.support import (
    NO_FILES,
    PATIENCE,
    Link,
    holdings,
    own_pid_namespace,
    start,
    surplus,
    unshare_refusal,
)
from tests.support.queues import refuses
from tests.support.regions import PAGE, mapped, new_id, path_of, region_of

NOBODY = 65534


@pytest.mark.parametrize("to", ["a file", "nowhere"])
def test_a_symbolic_link_is_refused(tmp_path: Path, to: str) -> None:
    target = tmp_path / "target"
    if to == "a file":
        target.write_bytes(b"precious")
    instance = new_id()
    path_of(instance).symlink_to(target)
    try:
        with refuses(PermissionError, match="symbolic link") as caught:
            region_of(instance)
        assert isinstance(caught.value, SegmentRefused)
        assert target.exists() == (to == "a file")
        assert path_of(instance).is_symlink()
    finally:
        path_of(instance).unlink()


@pytest.mark.root
def test_a_file_of_another_user_is_refused() -> None:
    """Though root could open it, and no process holds it."""
    instance = new_id()
    path_of(instance).write_bytes(b"theirs")
    path_of(instance).chmod(0o640)
    os.chown(path_of(instance), NOBODY, NOBODY)
    try:
        before = path_of(instance).stat()
        with refuses(PermissionError, match=r"belongs to user nobody \(uid 65534\)") as caught:
            region_of(instance)
        assert "choose another instance_id" in str(caught.value)
        assert path_of(instance).stat() == before
        assert path_of(instance).read_bytes() == b"theirs"
    finally:
        path_of(instance).unlink()


@pytest.mark.root
def test_a_live_region_of_another_user_is_refused() -> None:
    instance = new_id()

    def role(_link: Link) -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        with refuses(PermissionError, match=r"belongs to user root \(uid 0\)") as caught:
            region_of(instance, 1)
        assert "choose another instance_id" in str(caught.value)

    with region_of(instance):
        start(role).result()
        assert path_of(instance).exists()


def test_a_live_region_of_another_mode_is_refused() -> None:
    """Its mode was opened to others and stays so: the second start is refused too."""
    instance = new_id()
    with region_of(instance):
        path_of(instance).chmod(0o666)
        for _ in range(2):
            with refuses(PermissionError, match="0600"):
                region_of(instance, 1)


def mapping(link: Link, instance: str) -> None:
    """Role: another implementation's region: mapped, without memlane's locks."""
    with mapped(path_of(instance)) as memory:
        link.tell(os.getpid())
        link.hear()
        assert bytes(memory[:6]) == b"theirs"


def test_a_live_region_of_another_implementation_is_refused() -> None:
    """It is left alone, its process is named, and a start works once it has ended."""
    instance = new_id()
    path_of(instance).write_bytes(b"theirs".ljust(8 * PAGE))
    path_of(instance).chmod(0o600)
    other = start(mapping, instance)
    pid = other.hear()
    with refuses(PermissionError, match=rf"in use by pid {pid} \(.*python") as caught:
        region_of(instance)
    assert isinstance(caught.value, SegmentRefused)
    assert "another instance_id" in str(caught.value)
    assert path_of(instance).read_bytes()[:6] == b"theirs"
    if not unshare_refusal():
        run = subprocess.run(
            [*own_pid_namespace(), "-c", ELSEWHERE, instance],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert "is not visible from here" in run.stdout, run.stderr
    other.tell()
    other.result()
    region_of(instance).cleanup()
    assert not path_of(instance).exists()


ELSEWHERE = """
import sys
from tests.support.regions import region_of
try:
    region_of(sys.argv[1])
except PermissionError as error:
    print(error)
"""


@pytest.mark.parametrize("make", NO_FILES)
def test_what_is_no_file_is_refused(make: Callable[[Path], None]) -> None:
    instance = new_id()
    make(path_of(instance))
    path_of(instance).chmod(0o711)
    try:
        with refuses(PermissionError, match="regular file"):
            region_of(instance)
        assert path_of(instance).stat().st_mode & 0o777 == 0o711
    finally:
        path = path_of(instance)
        path.rmdir() if path.is_dir() else path.unlink()


def few_descriptors(_link: Link) -> tuple[int, int]:
    import resource

    instance = new_id()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(number) for number in os.listdir("/proc/self/fd"))
    while (first := os.dup(0)) < highest:
        pass
    os.close(first)
    failed = succeeded = 0
    with region_of(instance):
        for joins in (True, False):
            name = instance if joins else new_id()
            before = holdings("vllm_offload_")
            for spare in range(8):
                resource.setrlimit(resource.RLIMIT_NOFILE, (first + spare, hard))
                try:
                    region_of(name, 1).cleanup()
                    succeeded += 1
                except OSError:
                    failed += 1
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                assert not surplus(before, holdings("vllm_offload_"))
    return failed, succeeded


def test_a_start_without_descriptors_leaves_nothing() -> None:
    """R8: however few there are: an OSError and nothing left, or success."""
    failed, succeeded = start(few_descriptors).result()
    assert failed > 0
    assert succeeded > 0


def test_a_limit_of_file_size_is_an_error() -> None:
    def role(_link: Link) -> None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        instance = new_id()
        with refuses(MemoryError, match="ulimit -f"):
            region_of(instance)
        assert not path_of(instance).exists()

    start(role).result()


def test_a_limit_of_address_space_is_an_error() -> None:
    """There is room for the region, but not for its mapping."""

    def role(_link: Link) -> None:
        import resource

        instance = new_id()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (vm_bytes() + (4 << 20), hard))
        with refuses(MemoryError, match="ulimit -v") as caught:
            region_of(instance, cell=16 * PAGE, blocks=100)
        assert isinstance(caught.value, ShmExhausted)
        assert not path_of(instance).exists()

    start(role).result()


def vm_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


def test_an_interrupted_wait_leaves_nothing() -> None:
    """Ctrl-C ends a start that waits for others, and nothing of it is left."""
    from tests.support.regions import half_created

    instance = new_id()
    creator = start(half_created, instance)
    creator.hear()

    def role(link: Link) -> None:
        link.tell()
        with pytest.raises(KeyboardInterrupt):
            region_of(instance)
        assert instance not in Path("/proc/self/maps").read_text()

    waiter = start(role)
    waiter.hear()
    waiter.until_asleep()
    os.kill(waiter.pid, signal.SIGINT)
    waiter.result()
    creator.tell("give up")
    creator.result()
    assert not path_of(instance).exists()


def test_cleanup_in_a_forked_child_harms_nothing(tmp_path: Path) -> None:
    """Cleanup there frees the child's copies only; the parent does not notice."""
    instance = new_id()
    region = region_of(instance)
    region.create_next_array(1)[:] = 3

    def role(_link: Link) -> None:
        with refuses(RuntimeError) as caught:
            region.create_next_array(1)
        assert isinstance(caught.value, WrongProcess)
        with refuses(WrongProcess):
            region.pin()
        assert region.mmap_obj[0] == 3
        # One of these has the number that the parent's locks have there.
        with contextlib.ExitStack() as others:
            for number in range(8):
                others.enter_context((tmp_path / str(number)).open("w+b"))
            region.cleanup()
            region.cleanup()
        assert region.fd is None
        assert path_of(instance).exists()
        with region_of(instance, 1) as other:
            assert not other._creator
            assert other.mmap_obj[0] == 3

    start(role).result()
    assert path_of(instance).exists()
    start(lambda _link: None).result()  # a child that just exits
    assert path_of(instance).exists()
    with region_of(instance, 1) as other:
        assert not other._creator
    region.cleanup()
    assert not path_of(instance).exists()


def test_parent_dies_and_its_forked_child_lives() -> None:
    """The child has the mapping but holds no lock: the file is dead, and replaced."""
    instance = new_id()

    def role(link: Link) -> None:
        region = region_of(instance)
        region.create_next_array(1)[:] = 3
        begun, begins = os.pipe()
        if (child := os.fork()) == 0:  # it gives up what it holds before it comes here
            os.write(begins, b".")
            signal.pause()
            os._exit(0)
        os.read(begun, 1)
        link.tell(child)
        link.hear()

    parent = start(role)
    child = parent.hear()
    parent.kill()
    with region_of(instance) as region:
        assert region._creator
        assert region.mmap_obj[0] == 0
    os.kill(child, signal.SIGKILL)
