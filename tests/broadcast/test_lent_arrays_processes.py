"""Large arrays that are lent: what an interpreter of its own shows."""

import subprocess
import sys

import pytest

from tests.support.missing import needs

LOCKED = """
import ctypes, sys
import numpy as np
from memlane import MessageQueue

writer = MessageQueue(1, 1, None, 4096, 3, max_extent_bytes=8 << 20)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
libc = ctypes.CDLL(None, use_errno=True)
for number in range(6):
    if number == 2 and libc.mlockall(int(sys.argv[1])) != 0:
        sys.exit("this user may not lock memory")
    writer.enqueue(np.full((3 << 20) + 100, number, np.uint8))
    array = reader.dequeue()
    assert (array == number).all(), (number, np.unique(array))
    array[::4096] = 77
    del array
"""


BESIDE = """
import ctypes, sys
import numpy as np
from memlane import MessageQueue
writer = MessageQueue(1, 1, None, 4096, 5, max_extent_bytes=8 << 20)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
for number in range(4):
    writer.enqueue(np.full(1 << 20, number, np.uint8))
arrays = [reader.dequeue() for _ in range(4)]
starts = [array.ctypes.data for array in arrays]
assert max(starts) - min(starts) < 4 << 20
first = arrays[0]
del arrays
libc = ctypes.CDLL(None, use_errno=True)
if libc.mlock(ctypes.c_void_p(min(starts)), max(starts) - min(starts) + (1 << 20)) != 0:
    sys.exit("this user may not lock memory")
for number in range(10, 14):
    writer.enqueue(np.full(1 << 20, number, np.uint8))
    array = reader.dequeue()
    assert (array == number).all(), (number, np.unique(array))
    del array
assert (first == 0).all()
"""


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        *[pytest.param(LOCKED, flags, id=f"mlockall-{flags}") for flags in (1, 1 | 2, 1 | 2 | 4)],
        pytest.param(BESIDE, 0, id="mlock of more than the array"),
    ],
)
def test_memory_that_is_locked(program: str, flags: int) -> None:
    """The kernel then copies pages of a private mapping, lent or not; arrays are still right.

    mlockall with MCL_CURRENT, MCL_FUTURE and MCL_ONFAULT: all of them; mlock: those between two
    leases."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(flags)], capture_output=True, text=True, check=False
    )
    if "may not lock" in done.stderr:
        pytest.skip(needs("locked memory", done.stderr.strip()))
    assert done.returncode == 0, done.stderr
