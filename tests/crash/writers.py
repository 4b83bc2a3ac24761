"""A writer dies at every point: both readers get all complete messages, then `WriterDied`."""

from collections.abc import Callable
from typing import Any

from memlane import Closed, Handle, MessageQueue, ReaderDied, SegmentMissing, WriterDied
from tests.crash.survivors import (
    CHUNK,
    CHUNKS,
    End,
    Survivor,
    identity_of,
    leaving_nothing,
    locks_on,
    message,
)
from tests.support import PATIENCE, Doomed, Hooks, Link, Passage, Spot, assert_in_time
from tests.support.queues import BOUND, start_reader

Begin = Callable[..., Any]

SENDS = {
    "enqueue, readers asleep": "small",
    "enqueue, large": "lent",
    "enqueue, array": "array",
    "enqueue, second lap": "small",
    "enqueue, large again": "large",
    "enqueue, last free chunk": "small",
    "enqueue, ring full": "array",
}


def is_published(point: str) -> bool:
    """Returns whether a writer that dies at that point of `enqueue` has sent its message."""
    return point in ("park.load", "wake.store")


def has_closed(point: str) -> bool:
    """Returns whether an end that dies at that point of `close` has announced its end."""
    # Before that it looks who has come.
    return point not in ("join.load", "leave.load", "unlink", "leave.store")


def writing(_link: Link, begin: Begin) -> None:
    """Role: a writer from start to end."""
    begin("create")
    queue = MessageQueue(2, 2, None, CHUNK, CHUNKS)
    begin("wait_until_ready", queue.export_handle())
    queue.wait_until_ready(PATIENCE)
    for number, (stage, kind) in enumerate(SENDS.items()):
        begin(stage)
        queue.enqueue(message(number, kind), PATIENCE)
    begin("close")
    queue.close()


def writer_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """Both readers are blocked in wait_until_ready, in dequeue, or not at all."""
    with leaving_nothing():
        doomed = Doomed(hooks, spot, writing)
        readers: list[Survivor] = []
        identity = ""
        sent = 0
        for stage, word in doomed.stages():
            if stage == "create":
                doomed.go()
            elif stage == "wait_until_ready":
                identity = identity_of(word)
                readers.append(Survivor(word, 0))
                readers[0].begin_ready()
                doomed.go()
                doomed.until_at_rest()
                try:
                    readers.append(Survivor(word, 1))
                except SegmentMissing:  # it came late: the first one knew already, and unlinked it
                    assert spot is not None
                readers[0].settle()
            else:
                sent += stage != next(iter(SENDS))
                follow(doomed, readers, stage)
        seen = judge(doomed, readers, sent)
        assert not (identity and locks_on(identity))
    return doomed.passages, seen


def follow(doomed: Doomed, readers: list[Survivor], stage: str) -> None:
    """Follows the readers around one message, or around the end."""
    stages = [*SENDS, "close"]
    if stage == "enqueue, large":  # nobody dies between stages: what was waited for is there
        for reader in readers:
            reader.settle()
    if stage == "enqueue, second lap":
        for _ in range(2):
            for reader in readers:
                reader.call_take()
    if stage in (stages[0], "close"):
        if stage == "close":
            for _ in range(CHUNKS):
                for reader in readers:
                    reader.call_take()
        for reader in readers:
            reader.begin_take()
        doomed.go()
        doomed.until_at_rest()
        return
    doomed.go()
    if stage == "enqueue, ring full":
        doomed.until_at_rest()
        for reader in readers:
            reader.call_take()


def judge(doomed: Doomed, readers: list[Survivor], sent: int) -> str:
    """Both readers got the same, right number of messages, and then the right error in time."""
    spot = doomed.spot
    if not readers:
        return "nothing is left of it"
    if spot is not None and spot.stage in SENDS:
        sent += is_published(spot.point)
    died = spot is not None and not (spot.stage == "close" and has_closed(spot.point))
    if spot is None or spot.stage in (next(iter(SENDS)), "close"):
        for reader in readers:
            reader.settle()
    ends = [reader.end(doomed.pid) for reader in readers]
    return told(ends, sent, WriterDied if died else Closed, doomed)


def told(ends: list[End], sent: int, kind: type[Exception], doomed: Doomed) -> str:
    """The readers' errors, checked, as text."""
    last = doomed.died
    for count, error, moment in ends:
        assert count == sent, f"{count} messages instead of {sent}, then {error!r}"
        assert isinstance(error, kind), repr(error)
        last = max(last, moment)
    readers = "both readers" if len(ends) == 2 else "the other reader"
    seen = f"{readers}: {sent} messages, then {kind.__name__}"
    if kind is Closed:
        return seen
    assert_in_time(BOUND, doomed.died, last)
    return f"{seen} after {(last - doomed.died) * 1e3:.0f} ms"


