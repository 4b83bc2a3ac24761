"""A reader dies at every point: the writer is told, and the other reader misses nothing."""

from collections.abc import Callable
from functools import partial
from typing import Any

from memlane import Closed, Handle, MessageQueue, WriterClosed
from tests.crash.survivors import (
    CHUNK,
    CHUNKS,
    Sender,
    Survivor,
    check,
    identity_of,
    leaving_nothing,
    locks_on,
    take,
)
from tests.crash.writers import has_closed
from tests.support import PATIENCE, Doomed, Hooks, Link, Passage, Spot
from tests.support.queues import start_reader, start_writer

Begin = Callable[..., Any]


def reading(_link: Link, begin: Begin, handle: Handle) -> None:
    """Role: a reader from start to end."""
    begin("attach")
    queue = MessageQueue.create_from_handle(handle, 0)
    begin("wait_until_ready")
    queue.wait_until_ready(PATIENCE)
    begin("dequeue")
    take(queue, 0)
    begin("dequeue, asleep")
    take(queue, 1)
    begin("dequeue, large")
    take(queue, 2)
    begin("dequeue, lent")
    lent = queue.dequeue(PATIENCE)
    begin("dequeue_view")
    view = queue.dequeue_view(PATIENCE)
    check(view.__enter__(), 4)
    begin("dequeue, beside a view")
    take(queue, 5)
    begin("end of the view")
    view.__exit__(None, None, None)
    begin("dequeue_view, large")
    with queue.dequeue_view(PATIENCE) as message:
        check(message, 6)
        del message
    begin("end of the lease")
    check(lent, 3)
    del lent
    begin("dequeue, writer asleep")
    take(queue, 7)
    begin("close, writer asleep")
    queue.close()


def reader_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """The writer is blocked in wait_until_ready, in enqueue, or not at all."""
    with leaving_nothing():
        writer = Sender(start_writer(2, max_chunk_bytes=CHUNK, max_chunks=CHUNKS))
        identity = identity_of(writer.handle)
        doomed = Doomed(hooks, spot, reading, writer.handle)
        others: list[Survivor] = []
        writer.send()
        for stage, _ in doomed.stages():
            follow(doomed, writer, others, stage)
        seen = judge(doomed, writer, others)
        assert not locks_on(identity)
    return doomed.passages, seen


def follow(doomed: Doomed, writer: Sender, others: list[Survivor], stage: str) -> None:
    """Follows the writer before a stage, until the reader is blocked in it."""
    before: dict[str, list[Callable[[], None]]] = {
        "attach": [writer.begin_ready],
        "dequeue": [writer.settle],
        "dequeue, large": [partial(writer.send, "large")],
        "dequeue, lent": [partial(writer.send, "lent")],
        "dequeue_view": [partial(writer.send, "array")],
        "dequeue, beside a view": [writer.send],
        "dequeue_view, large": [partial(writer.send, "large")],
        "dequeue, writer asleep": [writer.fill, writer.begin_send],
        "close, writer asleep": [writer.settle, writer.begin_send],
    }
    at_rest: dict[str, Callable[[], None]] = {
        "wait_until_ready": lambda: others.append(Survivor(writer.handle, 1)),
        "dequeue, asleep": writer.send,
    }
    if stage == "dequeue":
        others[0].begin_reading()
    for act in before.get(stage, []):
        act()
    doomed.go()
    if stage in at_rest:
        doomed.until_at_rest()
        at_rest[stage]()


def judge(doomed: Doomed, writer: Sender, others: list[Survivor]) -> str:
    """The writer raised for this death only; the other readers got every message."""
    spot = doomed.spot
    if spot is not None and spot.stage == "attach" and spot.point != "wake.store":
        state = "absent: another takes its place"
        others = [Survivor(writer.handle, 0), Survivor(writer.handle, 1)]
        writer.settle()
    elif spot is not None and not (spot.stage.startswith("close") and has_closed(spot.point)):
        if spot.stage in ("attach", "wait_until_ready", "dequeue, writer asleep") or (
            spot.stage.startswith("close")
        ):
            writer.settle()
        late = writer.until_death(doomed)
        state = f"ReaderDied after {late * 1e3:.0f} ms, then on without it"
    else:
        state = "closed: nobody waits for it"
        writer.settle()
    if not others:
        others = [Survivor(writer.handle, 1)]
    for other in others:
        other.begin_reading()
    for _ in range(2 * CHUNKS):
        writer.send()
    sent = writer.sent
    writer.close()
    for other in others:
        count, error, _ = other.end_of_reading()
        assert count == sent, f"{count} messages instead of {sent}, then {error!r}"
        assert isinstance(error, Closed), repr(error)
    return f"writer: {state}; the other got all {sent}"


