"""A start that lacks a resource raises a clear error of memlane's and leaves nothing behind.

Fails without the guard: every early return of a constructor leaks what it had acquired; and where a
limit raises a signal, the process ends.
"""

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memlane import MemlaneError, MessageQueue, ShmExhausted, ShmRingBuffer, SystemFault
from tests.support import (
    Link,
    PeerGone,
    holdings,
    is_sanitized,
    nothing_fails,
    private_shm,
    start,
    surplus,
    unshare_refusal,
)
from tests.support.limits import descriptors, limiting, with_limits
from tests.support.queues import refuses
from tests.support.starts import SCENARIOS
from tests.support.stores import Ring

in_namespaces = pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())


def pages() -> Iterator[int]:
    """Address space for 0, 1, 2, 4 ... more pages."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    yield now
    for power in range(20):  # threads have 8 MiB of stack each, and 128 MiB of glibc's
        yield now + (resource.getpagesize() << power)


def file_sizes() -> Iterator[int]:
    """Files of at most 0, 4, 8 ... KiB, and 4 MiB; the signal is not ignored, as Python would."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    yield from range(0, 1 << 16, 4096)
    yield 1 << 22


@pytest.mark.parametrize(
    ("which", "values"),
    [
        (resource.RLIMIT_NOFILE, descriptors),
        (resource.RLIMIT_AS, pages),
        (resource.RLIMIT_FSIZE, file_sizes),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_start_under_any_limit_works_or_leaves_nothing(
    name: str, which: int, values: Callable[[], Iterator[int]]
) -> None:
    """However little there is: an error and nothing left, or success."""
    if which == resource.RLIMIT_AS and is_sanitized():
        pytest.skip("a sanitizer needs addresses, too")
    outcome = outcome_of(name, which, values)
    assert outcome.startswith("failed"), outcome


def outcome_of(name: str, which: int, values: Callable[[], Iterator[int]]) -> str:
    """Tries again if glibc has ended the process: where a new thread finds no memory for its
    thread-local data, glibc aborts ("cannot allocate memory for thread-local data")."""
    for is_last in (False, False, True):
        peer = start(with_limits, name, which, values)
        try:
            return str(peer.result())
        except PeerGone:
            if is_last or which != resource.RLIMIT_AS or peer.join() != -signal.SIGABRT:
                raise
    raise AssertionError("unreachable")


def test_a_reader_that_failed_can_try_again() -> None:
    """A failed attach does not take the rank."""

    def role(_link: Link) -> bool:
        with MessageQueue(1, 1, None, 64, 2) as writer:
            handle = writer.export_handle()
            for limit in descriptors():
                try:
                    with limiting(resource.RLIMIT_NOFILE, limit)(""):
                        reader = MessageQueue.create_from_handle(handle, 0)
                except OSError:
                    continue
                writer.enqueue(1)
                assert reader.dequeue(timeout=0) == 1
                reader.close()
                return True
        return False

    assert start(role).result() is True


def test_a_message_beyond_the_limit_of_file_size_is_refused() -> None:
    """A message beyond the limit is refused, nothing is sent, and the process survives."""

    def role(_link: Link) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        with (
            MessageQueue(1, 1, None, 64, 2) as writer,
            MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
        ):
            for _ in range(3):
                with limiting(resource.RLIMIT_FSIZE, 100_000)(""), refuses(MemoryError) as caught:
                    writer.enqueue(bytes(200_000), timeout=0)
                assert isinstance(caught.value, ShmExhausted)
                assert "ulimit -f" in caught.value.hint
            writer.enqueue(bytes(200_000), timeout=0)
            assert reader.dequeue(timeout=0) == bytes(200_000)

    start(role).result()


def used() -> int:
    facts = os.statvfs("/dev/shm")
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize


def every_scenario(_link: Link) -> dict[str, str]:
    """Role: the outcome of each scenario, with whatever this process has."""
    threading.Thread(target=int).start()  # with the first one ThreadSanitizer starts its own
    outcomes = {}
    for name, scenario in SCENARIOS.items():
        before = holdings("memlane-"), used()
        try:
            scenario(nothing_fails)
        except MemlaneError as error:
            outcomes[name] = type(error).__name__
            del error
        else:
            outcomes[name] = "success"
        left = surplus(before[0], holdings("memlane-"))
        assert not left, (name, left)
        assert used() == before[1], name
    return outcomes


@in_namespaces
@pytest.mark.parametrize("size", [4, 8, 12, 16, 24, 32, 64, 4096])
def test_what_a_small_tmpfs_cannot_hold_is_shm_exhausted(size: int) -> None:
    """A segment that does not fit raises ShmExhausted; everything else works."""
    peer = start(every_scenario, method="spawn", command=private_shm(f"{size}k"))
    outcomes = peer.result()
    assert set(outcomes.values()) <= {"success", "ShmExhausted"}
    assert ("ShmExhausted" in outcomes.values()) == (size < 4096), outcomes


def create_a_file_too_many(_link: Link) -> None:
    """Role: uses a tmpfs with room for two files, one of which is its root directory."""
    with ShmRingBuffer(1, 64, 2):
        for make in (lambda: ShmRingBuffer(1, 64, 2), lambda: Ring(64, create=True)):
            before = holdings("memlane-")
            with refuses(MemoryError, match="`df` and `df -i`") as caught:
                make()
            assert isinstance(caught.value, SystemFault)
            del caught
            assert not surplus(before, holdings("memlane-"))
    ShmRingBuffer(1, 64, 2).close()


@in_namespaces
def test_a_tmpfs_without_room_for_a_file_is_named() -> None:
    """It has space but no room for a file: the error says where to look."""
    start(create_a_file_too_many, method="spawn", command=private_shm("1m,nr_inodes=2")).result()


def create_in_vain(_link: Link) -> list[tuple[str, str]]:
    """Role: the errors of starts that cannot succeed."""
    said = []
    for make in (
        lambda: ShmRingBuffer(1, 64, 2),
        lambda: MessageQueue(1, 1),
        lambda: Ring(64, create=True),
        lambda: Ring(64, "memlane-of-the-caller", create=True),
    ):
        descriptors = os.listdir("/proc/self/fd")
        with refuses(OSError) as caught:
            make()
        said.append((type(caught.value).__name__, str(caught.value)))
        del caught
        assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    return said


@in_namespaces
@pytest.mark.parametrize(
    ("mount", "error", "text"),
    [
        ("mount -t tmpfs -o ro tmpfs /dev/shm", "AccessDenied", "so that it can be written to"),
        ("mount -t tmpfs tmpfs /dev", "SystemFault", "mount a tmpfs at /dev/shm"),
    ],
    ids=["read-only", "missing"],
)
def test_an_error_says_that_shm_is_missing_or_not_writable(
    mount: str, error: str, text: str
) -> None:
    """If /dev/shm is missing or not writable, the error says so."""
    command = ("unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable)
    for kind, said in start(create_in_vain, method="spawn", command=command).result():
        assert kind == error
        assert "/dev/shm" in said
        assert text in said


def create_without_proc(_link: Link) -> str:
    with refuses(OSError) as caught:
        ShmRingBuffer(1, 64, 2)
    return str(caught.value)


@in_namespaces
@pytest.mark.skipif(is_sanitized(), reason="a sanitizer needs /proc itself")
def test_an_error_says_that_proc_is_missing() -> None:
    """File descriptions are reopened through /proc; without it, the error says so."""
    hide = 'mount -t tmpfs tmpfs /proc && exec "$@"'
    command = ("unshare", "-rm", "sh", "-c", hide, "sh", sys.executable)
    said = start(create_without_proc, method="spawn", command=command).result()
    assert "is /proc mounted?" in said
