"""M14: other shared memory, and other users of the process's global state, are not affected.

Fails without the guard: a library that patches the resource tracker around its own calls loses or
duplicates registrations that other threads make meanwhile.
"""

import subprocess
import sys

SCRIPT = """
import signal, sys, threading
from multiprocessing import resource_tracker, shared_memory

def state():
    tracker = resource_tracker._resource_tracker
    return [
        {name: id(value) for name, value in vars(module).items() if callable(value)}
        for module in (resource_tracker, shared_memory, threading, signal)
    ] + [
        {name: id(value) for name, value in vars(type(tracker)).items()},
        {number: signal.getsignal(number) for number in signal.valid_signals()},
        (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.getswitchinterval()),
    ]

before = state()
import memlane
assert state() == before
stop, made = threading.Event(), 0

def make_shared_memory():
    global made
    while not stop.is_set():
        block = shared_memory.SharedMemory(create=True, size=64)
        same = shared_memory.SharedMemory(block.name)
        same.close()
        block.close()
        block.unlink()
        made += 1
        if state()[:5] != before[:5]:
            raise AssertionError("patched")

other = threading.Thread(target=make_shared_memory)
other.start()
rounds = 0
while rounds < 200 or made < 50:
    rounds += 1
    with memlane.MessageQueue(1, 1, None, 64, 2) as writer:
        with memlane.MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            writer.wait_until_ready(90)
            writer.enqueue(1)
            assert reader.dequeue() == 1
    memlane.ShmRingBuffer(1, 64, 2).close()
stop.set()
other.join()
assert state() == before
leftover = shared_memory.SharedMemory(create=True, size=64)
print(leftover.name)
leftover.close()
leftover.unlink()
"""


def test_threads_that_use_other_shared_memory_are_not_disturbed() -> None:
    """Nothing global is patched while queues come and go, and the tracker has no complaint."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_import_starts_nothing() -> None:
    """Importing makes no thread, no process, no file in /dev/shm, and imports no torch."""
    code = """
import os, sys
before = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
import memlane
assert (set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))) == before
assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
assert not open(f"/proc/self/task/{os.getpid()}/children").read()
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
