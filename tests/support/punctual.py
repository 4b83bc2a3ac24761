"""The rule of time in tests, and the control that it needs.

A test asserts a duration only where memlane promises one ("a death is noticed within a second"),
and only by `assert_in_time`. A busy machine delays a test as much as what it watches, so a
*control* runs beside both: on each processor a process that only wakes up every few milliseconds
and notes how late it was. A promise is kept if what it is about took no longer than promised plus
what the latest of them was late in that window. A sleeper is preferred to what computes, so where
the kernel counts for how long somebody waited for a processor (/proc/pressure/cpu), the control
notes that, too; it is forgiven up to three times the promise, so that what hangs always fails.

Everything else waits for an event, by `until`, a peer's word or a timeout of `PATIENCE`, and
asserts no duration; where something must happen before a time is over that a test waits out, it
does so by `given_time`. A test never sleeps to let something happen: it waits for what that means,
which is a state in /proc, a line, a sync point, or a counter in `statistics()`. A test may sleep to
show that nothing happens, if no slow machine can make it fail; a line says so.
"""

import gc
import itertools
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.leaks import LASTING, children_of
from tests.support.processes import die_with_parent
from tests.support.waiting import PATIENCE, until

PERIOD = 0.005
"""Seconds that the control sleeps each time."""
_KEPT = 1 << 17
"""Wake-ups that are remembered: of ten minutes and more."""
_BYTES = 8 + 24 * _KEPT
_MOST = 4
"""Processors that are watched."""
_FORGIVEN = 3.0
"""The multiple of the promised time that a lack of processors may add."""
_PRESSURE = Path("/proc/pressure/cpu")
SHARED = "MEMLANE_TESTS_CONTROL"
"""The variable with the descriptors of a control that runs already: several groups share one."""
_control: "Control | None" = None


class Control:
    """Processes that only wake up, each on a processor of its own; or the notes of some that run
    already, in these files."""

    def __init__(self, files: Sequence[int] = ()) -> None:
        cpus = sorted(os.sched_getaffinity(0))[:_MOST]
        self._wakers = [Notes(file) for file in files] or [Waker(cpu) for cpu in cpus]

    def late(self, since: float, moment: float) -> float:
        """Seconds that the latest of them was late in that window."""
        return max(waker.late(since, moment) for waker in self._wakers)

    def pressed(self, since: float, moment: float) -> float:
        """Seconds of that window in which somebody waited for a processor."""
        return self._wakers[0].pressed(since, moment)

    def files(self) -> list[int]:
        """Descriptors of the notes, for processes that inherit them and set `SHARED`."""
        return [waker.file for waker in self._wakers]

    def close(self) -> None:
        """End the processes, if they are this one's."""
        for waker in self._wakers:
            waker.close()


class Notes:
    """The moments at which a process woke up, and how late it has been in sum."""

    def __init__(self, file: int) -> None:
        self.file = file
        os.set_inheritable(file, False)
        self._memory = mmap.mmap(file, _BYTES)
        self._count = memoryview(self._memory)[:8].cast("Q")
        notes = memoryview(self._memory)[8:].cast("d")
        self._moments, self._sums = notes[:_KEPT], notes[_KEPT : 2 * _KEPT]
        self._pressures = notes[2 * _KEPT :]

    def late(self, since: float, moment: float) -> float:
        """Seconds that it was late in that window, to the first wake-up after it."""
        return self._grown(self._sums, since, moment)

    def pressed(self, since: float, moment: float) -> float:
        """Seconds that somebody waited for a processor in that window."""
        return self._grown(self._pressures, since, moment)

    def _grown(self, sums: "memoryview[float]", since: float, moment: float) -> float:
        def woke(number: int) -> float:
            return self._moments[number % _KEPT]

        until(lambda: woke(self._count[0] - 1) >= moment, "the control wakes up")
        kept = range(max(0, self._count[0] - _KEPT + 1), self._count[0])
        first = kept[max(0, bisect_right(kept, since, key=woke) - 1)]
        last = kept[bisect_left(kept, moment, key=woke)]
        return sums[last % _KEPT] - sums[first % _KEPT]

    def close(self) -> None:
        """Forgets the notes."""
        os.close(self.file)


