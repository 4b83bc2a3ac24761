"""Objects that own memory, descriptors or threads follow one rule for copies and `with` blocks."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from memlane import Closed, InvalidType, MessageQueue, ShmRingBuffer, SingleWriterShmRingBuffer
from memlane.groups import TcpGroup
from tests.support.groups import SECRET
from tests.support.queues import refuses
from tests.support.regions import new_id, region_of
from tests.support.stores import store_of

OWNERS: dict[str, Callable[[ExitStack], Any]] = {
    "queue": lambda _: MessageQueue(1, 1, None, 64, 2),
    "queue without readers": lambda _: MessageQueue(0, 0),
    "its ring": lambda _: ShmRingBuffer(1, 64, 2),
    "store": lambda stack: stack.enter_context(store_of())[0],
    "its ring of bytes": lambda _: SingleWriterShmRingBuffer(64, create=True),
    "group": lambda _: TcpGroup("127.0.0.1", 0, 0, 1, secret=SECRET),
    "region": lambda _: region_of(new_id()),
}


@pytest.mark.parametrize("name", OWNERS)
def test_a_closed_one_is_not_entered(name: str) -> None:
    """The end of its `with` block closes it; another block of it is refused."""
    with ExitStack() as stack:
        owner = OWNERS[name](stack)
        with owner as entered:
            assert entered is owner
        with refuses(Closed), owner:
            pass


@pytest.mark.parametrize("name", [name for name in OWNERS if name != "its ring"])
def test_none_is_copied(name: str) -> None:
    """The error says what to do instead. A queue's ring is sent as its handle."""
    with ExitStack() as stack, OWNERS[name](stack) as owner:
        for send in (pickle.dumps, copy.copy):
            with refuses(InvalidType, match="cannot be pickled or copied: "):
                send(owner)


INTERRUPTED = """
from memlane._base.lifetime import Owned

class Left(Owned): ...

def interrupted():
    raise KeyboardInterrupt

left = Left(), Left(), Left()
for owner, abandon in zip(left, (lambda: print("first"), interrupted, lambda: print("last"))):
    owner._own(abandon)
"""


def test_an_interrupt_at_exit_leaves_none_behind() -> None:
    """The newest goes first, and the others go although a handler raises in one."""
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False
    )
    assert run.stdout == "last\nfirst\n", run.stderr
