"""Whatever a forked child does before it exits, what its parent has open goes on.

Fails without the guard: a child that announces, unlinks, unlocks or unpins would end it.
"""

import subprocess
import sys

import pytest

QUEUE = """
import gc, os, sys
from pathlib import Path
from memlane import MessageQueue, ShmRingBuffer
writer = MessageQueue(2, 2, None, 256, 4)
reader = MessageQueue.create_from_handle(writer.export_handle(0), 0)
ring = ShmRingBuffer(2, 64, 3)
names = [Path("/dev/shm") / r.shared_memory.name for r in (writer.buffer, ring)]
child = os.fork()
if child == 0:
    {action}
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert all(name.exists() for name in names), names
other = MessageQueue.create_from_handle(writer.export_handle(1), 1)
ShmRingBuffer(*ring.handle()).close()
writer.wait_until_ready(90)
for number in range(20):
    writer.enqueue(number, timeout=0)
    assert reader.dequeue(timeout=0) == other.dequeue(timeout=0) == number
assert [entry.state for entry in writer.statistics().readers] == ["running"] * 2
for end in (other, reader, writer, ring):
    end.close()
assert not any(name.exists() for name in names)
"""
STORE = """
import gc, os, sys
from pathlib import Path
from memlane import SingleWriterShmObjectStorage as Storage, SingleWriterShmRingBuffer as Ring
writer = Storage(1000, 2, Ring(4096, create=True))
reader = Storage.create_from_handle(writer.handle())
place = writer.put("k", [1, 2])
view = reader.view(*place)
value = view.__enter__()
ring = Ring(100, create=True)
names = [Path("/dev/shm") / r.handle()[1] for r in (writer.ring_buffer, ring)]
child = os.fork()
if child == 0:
    {action}
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert all(name.exists() for name in names), names
view.__exit__(None, None, None)
assert reader.get(*place) == [1, 2]
other = Storage.create_from_handle(writer.handle())
assert other.get(*place) == [1, 2]
assert [entry.state for entry in writer.statistics().readers] == ["running"] * 2
assert [entry.outstanding for entry in writer.statistics().readers] == [0, 0]
for end in (other, reader, writer, ring):
    end.close()
assert not any(name.exists() for name in names)
"""
IN_EITHER = [
    "pass",
    "os._exit(0)",
    "writer.close(); reader.close(); ring.close()",
    "ring.close(); reader.close(); writer.close(); writer.close()",
    "os.fork()",
]
IN_A_QUEUE = [*IN_EITHER, "del writer, reader, ring; gc.collect()"]
IN_A_STORE = [
    *IN_EITHER,
    "del value; view = None; gc.collect()",
    "del writer, reader, ring, view, value; gc.collect()",
]


@pytest.mark.parametrize(
    ("script", "action"),
    [
        *[pytest.param(QUEUE, action, id=f"queue-{action}") for action in IN_A_QUEUE],
        *[pytest.param(STORE, action, id=f"store-{action}") for action in IN_A_STORE],
    ],
)
def test_the_parent_goes_on(script: str, action: str) -> None:
    """Its ends, its ring and their names are as before."""
    done = subprocess.run(
        [sys.executable, "-c", script.format(action=action)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
