"""Helpers for testing an engine that is built on memlane: queues, leaks, deaths, stalls.

@pytest.fixture(autouse=True)
def clean():
    with memlane.testing.no_leaks():
        yield
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import select
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from memlane._base.deadline import Deadline
from memlane._base.diagnosis import INTERVAL_SETTINGS
from memlane.broadcast.queue import MessageQueue
from memlane.errors import InvalidArgument, TimedOut, system_fault

__all__ = ["Segment", "kill", "local_queue", "no_leaks", "segments", "stalls", "stopped"]

_FOLDER = "/dev/shm"
_PREFIXES = ("memlane-", "vllm_offload_")
_REGION = "memlane"  # with MEMLANE_VLLM=region the name is a folder's, and this is the file in it
_INTERVAL = INTERVAL_SETTINGS[0]


@contextmanager
def local_queue(
    n_reader: int = 1, **options: Any
) -> Iterator[tuple[MessageQueue, list[MessageQueue]]]:
    """Yields (writer, readers), all ready and in this process; closes them after the block.

    `options` are those of `MessageQueue`, as are the errors raised. One thread can use all ends if
    it dequeues the messages before the ring is full.
    """
    with ExitStack() as stack:
        writer = stack.enter_context(MessageQueue(n_reader, n_reader, **options))
        readers = [
            stack.enter_context(MessageQueue.create_from_handle(writer.export_handle(rank), rank))
            for rank in writer.handle.local_reader_ranks
        ]
        writer.wait_until_ready(timeout=10)
        yield writer, readers


@dataclass(frozen=True)
class Segment:
    """A segment: of a queue, ring or store, or an offload region with the default prefix, also of
    vLLM on memlane (`NAME.mmap/memlane`).

    Attributes:
        name: the file's name in /dev/shm, even if it has been removed already.
        is_named: whether the name is still in /dev/shm.
        pids: processes of this user, in this pid namespace, that have it open.
    """

    name: str
    is_named: bool
    pids: tuple[int, ...]


def segments() -> list[Segment]:
    """All of this user's segments, sorted by name. Reads the descriptors of all processes.

    Where /dev/shm may not be listed (mode 1733), only those that a process has open.

    Raises:
        SystemFault: there is no /dev/shm, or no /proc, which shows who has segments open.
    """
    named = set(_named())
    holders: dict[str, set[int]] = {name: set() for name in named}
    device = os.stat(_FOLDER).st_dev
    for pid, link in _descriptors():
        with suppress(OSError):  # closed meanwhile
            target = os.readlink(link)
            name = _name_in(target.removesuffix(" (deleted)"))
            if name is None:
                continue
            file = os.stat(link)
            if file.st_uid == os.geteuid() and file.st_dev == device:  # else of another container
                holders.setdefault(name, set()).add(pid)
                if not target.endswith(" (deleted)"):
                    named.add(name)
    return [
        Segment(name, name in named, tuple(sorted(pids))) for name, pids in sorted(holders.items())
    ]


def _named() -> Iterator[str]:
    """The names in /dev/shm that are this user's; of a region in a folder, the folder's until the
    region is in it."""
    try:
        with os.scandir(_FOLDER) as entries:
            names = [entry.name for entry in entries]
    except PermissionError:
        return
    except OSError as error:
        raise system_fault(error.errno or 0, f"cannot list {_FOLDER}") from None
    for name in names:
        for place in (f"{name}/{_REGION}", name):
            path = f"{_FOLDER}/{place}"
            with suppress(OSError):  # removed meanwhile, no folder, or another user's
                if _name_in(path) is not None and os.lstat(path).st_uid == os.geteuid():
                    yield place
                    break


def _descriptors() -> Iterator[tuple[int, str]]:
    """(pid, path) of each descriptor of the processes whose descriptors this user may see."""
    if not os.path.exists("/proc/self/fd"):
        raise system_fault(errno.ENOENT, "cannot list the processes in /proc; mount it")
    with os.scandir("/proc") as processes:
        pids = [int(process.name) for process in processes if process.name.isdecimal()]
    for pid in pids:
        with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as links:  # ended, or not ours
            yield from [(pid, link.path) for link in links]


def _name_in(path: str) -> str | None:
    """What a segment at `path` is called; None if it is nowhere where segments are."""
    name = path.removeprefix(f"{_FOLDER}/")
    file, _, inner = name.partition("/")
    if name == path or not file.startswith(_PREFIXES) or inner not in ("", _REGION):
        return None
    return name


@contextmanager
def no_leaks() -> Iterator[None]:
    """Fails if the block leaves a new segment that is named, or open in this process.

    A name counts whichever process created the segment, so tests running in parallel can make this
    fail.

    Raises:
        AssertionError: there are such segments; names them, and the processes that have them open.
            Not raised if the block itself raises.
    """
    before = {segment.name for segment in segments()}
    yield
    if not _left_since(before):
        return
    gc.collect()  # an object in a cycle is no leak
    left = [
        f"{segment.name} ({'named' if segment.is_named else 'without a name'}, open in "
        f"{', '.join(map(str, segment.pids)) or 'no process'})"
        for segment in _left_since(before)
    ]
    if left:
        raise AssertionError("left behind in shared memory: " + "; ".join(left))


def _left_since(before: set[str]) -> list[Segment]:
    return [
        segment
        for segment in segments()
        if segment.name not in before and (segment.is_named or os.getpid() in segment.pids)
    ]


def kill(pid: int, timeout: float | None = 10.0) -> None:
    """Kills a process with SIGKILL; returns once its locks are dropped, so that it counts as dead.

    Raises:
        TimedOut: it has not ended within `timeout` seconds.
    """
    deadline = Deadline(timeout)
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not select.select([descriptor], [], [], deadline.timeout_left())[0]:
            raise TimedOut(f"process {pid} did not end within {timeout} s of signal 9", timeout)
    finally:
        os.close(descriptor)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a child process for the duration of the block, then continues it.

    Raises:
        InvalidArgument: the process has ended.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        state = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if state is None or state.si_code not in (os.CLD_STOPPED, os.CLD_TRAPPED):
            raise InvalidArgument(f"process {pid} has ended and cannot be stopped")
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def stalls(after: float) -> Iterator[list[str]]:
    """Collects, during the block, this process's warnings about waits longer than `after` seconds.

    Each begins with the process to blame: `reader 3 (pid 4711, stopped, ...) kept the writer
    waiting`. They are collected even if the logging configuration would drop them, unless logging
    is disabled altogether (`logging.disable`).

    Raises:
        InvalidArgument: `after` is not a positive number.
    """
    if not isinstance(after, (int, float)) or not after > 0:
        raise InvalidArgument(f"after must be a positive number of seconds, not {after!r}")
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, collector = logging.getLogger("memlane"), Collector(logging.WARNING)
    previous, level, disabled = os.environ.get(_INTERVAL), logger.level, logger.disabled
    logger.disabled = False
    logger.setLevel(logging.WARNING)
    os.environ[_INTERVAL] = str(after)
    logger.addHandler(collector)
    try:
        yield lines
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)
        logger.disabled = disabled
        if previous is None:
            del os.environ[_INTERVAL]
        else:
            os.environ[_INTERVAL] = previous
