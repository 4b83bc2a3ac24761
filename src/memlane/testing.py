"""Helpers for testing an engine that is built on memlane: queues, leaks, deaths, stalls.

@pytest.fixture(autouse=True)
def clean():
    with memlane.testing.no_leaks():
        yield
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from memlane._base import processes
from memlane._base.deadline import Deadline
from memlane._base.descriptors import is_readable_within
from memlane._base.diagnosis import INTERVAL_SETTINGS
from memlane.broadcast.queue import MessageQueue
from memlane.errors import InvalidArgument, TimedOut
from memlane.inspect import Segment, segments

__all__ = ["Segment", "kill", "local_queue", "no_leaks", "segments", "stalls", "stopped"]

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


@contextmanager
def no_leaks() -> Iterator[None]:
    """Fails if the block leaves a new segment that is open in this process, or one with a name that
    a child of this process (or a child's child) has open, or no process at all.

    Segments that only other processes have open do not count, so tests can run in parallel, as with
    pytest-xdist. One that no process has open counts whichever process created it: its processes
    have ended, and nothing shows any more whose children they were.

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
        if segment.name not in before and _counts(segment, os.getpid())
    ]


def _counts(segment: Segment, here: int) -> bool:
    if here in segment.pids or not segment.is_named:
        return here in segment.pids
    if holders := {*segment.pids, *segment.keepers}:
        return any(processes.descends_from(pid, here) for pid in holders)
    # A region without participants is one that nobody holds: it is never a leftover.
    return segment.is_leftover or (segment.kind == "region" and not segment.participants)


def kill(pid: int, timeout: float | None = 10.0) -> None:
    """Kills a process with SIGKILL; returns once its locks are dropped, so that it counts as dead.

    Raises:
        TimedOut: it has not ended within `timeout` seconds.
    """
    deadline = Deadline(timeout)
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not is_readable_within(descriptor, deadline.timeout_left()):
            raise TimedOut(f"process {pid} did not end within {timeout} s of signal 9", timeout)
    finally:
        os.close(descriptor)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process for the duration of the block, then continues it.

    Raises:
        InvalidArgument: the process has ended.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise _ended(pid) from None
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGSTOP)
        # Only its parent, perhaps multiprocessing's fork server, is told that it has stopped.
        while not processes.is_stopped(pid):
            if is_readable_within(descriptor, 0.001):
                raise _ended(pid)
        yield
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGCONT)
        os.close(descriptor)


def _ended(pid: int) -> InvalidArgument:
    return InvalidArgument(f"process {pid} has ended and cannot be stopped")


@contextmanager
def stalls(after: float) -> Iterator[list[str]]:
    """Collects, during the block, this process's warnings about waits longer than `after` seconds.

    Each names the process to blame first among those that are waited for: `writer (pid 4700)
    blocked for 0.5 s: no free chunk; waiting for reader 3 (pid 4711, stopped, ...)`. They are
    collected even if the logging configuration would drop them, unless logging is disabled
    altogether (`logging.disable`).

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