class Waker(Notes):
    """A process that only wakes up, and notes it."""

    def __init__(self, cpu: int) -> None:
        file = os.memfd_create("control")
        os.truncate(file, _BYTES)
        super().__init__(file)
        self._pressure: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run()
        LASTING.add(self.pid)  # no test's leak, and no test kills it
        os.sched_setaffinity(self.pid, [cpu])
        until(lambda: self._count[0], "the control runs")

    def _run(self) -> None:
        try:
            die_with_parent()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, for the tests
            os.closerange(0, os.sysconf("SC_OPEN_MAX"))
            gc.disable()
            with suppress(OSError):  # this kernel does not count it
                self._pressure = os.open(_PRESSURE, os.O_RDONLY)
            self._wake_up()
        finally:
            os._exit(0)

    def _wake_up(self) -> None:
        late, woke = 0.0, time.monotonic()
        for number in itertools.count():
            self._moments[number % _KEPT], self._sums[number % _KEPT] = woke, late
            self._pressures[number % _KEPT] = self._total_pressure()
            self._count[0] = number + 1
            time.sleep(PERIOD)
            before, woke = woke, time.monotonic()
            late += woke - before - PERIOD  # also if it was kept from running before it slept

    def _total_pressure(self) -> float:
        if self._pressure is None:
            return 0.0
        some = os.pread(self._pressure, 200, 0).partition(b"\n")[0]
        return int(some.rpartition(b"=")[2]) / 1e6

    def close(self) -> None:
        """End the process."""
        super().close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        LASTING.discard(self.pid)


def start_control() -> Control:
    """Start this process's control: before the first window, and before other threads."""
    global _control
    assert _control is None
    _control = Control([int(file) for file in os.environ.pop(SHARED, "").split()])
    return _control


def assert_in_time(promise: float, since: float, moment: float | None = None) -> None:
    """Fails if ``moment`` (now) is later than the promise allows; both are `time.monotonic()`.

    No promise is longer than `PATIENCE`: a moment in its place would forgive everything.
    """
    if promise > PATIENCE:
        raise ValueError(f"{promise} is no promise in seconds: assert_in_time(promise, since, ...)")
    moment = time.monotonic() if moment is None else moment
    if (took := moment - since) > promise:
        pressed = _control.pressed(since, moment) if _control is not None else 0.0
        late = max(late_since(since, moment), min(pressed, _FORGIVEN * promise))
        assert took <= promise + late, (
            f"it took {took:.3f} s; {promise} s are promised, and the control was {late:.3f} s late"
        )


def late_since(since: float, moment: float | None = None) -> float:
    """Seconds that the control was late from ``since`` to ``moment`` (now)."""
    assert _control is not None, "no control runs: start_control() comes before the window"
    return _control.late(since, time.monotonic() if moment is None else moment)


def given_time(check: Callable[[float], object], seconds: float) -> None:
    """Runs ``check(seconds)``, in which something must happen before that many seconds are over.

    If it fails where the control was late for a good part of them, it is given more.
    """
    while True:
        began = time.monotonic()
        try:
            check(seconds)
        except (AssertionError, pytest.fail.Exception):
            if late_since(began) < seconds / 8:
                raise
            seconds *= 4
        else:
            return


def stacks() -> str:
    """Returns where each thread of this process is, and in which state its children are."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for thread, frame in sys._current_frames().items():
        lines += [f"thread {names.get(thread, thread)}:\n", *traceback.format_stack(frame, 20)]
    for child in children_of(os.getpid()):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            waits = Path(f"/proc/{child}/wchan").read_text()
            lines.append(f"child {child}: state {state}, in the kernel's {waits}\n")
    return "".join(lines)
