"""Every system call of a start fails in turn: a clear error, and nothing left.

With ``MEMLANE_SOAK_CALLS=1`` each fails with every error, else with one, which is drawn, so the
calls of a kind meet all of them; and with EINTR if a signal may interrupt it.

Fails without the guard: a failure that is mistaken for another, or leaves half a start behind.
`pytest -s` prints every fault and its outcome. A new system adds to `starts.SCENARIOS`.
"""

import errno
import os
import random
import re
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from memlane import MemlaneError, SegmentExists, SegmentRefused, ShmExhausted, SystemFault
from tests.support import (
    PATIENCE,
    FailingCalls,
    Failure,
    Fault,
    Link,
    fail_everywhere,
    is_sanitized,
    start,
    unshare_refusal,
)
from tests.support.built import BUILD, hooked, preloaded
from tests.support.queues import queue_of
from tests.support.starts import SCENARIOS

pytestmark = [
    pytest.mark.skipif(is_sanitized(), reason="a sanitizer goes before libc, too"),
    pytest.mark.usefixtures("hooks"),
]
ROOT = BUILD.parent
SHIM = BUILD / "hooks/libfailing_calls.so"
ERRORS = (errno.ENOSPC, errno.EMFILE, errno.EACCES, errno.ENOMEM)
TAKES_ALL = os.environ.get("MEMLANE_SOAK_CALLS") == "1"

# Calls that a signal may interrupt.
INTERRUPTIBLE = {"open", "opendir", "fopen", "fread", "fcntl", "ftruncate", "fallocate", "pread"}
INTERRUPTIBLE |= {"pwrite", "close", "fclose", "closedir", "syscall", "recvmsg"}

# What the native code calls and what either is no system call or cannot fail.
HARMLESS = {"clock_gettime", "getenv", "geteuid", "getpid", "pause", "sched_yield", "sysconf"}
# For hooks and at the end of a test only: see native/bindings/python/sync_hooks.hpp.
HARMLESS |= {"raise", "write"}
# Of `memlane tier`, a command: it says so.
HARMLESS |= {"rename"}
# Of the thread that sleeps on the pidfds of peers: without it the slices of a wait remain.
HARMLESS |= {"epoll_wait"}
# A region's: without them a wait lasts to its end, and a page is populated twice; for its threads.
HARMLESS |= {"inotify_init", "inotify_init1", "inotify_add_watch", "poll", "read", "mincore"}
HARMLESS |= {"pthread_sigmask", "sigdelset", "sigfillset"}
# libc's and libstdc++'s own work in memory, and output of a process that is about to abort.
IN_MEMORY = re.compile(
    r"mem\w+|str\w+|__\w+|v?s?n?printf|v?fprintf|fputc|fwrite|abort|\w*alloc|free|stderr"
    r"|pthread_(mutex_(un)?lock|rwlock_(rd|wr|un)lock|cond_clockwait|self)"
)
STAGES_THAT_MAY_LEAVE_NAMES = ("close", "ready", "sweep and create")


def errors_of(dice: random.Random, call: str) -> Sequence[int]:
    """The errors tried on that call."""
    errors = ERRORS if TAKES_ALL else (dice.choice(ERRORS),)
    return (*errors, errno.EINTR) if call in INTERRUPTIBLE else errors


def calls() -> FailingCalls:
    return FailingCalls("/memlane/_native.")


def play(_link: Link, name: str, is_alone: bool) -> list[Failure]:
    """Role: a scenario, once for every fault."""
    return fail_everywhere(
        calls(),
        SCENARIOS[name],
        partial(errors_of, random.Random(name)),
        prefix="memlane-",
        is_alone=is_alone,
        may_leave_names=STAGES_THAT_MAY_LEAVE_NAMES,
    )


def calls_of(_link: Link, *names: str) -> list[tuple[str, str]]:
    """Role: (stage, call) of all calls of these scenarios."""
    every = calls()
    return [
        (stage, call)
        for name in names
        for stage, made in every.of(SCENARIOS[name]).items()
        for call in made
    ]


def extension() -> Path:
    (path,) = (ROOT / "build/hooks/site/memlane").glob("_native.*.so")
    return path


def fits(failure: Failure) -> bool:
    """Returns whether the error says what failed, in the class that callers look for."""
    error, number = failure.error, failure.fault.error
    if error is None:
        return True
    if isinstance(error, SegmentExists):  # the file of that name cannot be opened: somebody else's
        return (failure.fault.call, number) == ("open", errno.EACCES)
    builtin = {errno.EACCES: PermissionError, errno.ENOMEM: MemoryError}.get(number, Exception)
    if not isinstance(error, MemlaneError) or not isinstance(error, builtin):
        return False
    if isinstance(error, SystemFault):
        return error.errno == number
    return isinstance(error, (ShmExhausted, SegmentRefused))


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_call_fails(name: str) -> None:
    """A fitting error of memlane's, or success; nothing left; and the next start works."""
    is_alone = not unshare_refusal()
    failures = start(play, name, is_alone, method="spawn", command=preloaded()).result(5 * PATIENCE)
    print()
    print("\n".join(f"{name}: {failure}" for failure in failures))
    assert failures
    wrong = [f"{failure}: {failure.error!r}" for failure in failures if not fits(failure)]
    assert not wrong, "\n".join(wrong)
    interrupted = [f for f in failures if f.fault.error == errno.EINTR and f.error is not None]
    assert not interrupted, interrupted


