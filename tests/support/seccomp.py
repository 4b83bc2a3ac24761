"""Filters of system calls, as containers and older kernels have them: for this process, all of its
threads, from here on.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Sequence

LOAD, EQUALS, AT_LEAST, GIVE = 0x20, 0x15, 0x35, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000
_SECCOMP = {"x86_64": 317, "aarch64": 277}
CALLS = {
    # name: number on x86-64, and on aarch64
    "clone3": (435, 435),
    "copy_file_range": (326, 285),
    "eventfd2": (290, 19),
    "fallocate": (285, 47),
    "fchmod": (91, 52),
    "fstatfs": (138, 44),
    "ftruncate": (77, 46),
    "futex_waitv": (449, 449),
    "inotify_init1": (294, 26),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "linkat": (265, 37),
    "madvise": (28, 233),
    "mbind": (237, 235),
    "membarrier": (324, 283),
    "memfd_create": (319, 279),
    "mlock": (149, 228),
    "mremap": (25, 216),
    "munlock": (150, 229),
    "pidfd_open": (434, 434),
    "prctl": (157, 167),
    "pread64": (17, 67),
    "process_vm_readv": (310, 270),
    "pwrite64": (18, 68),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86),
    "unlinkat": (263, 35),
}
_COLUMN = 0 if platform.machine() == "x86_64" else 1


def install(steps: Sequence[tuple[int, int, int, int]]) -> None:
    """Filters by a program of such steps: code, jumps if true and if false, value."""
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.syscall(_SECCOMP[platform.machine()], 1, 1, program) == 0, ctypes.get_errno()


def refuse(call: str, error: int) -> None:
    """That call fails."""
    refuse_all((call,), error)


def refuse_all(calls: Sequence[str], error: int) -> None:
    """Each of them fails."""
    tests = [
        (EQUALS, len(calls) - 1 - at, 0, CALLS[call][_COLUMN]) for at, call in enumerate(calls)
    ]
    tests[-1] = (EQUALS, 0, 1, tests[-1][3])
    install([(LOAD, 0, 0, 0), *tests, (GIVE, 0, 0, FAIL | error), (GIVE, 0, 0, ALLOW)])


def has_io_uring() -> bool:
    """Returns whether this process may make one."""
    parameters = ctypes.create_string_buffer(120)
    ring: int = ctypes.CDLL(None).syscall(CALLS["io_uring_setup"][_COLUMN], 1, parameters)
    if ring >= 0:
        os.close(ring)
    return ring >= 0
