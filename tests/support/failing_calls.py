"""A start in which one system call of a native library fails: each call, with each error.

A library preloaded before libc (`native/tests/failing_calls.cpp`) counts the calls and makes one of
them fail: the process under test is started with it (see `preloading`).

A *scenario* is a callable ``scenario(failing)`` that starts something and closes it. Calls inside
``with failing(stage):`` are counted, and can fail; the rest prepares, or checks that what succeeded
works. If such a block raises, the scenario closes what it had prepared and raises the error.
"""

import ctypes
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from errno import errorcode
from pathlib import Path

from tests.support.leaks import SHM, Holdings, holdings, surplus
from tests.support.waiting import PATIENCE

Failing = Callable[[str], AbstractContextManager[None]]
Scenario = Callable[[Failing], None]


@dataclass(frozen=True)
class Fault:
    """The `number`-th call of that name in a stage (from 1), and the errno with which it fails."""

    stage: str
    number: int
    call: str
    error: int


@dataclass(frozen=True)
class Failure:
    """A fault and its outcome: the error, or None if the scenario succeeded."""

    fault: Fault
    error: BaseException | None

    def __str__(self) -> str:
        fault = self.fault
        seen = "goes on" if self.error is None else type(self.error).__name__
        return f"{fault.stage}, {fault.call} ({fault.number}), {errorcode[fault.error]}: {seen}"


def preloading(shim: Path) -> tuple[str, ...]:
    """Command prefix for an interpreter whose calls can fail."""

    def joined(variable: str, *values: str) -> str:
        return f"{variable}={':'.join(value for value in values if value)}"

    before = {name: os.environ.get(name, "") for name in ("LD_PRELOAD", "LD_LIBRARY_PATH")}
    # By name, because LD_PRELOAD splits paths at blanks.
    return (
        "env",
        joined("LD_LIBRARY_PATH", str(shim.parent), before["LD_LIBRARY_PATH"]),
        joined("LD_PRELOAD", before["LD_PRELOAD"], shim.name),
    )


class FailingCalls:
    """The calls of the library whose path contains `watched`, in this process."""

    def __init__(self, watched: str) -> None:
        self._shim = ctypes.CDLL(None)
        self._shim.failing_calls_name.restype = ctypes.c_char_p
        assert self._shim.failing_calls_watch(watched.encode()) == 0, f"no {watched} is loaded"

    def of(self, scenario: Scenario) -> dict[str, list[str]]:
        """The calls that the scenario makes, by stage."""
        seen: dict[str, list[str]] = {}

        @contextmanager
        def counting(stage: str) -> Iterator[None]:
            self._shim.failing_calls_arm(b"", 0, 0)
            try:
                yield
            finally:
                count = self._shim.failing_calls_disarm()
                names = [self._shim.failing_calls_name(n + 1).decode() for n in range(count)]
                seen.setdefault(stage, []).extend(names)

        scenario(counting)
        return seen

    def is_reached(self) -> bool:
        """Returns whether a call that is to fail, or to last, was made since it was armed."""
        return bool(self._shim.failing_calls_made())

    def failing(self, fault: Fault) -> Failing:
        """The argument for a scenario in which that one call fails."""

        @contextmanager
        def fail(stage: str) -> Iterator[None]:
            if stage != fault.stage:
                yield
                return
            call = fault.call.encode()
            self._shim.failing_calls_arm(call, fault.number, fault.error)
            try:
                yield
            finally:
                count = self._shim.failing_calls_disarm()
                made = [self._shim.failing_calls_name(n + 1) for n in range(count)].count(call)
                assert made >= fault.number, f"it made {made} of them only"

        return fail


@contextmanager
def nothing_fails(_stage: str) -> Iterator[None]:
    """The argument for a scenario that must succeed."""
    yield


def locks_in(directory: Path) -> Counter[str]:
    """Open-file-description locks on files of that file system, whichever process holds them."""
    device = os.stat(directory).st_dev
    where = f"{os.major(device):02x}:{os.minor(device):02x}:"
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return Counter(" ".join(line[3:]) for line in lines if "OFDLCK" in line and where in str(line))


def fail_everywhere(
    calls: FailingCalls,
    scenario: Scenario,
    errors: Callable[[str], Sequence[int]],
    *,
    prefix: str,
    is_alone: bool,
    may_leave_names: Sequence[str] = (),
) -> list[Failure]:
    """Runs the scenario once for each call that it makes and each of ``errors(call)``.

    After each run no descriptor, mapping or name is left, and the scenario succeeds again. The
    stages `may_leave_names` may leave a name that the next start removes. `is_alone`: no other
    process uses this /dev/shm, so locks are checked, too.
    """
    scenario(nothing_fails)  # the first run fills caches and imports modules
    failures = []
    for stage, names in calls.of(scenario).items():
        for at, call in enumerate(names):
            for error in errors(call):
                fault = Fault(stage, 1 + names[:at].count(call), call, error)
                try:
                    failures.append(
                        fail_once(calls, scenario, fault, prefix, is_alone, may_leave_names)
                    )
                except BaseException as problem:
                    problem.add_note(f"with {fault} ({errorcode[error]})")
                    raise
    return failures


def fail_once(
    calls: FailingCalls,
    scenario: Scenario,
    fault: Fault,
    prefix: str,
    is_alone: bool,
    may_leave_names: Sequence[str] = (),
) -> Failure:
    """Runs the scenario with that fault, and then without any."""
    before, locks = holdings(prefix), locks_in(SHM)
    failure = Failure(fault, _error_of(scenario, calls.failing(fault)))
    left = _left_since(before, prefix)
    if fault.stage in may_leave_names:
        left = [line for line in left if not line.startswith("segments")]
    assert not left, f"{failure} leaves {left}"
    scenario(nothing_fails)
    left = _left_since(before, prefix)
    if is_alone:
        left += list(locks_in(SHM) - locks)
    assert not left, f"{failure} leaves for ever {left}"
    return failure


def _left_since(before: Holdings, prefix: str) -> list[str]:
    """Waits a moment for joined threads to leave /proc: the kernel wakes the thread that joins
    before it removes the one that ended."""
    patience = time.monotonic() + PATIENCE
    while True:
        left = surplus(before, holdings(prefix))
        threads = any(line.startswith("threads") for line in left)
        if not threads or time.monotonic() > patience:
            return left
        time.sleep(0.001)


def _error_of(scenario: Scenario, failing: Failing) -> BaseException | None:
    try:
        scenario(failing)
    except AssertionError:
        raise
    except Exception as error:
        return error.with_traceback(None)
    return None
