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
_CALLS = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "futex_waitv": 449,
    "pidfd_open": 434,
    "clone3": 435,
}


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
    number = _CALLS[call]
    install(
        [(LOAD, 0, 0, 0), (EQUALS, 0, 1, number), (GIVE, 0, 0, FAIL | error), (GIVE, 0, 0, ALLOW)]
    )


def has_io_uring() -> bool:
    """Whether this process may make one."""
    parameters = ctypes.create_string_buffer(120)
    ring: int = ctypes.CDLL(None).syscall(_CALLS["io_uring_setup"], 1, parameters)
    if ring >= 0:
        os.close(ring)
    return ring >= 0
