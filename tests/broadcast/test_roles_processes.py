"""The wrong end's methods, in an interpreter without torch."""

import subprocess
import sys

SCRIPT = """
from memlane import MessageQueue, ShmRingBuffer
assert False, "python -O removes this"
def refusal(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        print(type(error).__name__)
    else:
        print("nothing")
with MessageQueue(1, 1, None, 64, 2) as writer:
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    refusal(writer.dequeue, timeout=0)
    refusal(writer.acquire_read, timeout=0)
    refusal(reader.enqueue, 1, timeout=0)
    refusal(reader.acquire_write, timeout=0)
    refusal(MessageQueue.create_from_handle, writer.export_handle(), 0)
    refusal(MessageQueue, 1, 2)
    refusal(MessageQueue, 2, 2, local_reader_ranks=[0])
    refusal(ShmRingBuffer, 0, 1, 1)
    reader.close()
    refusal(reader.dequeue)
"""


def test_checks_survive_optimisation() -> None:
    """python -O removes asserts, and none of the checks."""
    done = subprocess.run(
        [sys.executable, "-O", "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.split() == [
        *["WrongRole"] * 4,
        "RankTaken",
        *["InvalidArgument"] * 3,
        "Closed",
    ]
