"""Deaths in a queue of the latest: its writer never waits, and nothing is torn."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

from memlane import Closed, Handle, MemlaneError, MessageQueue, WriterDied
from tests.crash.survivors import (
    CHUNK,
    CHUNKS,
    Sender,
    check,
    leaving_nothing,
    message,
    take,
)
from tests.crash.writers import has_closed, is_published
from tests.support import PATIENCE, Doomed, Hooks, Link, Passage, Remote, Spot
from tests.support.queues import start_reader, start_writer

Begin = Callable[..., Any]


def reading(_link: Link, begin: Begin, handle: Handle) -> None:
    """Role: a reader of the latest from start to end."""
    begin("attach, to the latest")
    queue = MessageQueue.create_from_handle(handle, 0)
    begin("dequeue, the latest, asleep")
    take(queue, 0)
    begin("dequeue_view, the latest")
    in_chunk = queue.dequeue_view(PATIENCE)
    check(in_chunk.__enter__(), 2)
    begin("dequeue_view, the latest, large")
    in_extent = queue.dequeue_view(PATIENCE)
    check(in_extent.__enter__(), 3)
    begin("dequeue, the latest, lent")
    lent = queue.dequeue(PATIENCE)
    begin("end of the views, of the latest")
    in_chunk.__exit__(None, None, None)
    in_extent.__exit__(None, None, None)
    begin("end of the lease, of the latest")
    check(lent, 4)
    del lent
    begin("close, the latest")
    queue.close()


def reader_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """The writer never waits for it; another reads on, and one takes its place."""
    with leaving_nothing():
        writer = Sender(start_writer(2, max_chunk_bytes=CHUNK, max_chunks=CHUNKS, mode="latest"))
        other = start_reader(writer.handle, 1)
        doomed = Doomed(hooks, spot, reading, writer.handle)
        before: dict[str, list[Callable[[], None]]] = {
            "dequeue_view, the latest": [writer.send, partial(writer.send, "array")],
            "dequeue_view, the latest, large": [partial(writer.send, "large")],
            "dequeue, the latest, lent": [partial(writer.send, "lent")],
        }
        for stage, _ in doomed.stages():
            for act in before.get(stage, []):
                act()
            doomed.go()
            if stage == "dequeue, the latest, asleep":
                doomed.until_at_rest()
                writer.send()
        handle, state = writer.handle, "closed: nobody waits for it"
        if spot is not None and spot.stage.startswith("attach") and spot.point != "wake.store":
            state = "absent: another takes its place"
        elif spot is not None and not (spot.stage.startswith("close") and has_closed(spot.point)):
            state = f"ReaderDied after {writer.until_death(doomed) * 1e3:.0f} ms"
            handle = writer.readmit()
        else:
            handle = writer.readmit()
        new = start_reader(handle)
        for _ in range(3 * CHUNKS):
            writer.send("array")
        assert writer.waits() == 0
        for reader in (new, other):
            check(reader.call("dequeue", PATIENCE), writer.sent - 1)
            reader.call("close")
            reader.leave()
        writer.close()
    return doomed.passages, f"writer: {state}; its place was taken; all got the latest"


SENDS = {
    "enqueue, of the latest": "small",
    "enqueue, into a chunk": "array",
    "enqueue, beside a view": "array",
    "enqueue, beside two views": "array",
    "enqueue, no chunk to write to": "array",
    "enqueue, of the latest, large": "large",
}
VIEWED = ("enqueue, into a chunk", "enqueue, beside a view")


def writing(_link: Link, begin: Begin) -> None:
    """Role: a writer of the latest from start to end."""
    begin("create, of the latest")
    queue = MessageQueue(1, 1, None, CHUNK, CHUNKS, mode="latest")
    handle = queue.export_handle()
    for number, (stage, kind) in enumerate(SENDS.items()):
        begin(stage, handle)
        queue.enqueue(message(number, kind), timeout=0)
    begin("close, of the latest")
    queue.close()


KEPT: list[tuple[int, Any]] = []


def view(queue: MessageQueue, number: int) -> None:
    """Keeps a view of that message."""
    block = queue.dequeue_view(PATIENCE)
    check(block.__enter__(), number)
    KEPT.append((number, block))


def read_out(queue: MessageQueue) -> tuple[list[int], MemlaneError]:
    """The numbers of the messages that are left, all whole, and the end of the queue."""
    numbers = []
    while True:
        try:
            received = queue.dequeue(PATIENCE)
        except MemlaneError as error:
            break_off = error.with_traceback(None)
            break
        check(received, received[0])
        numbers.append(received[0])
    for number, block in KEPT:
        check(block._value, number)
        block.__exit__(None, None, None)
    KEPT.clear()
    queue.close()
    return numbers, break_off


def writer_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """Its reader gets the latest message that is complete, and what it keeps is whole."""
    with leaving_nothing():
        doomed = Doomed(hooks, spot, writing)
        reader: Remote | None = None
        last, begun = -1, ""
        for stage, handle in doomed.stages():
            if reader is None and handle is not None:
                reader = start_reader(handle)
                reader.begin("dequeue", PATIENCE).until_blocked()
            elif begun == next(iter(SENDS)) and reader is not None:
                check(reader.outcome(), 0)
                last = 0
            elif begun in VIEWED and reader is not None:
                last = list(SENDS).index(begun)
                reader.call(view, last)
            begun = stage
            doomed.go()
        if reader is None:
            return doomed.passages, "nothing is left of it"
        if begun == next(iter(SENDS)):
            with suppress(WriterDied):
                check(reader.outcome(), 0)
                last = 0
        numbers, end = reader.call(read_out)
        reader.leave()
        sent, kind = len(SENDS), cast("type[MemlaneError]", Closed)
        if spot is not None and spot.stage in SENDS:
            sent = list(SENDS).index(spot.stage) + is_published(spot.point)
        if spot is not None and not (spot.stage.startswith("close") and has_closed(spot.point)):
            kind = WriterDied
        assert [last, *numbers][-1] == sent - 1, (last, numbers, sent)
        assert isinstance(end, kind), end
    return doomed.passages, f"the reader got the latest of {sent}, then {kind.__name__}"
