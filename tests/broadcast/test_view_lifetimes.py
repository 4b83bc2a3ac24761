"""Views released by other threads, by forked children and by the end of the interpreter.

Fails without the guard: a child that gives back its parent's chunk, a count that two threads change
at once, or memory that is freed under a view.
"""

import os
import random
import subprocess
import sys
from contextlib import suppress
from queue import SimpleQueue

import numpy as np
import pytest

from memlane import MessageQueue, ViewInUse
from tests.support import PATIENCE, Aside, until
from tests.support.queues import queue_of, refuses

ARRAY = np.arange(2000)
LARGE = np.arange(50_000)


def views(queue: MessageQueue) -> int:
    return queue.statistics().readers[0].views


@pytest.mark.parametrize("sent", [ARRAY, LARGE], ids=["chunk", "extent"])
def test_dropped_while_the_reader_waits(sent: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
    """Another thread drops the last view: the writer goes on, and the reader gets what it sends."""
    with queue_of(max_chunk_bytes=1 << 15, max_chunks=1) as (writer, (reader,)):
        writer.enqueue(sent)
        with refuses(ViewInUse), reader.dequeue_view() as view:
            kept = [view[1:]]
        del view
        blocked = Aside(writer.enqueue, "next").until_blocked()
        kept.clear()
        assert reader.dequeue(PATIENCE) == "next"
        blocked.result()
    with queue_of(max_chunk_bytes=1 << 15, max_chunks=2) as (writer, (reader,)):
        writer.enqueue(sent)
        with refuses(ViewInUse), reader.dequeue_view() as view:
            kept = [view[1:]]
        del view
        waits = Aside(reader.dequeue, PATIENCE).until_blocked()
        kept.clear()
        assert views(writer) == 0
        writer.enqueue("next")
        assert waits.result() == "next"


class Dropping:
    """A thread that keeps a few of the arrays that it is given, checks them and drops them."""

    def __init__(self) -> None:
        self.box: SimpleQueue[tuple[int, object] | str] = SimpleQueue()
        self.thread = Aside(self._run)

    def _run(self) -> None:
        dice = random.Random(1)
        kept: list[tuple[int, object]] = []
        while (given := self.box.get()) != "end":
            if not isinstance(given, str):
                kept.append(given)
            most = 0 if given == "all" else dice.randrange(3)
            del given
            while len(kept) > most:
                number, array = kept.pop(dice.randrange(len(kept)))
                assert isinstance(array, np.ndarray)
                assert (array == number % 251).all()
                del array


def test_a_thread_that_drops_them_in_any_order() -> None:
    """While the reader goes on reading: every view is right until it goes, and all go back."""
    count = 1000

    def send() -> None:
        for number in range(count):
            size = (5000, 10_000, 100_000)[number % 3]
            writer.enqueue(np.full(size, number % 251, np.uint8), PATIENCE)

    with queue_of(max_chunk_bytes=1 << 14, max_chunks=4) as (writer, (reader,)):
        dropping, sending, number = Dropping(), Aside(send), 0
        while number < count:
            block = reader.dequeue_view(PATIENCE)
            try:
                dropping.box.put((number, block.__enter__()))
            except ViewInUse:  # the next chunk is one of the kept; nothing was consumed
                dropping.box.put("all")
                until(lambda: views(writer) == 0)
                continue
            number += 1
            with suppress(ViewInUse):
                block.__exit__(None, None, None)
        sending.result()
        for last in ("all", "end"):
            dropping.box.put(last)
        dropping.thread.result()
        assert views(writer) == 0


@pytest.mark.parametrize("sent", [ARRAY, LARGE], ids=["chunk", "extent"])
def test_a_forked_child_gives_nothing_back(
    sent: "np.ndarray[tuple[int], np.dtype[np.int64]]",
) -> None:
    """It inherits views of its parent and may drop them; the parent keeps its own."""
    with queue_of(max_chunk_bytes=1 << 15, max_chunks=1) as (writer, (reader,)):
        writer.enqueue(sent)
        with refuses(ViewInUse), reader.dequeue_view() as view:
            kept = view[:]
        child = os.fork()
        if child == 0:
            same = bool((kept == sent).all())
            del kept, view
            reader.close()
            os._exit(0 if same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert views(writer) == 1
        with refuses(TimeoutError):
            writer.enqueue("too early", timeout=0)
        np.testing.assert_array_equal(kept, sent)
        del kept, view
        writer.enqueue("next", timeout=0)
        assert reader.dequeue(timeout=0) == "next"


SCRIPT = """
import builtins, sys, threading
import numpy as np
from memlane import MessageQueue, ViewInUse
writer = MessageQueue(1, 1, max_chunk_bytes=1 << 15)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
kept = []
for array in (np.ones(2000), np.ones(50_000)):
    writer.enqueue(array)
    try:
        with reader.dequeue_view() as view:
            kept.append(view[1:])
    except ViewInUse:
        pass
writer.enqueue(np.ones(2000))
{end}
"""
ENDS = {
    "as they are": "pass",
    "closed": "reader.close(); writer.close()",
    "inside a block": "block = reader.dequeue_view(); inside = block.__enter__()",
    "in a module that outlives all": "builtins.kept = kept",
    "in a cycle with the queue": "kept += [reader, kept]; del reader",
    "by an exit inside": "\nwith reader.dequeue_view() as inside: sys.exit(0)",
    "in a thread that looks at them": """
def look():
    while True: kept[1].sum()
threading.Thread(target=look, daemon=True).start()""",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_interpreter_ends_cleanly_with_views_alive(end: str) -> None:
    """Whatever still refers to shared memory: no crash, no complaint, nothing left."""
    program = SCRIPT.format(end=end)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
