"""torch is optional: who has not imported it does not pay for it, and who lacks it is told."""

import subprocess
import sys

import numpy as np
import pytest

from tests.support import PATIENCE
from tests.support.missing import package
from tests.support.serdes import MSGPACK, laid

WITHOUT_TENSORS = {
    "a queue": """
import sys
from memlane import MessageQueue
with MessageQueue(1, 1) as w, MessageQueue.create_from_handle(w.export_handle(), 0) as r:
    w.enqueue({"a": 1}); r.dequeue()
print("torch" in sys.modules)
""",
    "a serde": """
import sys
from memlane.store.serde import PickleMsgpackSerde
import numpy
serde = PickleMsgpackSerde()
data, _, metadata, _ = serde.serialize({"array": numpy.zeros(9), "pickled": range(3)})
assert serde.deserialize(memoryview(metadata + b"".join(data)))["pickled"] == range(3)
print("torch" in sys.modules)
""",
}


@pytest.mark.parametrize("program", WITHOUT_TENSORS.values(), ids=WITHOUT_TENSORS)
def test_torch_is_not_imported_for_nothing(program: str) -> None:
    """Neither end imports torch unless there are tensors."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]


def test_a_reader_without_torch_is_told_so() -> None:
    """The error says that torch is missing; everything else can be read."""
    torch = package("torch")
    program = """
import sys
sys.modules["torch"] = None  # importing it fails
from memlane.store.serde import MsgpackSerde
tensor, array = (bytes.fromhex(line) for line in sys.stdin)
print(MsgpackSerde().deserialize(memoryview(array)))
try:
    MsgpackSerde().deserialize(memoryview(tensor))
except ValueError as error:
    print(error)
"""
    sent = "\n".join(laid(MSGPACK, one).hex() for one in (torch.ones(3), np.ones(3)))
    run = subprocess.run(
        [sys.executable, "-c", program],
        input=sent,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.stderr == ""
    array, error = run.stdout.splitlines()
    assert array == "[1. 1. 1.]"
    assert "Unsupported object type 'torch.Tensor'" in error
    assert "cannot import torch" in error