def replacing(_link: Link, begin: Begin, handle: Handle, first: int) -> None:
    """Role: a reader in another's place, or a late one, from start to end."""
    begin("attach, in another's place")
    queue = MessageQueue.create_from_handle(handle, 0)
    begin("dequeue, asleep, in another's place")
    take(queue, first)
    begin("close, in another's place")
    queue.close()


def replacement_dies(
    hooks: Hooks, spot: Spot | None, *, is_late: bool = False
) -> tuple[list[Passage], str]:
    """The queue goes on, and another takes the place that it had, or was to have."""
    with leaving_nothing():
        writer = Sender(
            start_writer(2, max_chunk_bytes=CHUNK, max_chunks=CHUNKS, late_readers=is_late)
        )
        first, other = start_reader(writer.handle), Survivor(writer.handle, 1)
        writer.get_ready()
        other.begin_reading()
        writer.send()
        first.call(take, 0)
        first.call("close")
        first.leave()
        handle = writer.readmit()
        doomed = Doomed(hooks, spot, replacing, handle, 1)
        for stage, _ in doomed.stages():
            doomed.go()
            if stage.startswith("dequeue"):
                doomed.until_at_rest()
                writer.send()
        state = "closed: nobody waits for it"
        if spot is not None and spot.stage.startswith("attach") and spot.point != "wake.store":
            state = "absent: another takes its place"
        elif spot is not None and not (spot.stage.startswith("close") and has_closed(spot.point)):
            state = f"ReaderDied after {writer.until_death(doomed) * 1e3:.0f} ms"
            handle = writer.readmit()
        else:
            handle = writer.readmit()
        new, expected = start_reader(handle), writer.sent
        if is_late:
            new.begin("dequeue", PATIENCE).until_blocked()
        writer.send()
        check(new.outcome() if is_late else new.call("dequeue", PATIENCE), expected)
        new.call("close")
        new.leave()
        sent = writer.sent
        writer.close()
        count, error, _ = other.end_of_reading()
        assert (count, type(error)) == (sent, WriterClosed), f"{count} of {sent}, then {error!r}"
    return doomed.passages, f"writer: {state}; its place was taken; the other got all {sent}"


def late_reader_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """The same, in a queue whose readers come late."""
    return replacement_dies(hooks, spot, is_late=True)


def reading_batches(_link: Link, begin: Begin, handle: Handle) -> None:
    """Role: a reader that takes many messages by one call."""
    queue = MessageQueue.create_from_handle(handle, 0)
    queue.wait_until_ready(PATIENCE)
    begin("dequeue_many")
    for number, one in enumerate(queue.dequeue_many(9, PATIENCE)):
        check(one, number)
    begin("dequeue_many, writer asleep")
    for number, one in enumerate(queue.dequeue_many(9, PATIENCE), CHUNKS):
        check(one, number)
    begin("close, after batches")
    queue.close()


def reader_of_batches_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """The writer is blocked in enqueue, or not at all."""
    with leaving_nothing():
        writer = Sender(start_writer(2, max_chunk_bytes=CHUNK, max_chunks=CHUNKS))
        doomed = Doomed(hooks, spot, reading_batches, writer.handle)
        others = [Survivor(writer.handle, 1)]
        for stage, _ in doomed.stages():
            if stage == "dequeue_many":
                writer.get_ready()
                others[0].begin_reading()
                writer.fill()
            elif stage == "dequeue_many, writer asleep":
                writer.fill()
                writer.begin_send()
            elif stage.startswith("close"):
                writer.settle()
            doomed.go()
        if spot is not None and spot.stage == "dequeue_many, writer asleep":
            writer.settle()
        seen = "closed"
        if spot is not None and not (spot.stage.startswith("close") and has_closed(spot.point)):
            seen = f"ReaderDied after {writer.until_death(doomed) * 1e3:.0f} ms"
        for _ in range(2 * CHUNKS):
            writer.send()
        sent = writer.sent
        writer.close()
        count, error, _ = others[0].end_of_reading()
        assert count == sent, f"{count} messages instead of {sent}, then {error!r}"
        assert isinstance(error, Closed), repr(error)
    return doomed.passages, f"writer: {seen}; the other got all {sent}"
