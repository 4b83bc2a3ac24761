"""A storage or ring is closed, or its process forks, while a call of its writer runs Python code.

Keys are hashed and compared, serdes and a subclass's checks are called, and threads take turns.
Each case runs in its own process, because these bugs were segmentation faults.
"""

import subprocess
import sys

import pytest

from tests.support import PATIENCE

HEAD = """
import os, sys, threading, time
from memlane import Closed
from memlane.store import *
ring = SingleWriterShmRingBuffer(4096, None, True)

class Key:
    armed = False
    def __init__(self, number, what):
        self.number, self.what = number, what
    def __eq__(self, other):
        return self is other
    def __hash__(self):
        if Key.armed:
            self.what()
        return self.number
"""
CLOSES = {
    "a key, in free_unused": """
storage = SingleWriterShmObjectStorage(2048, 1, ring)
for number in range(3):
    key = Key(number, storage.close)
    storage.put(key, b"x" * 1000)
    storage.drop_reference(key)
Key.armed = True
storage.free_unused()
""",
    "a key, in put": """
storage = SingleWriterShmObjectStorage(2048, 1, ring)
for number in range(3):
    key = Key(number, storage.close)
    storage.put(key, b"x" * 1000)
    storage.drop_reference(key)
late = Key(9, lambda: None)
Key.armed = True
storage.put(late, b"x" * 1000)
""",
    "a check": """
class Storage(SingleWriterShmObjectStorage):
    def default_is_free_check(self, number, data):
        ring.close()
        return True
ring = SingleWriterShmRingBuffer(2048, None, True)
storage = Storage(1900, 1, ring)
storage.put(1, b"x" * 1500)
storage.put(2, b"x" * 1400)
""",
    "a serde": """
class Serde(MsgpackSerde):
    def serialize(self, value):
        ring.close()
        return super().serialize(value)
storage = SingleWriterShmObjectStorage(2048, 1, ring, serde_class=Serde)
storage.put(1, b"x")
""",
}
GROWS = """
ring = SingleWriterShmRingBuffer(96 << 20, None, True)
storage = SingleWriterShmObjectStorage(8 << 20, 1, ring)
delay = 0.001 + 0.0007 * float(sys.argv[1])
closing = threading.Thread(target=lambda: (time.sleep(delay), storage.close()))
closing.start()
try:
    for number in range(21):
        storage.put(number, b"x" * (4 << 20))
except Closed:
    pass
closing.join()
"""
FORKS = """
def fork():
    Key.armed = False
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        raise LookupError

storage = SingleWriterShmObjectStorage(2048, 1, ring)
places = []
for number in range(3):
    key = Key(number, fork)
    places.append(storage.put(key, b"x" * 1000))
    storage.drop_reference(key)
Key.armed, parent = True, os.getpid()
try:
    storage.free_unused()
except LookupError:
    pass
finally:
    if os.getpid() != parent:
        os._exit(0)
assert len(storage.key_index) == storage.statistics().objects == 3
for place in places:
    assert storage.get(*place) == b"x" * 1000
"""


@pytest.mark.parametrize("code", CLOSES.values(), ids=CLOSES)
def test_a_call_whose_end_is_closed_inside_raises_closed(code: str) -> None:
    """The call raises Closed, and touches nothing that is gone."""
    command = [sys.executable, "-c", HEAD + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("memlane.errors.Closed"), done.stderr


def test_a_child_that_goes_on_with_a_call_takes_nothing() -> None:
    """A child that goes on with the call takes nothing from its parent."""
    command = [sys.executable, "-c", HEAD + FORKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_by_a_thread_while_the_ring_grows() -> None:
    """The ring grows without the GIL: close() waits for that. (A fourth of these crashed.)"""
    for turn in range(18):
        command = [sys.executable, "-c", HEAD + GROWS, str(turn)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