def releasing(link: Link, begin: Begin) -> None:
    """Role: a writer that releases a dead reader, opens its place, and continues."""
    queue = MessageQueue(2, 2, None, CHUNK, CHUNKS)
    queue.enqueue(message(0))
    link.tell(queue.export_handle())
    link.hear()
    try:
        queue.wait_until_ready(PATIENCE)
        raise AssertionError("nobody has died")
    except ReaderDied:
        pass
    begin("release_reader")
    queue.release_reader(0)
    begin("readmit")
    queue.readmit(0)
    queue.release_reader(0)  # nobody comes
    begin("enqueue, after a release")
    queue.enqueue(message(1))
    begin("close, after a release")
    queue.close()


def releasing_writer_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """One reader is dead already; the other must not be affected by that."""
    with leaving_nothing():
        doomed = Doomed(hooks, spot, releasing)
        handle: Handle = doomed.peer.hear()
        identity = identity_of(handle)
        start_reader(handle, 0).peer.kill()
        reader = Survivor(handle, 1)
        doomed.go()
        for _ in doomed.stages():
            doomed.go()
        sent = 2
        kind: type[Exception] = Closed
        if spot is not None:
            if spot.stage in ("release_reader", "readmit"):
                sent = 1
            if spot.stage.startswith("enqueue"):
                sent = 1 + is_published(spot.point)
            if not spot.stage.startswith("close") or not has_closed(spot.point):
                kind = WriterDied
        seen = told([reader.end(doomed.pid)], sent, kind, doomed)
        assert not locks_on(identity)
    return doomed.passages, seen


def writing_to_late_readers(link: Link, begin: Begin) -> None:
    """Role: a writer whose readers come when they like."""
    queue = MessageQueue(2, 2, None, CHUNK, CHUNKS, late_readers=True)
    link.tell(queue.export_handle())
    link.hear()
    begin("enqueue, to nobody")
    queue.enqueue(message(7))
    begin("enqueue, to late readers")
    queue.enqueue(message(0))
    begin("close, after late readers")
    queue.close()


def writer_of_late_readers_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """Both readers wait for their first message."""
    with leaving_nothing():
        doomed = Doomed(hooks, spot, writing_to_late_readers)
        handle: Handle = doomed.peer.hear()
        doomed.go()
        readers: list[Survivor] = []
        for stage, _ in doomed.stages():
            if stage == "enqueue, to late readers":
                readers = [Survivor(handle, rank) for rank in range(2)]
                for reader in readers:
                    reader.begin_take()
            doomed.go()
        if not readers:
            return doomed.passages, "nothing is left of it"
        for reader in readers:
            reader.settle()
        sent = 1
        kind: type[Exception] = WriterDied
        if spot is not None and spot.stage == "enqueue, to late readers":
            sent = int(is_published(spot.point))
        elif spot is None or has_closed(spot.point):
            kind = Closed
        seen = told([reader.end(doomed.pid) for reader in readers], sent, kind, doomed)
    return doomed.passages, seen


def plain(number: int) -> list[Any]:
    """The message with that number, as objects that are not pickled."""
    return [number, "small", message(number)[2].tolist()]


LARGE, ASLEEP = "burst, larger than the ring", "burst, readers asleep"
BURSTS = {LARGE: (0, CHUNKS + 2), ASLEEP: (CHUNKS + 2, 2 * CHUNKS + 2)}  # the first, and the end
ALL = BURSTS[ASLEEP][1]


def bursting(link: Link, begin: Begin) -> None:
    """Role: a writer that sends many messages by one call."""
    queue = MessageQueue(2, 2, None, CHUNK, CHUNKS)
    link.tell(queue.export_handle())
    link.hear()
    queue.wait_until_ready(PATIENCE)
    for stage, (first, end) in BURSTS.items():
        begin(stage)
        queue.enqueue_many([plain(number) for number in range(first, end)], PATIENCE)
    begin("close, after bursts")
    queue.close()


def writer_of_bursts_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """Both readers get the same first messages, all that were published."""
    with leaving_nothing():
        doomed = Doomed(hooks, spot, bursting)
        handle: Handle = doomed.peer.hear()
        readers = [Survivor(handle, rank) for rank in range(2)]
        doomed.go()
        for stage, _ in doomed.stages():
            if stage == ASLEEP:
                for reader in readers:
                    reader.until_all_is_read()
            doomed.go()
            if stage in BURSTS:
                doomed.until_at_rest()
            for reader in readers:
                reader.begin_reading()
        ends = [reader.end(doomed.pid) for reader in readers]
        sent = ends[0][0]
        least, most = (ALL, ALL) if spot is None else BURSTS.get(spot.stage, (ALL, ALL))
        kind: type[Exception] = Closed
        if spot is not None and spot.stage == ASLEEP:  # whose writer never waits
            if spot.point in ("retract.store", "fill", "publish.store"):
                least = most = BURSTS[ASLEEP][0] + spot.passage - 1
            elif is_published(spot.point):
                least = most
        if spot is not None and not (spot.stage.startswith("close") and has_closed(spot.point)):
            kind = WriterDied
        assert least <= sent <= most, f"{sent} messages instead of {least} to {most}"
        seen = told(ends, sent, kind, doomed)
    return doomed.passages, seen