FIRST_IMPORT = """
import ctypes, errno, sys
shim, extension = ctypes.CDLL(None), ctypes.CDLL(sys.argv[1])
assert shim.failing_calls_watch(b"/memlane/_native.") == 0
shim.failing_calls_arm(b"__register_atfork", int(sys.argv[2]), errno.ENOMEM)
try:
    from memlane import MessageQueue
except ImportError as error:
    assert "fork handler" in str(error.__cause__ or error), error
else:
    sys.exit("it was imported")
finally:
    shim.failing_calls_disarm()
from memlane import MessageQueue
"""


@pytest.mark.parametrize("number", [1, 2])
def test_an_import_that_cannot_register_for_forks_fails_and_can_be_repeated(number: int) -> None:
    """It fails, and the next one repeats it."""
    command = [*preloaded(), "-c", FIRST_IMPORT, str(extension()), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def refused_once(_link: Link) -> None:
    """Role: space for a large message is refused once, while an older one is unread."""
    fault = Fault("enqueue", 1, "pwrite", errno.ENOSPC)
    with queue_of(1, max_extent_bytes=0) as (writer, (reader,)):
        writer.enqueue(bytes(11 << 20))
        with calls().failing(fault)("enqueue"):
            writer.enqueue(bytes(12 << 20), timeout=PATIENCE)
        assert [len(reader.dequeue()) >> 20 for _ in range(2)] == [11, 12]


def test_space_that_is_there_again() -> None:
    """Somebody may have taken it meanwhile; then it is tried again, and no reader is waited for."""
    start(refused_once, method="spawn", command=preloaded()).result()


def refused_behind_the_ring(_link: Link, call: str, error: int) -> None:
    """Role: an array that would be lent finds no space in an extent."""
    with queue_of(1, max_chunk_bytes=4 << 20) as (writer, (reader,)):
        for size, number in ((1 << 20, 1), (3 << 20, 2)):  # without and with a warm extent
            with calls().failing(Fault("enqueue", 1, call, error))("enqueue"):
                writer.enqueue(np.full(size, number, np.uint8), timeout=0)
            assert (reader.dequeue(timeout=0) == number).all()
            writer.enqueue(np.full(1 << 20, 9, np.uint8), timeout=0)
            assert (reader.dequeue(timeout=0) == 9).all()


@pytest.mark.parametrize("call", ["ftruncate", "pwrite"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM])
def test_a_message_that_fits_its_chunk_is_sent_though_no_extent_can_be_made(
    call: str, error: int
) -> None:
    """A message that fits its chunk is not refused because it was to be lent."""
    role = refused_behind_the_ring
    start(role, call, error, method="spawn", command=preloaded()).result()


def symbols(library: Path, which: str) -> set[str]:
    """Names of functions that a library imports from libc or exports, without versions."""
    command = ["nm", "-D", f"--{which}-only", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = [line for line in lines if which == "defined" or "GLIBC_" in line]
    return {line.split()[-1].partition("@")[0] for line in wanted}


def plain(name: str) -> str:
    """The name as in the source: without the suffix of large-file variants."""
    return name.removesuffix("64")


def test_no_call_is_missing() -> None:
    """Every system call of the native code can fail in these tests, and every one did.

    `native/tests/failing_calls.cpp` has them all, whether one goes by what the extension imports
    or by its source; and the scenarios make them all.
    """
    hooked()
    can_fail = {
        plain(name)
        for name in symbols(SHIM, "defined")
        if not name.startswith("failing_calls_") and not name.startswith("_Z")
    }
    imported = {plain(name) for name in symbols(extension(), "undefined")}
    assert "fallocate" in imported
    unknown = {one for one in imported - can_fail - HARMLESS if not IN_MEMORY.fullmatch(one)}
    assert not unknown, f"add them to {SHIM.stem}.cpp: {unknown}"

    source = "".join(path.read_text() for path in (ROOT / "native/os").iterdir())
    named = set(re.findall(r"(?<![\w>])::([a-z_]+)\(", source)) - {"pthread_atfork"}
    assert "fallocate" in named
    assert named <= can_fail | HARMLESS, named - can_fail - HARMLESS

    made = start(calls_of, *SCENARIOS, method="spawn", command=preloaded()).result(5 * PATIENCE)
    failed = {call for _, call in made}
    print(f"\n{len(made)} calls: {', '.join(sorted(failed))}")
    at_import = {"__register_atfork"}
    assert failed == can_fail - at_import, failed ^ (can_fail - at_import)
