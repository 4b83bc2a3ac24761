"""A writer's place in a gather that another process takes."""

import asyncio
import select
import threading
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlane import (
    Closed,
    ConcurrentUse,
    Gather,
    GatherHandle,
    InvalidArgument,
    SegmentMissing,
    TimedOut,
    WriterClosed,
    WriterDied,
    WrongRole,
    first_ready,
    inspect,
)
from memlane.broadcast import gather as module
from tests.support import PATIENCE, Aside, Remote, start, until
from tests.support.gathers import gather_of, writing
from tests.support.queues import queue_of, refuses, segments


def attached(handle: GatherHandle) -> Gather:
    return Gather.create_from_handle(handle, handle.rank)


@pytest.mark.parametrize("sleeps", [True, False], ids=["one sleep", "a descriptor each"])
def test_a_dead_writer_is_replaced(sleeps: bool, monkeypatch: Any) -> None:
    """The dead writer's messages come first, then the new one's; the other notices nothing."""
    if not sleeps:
        monkeypatch.setattr(module._Reader, "SLEEPS", False)
    with Gather(2, 4096, 4) as reader:
        doomed, other = (Remote(start(writing, reader.export_handle(rank))) for rank in range(2))
        reader.wait_until_ready(PATIENCE)
        doomed.call("enqueue", "last words")
        doomed.peer.kill()
        with refuses(InvalidArgument, match="writer 0 is dead: only the place of one that has"):
            reader.readmit(0)
        assert reader.dequeue(PATIENCE) == "last words"
        with refuses(WriterDied):
            reader.dequeue(PATIENCE)
        with refuses(InvalidArgument, match="released by release_writer"):
            reader.readmit(0)
        reader.release_writer(0)
        new = Remote(start(writing, reader.readmit(0)))
        reader.wait_until_ready(PATIENCE, processes=[new])
        assert not segments()
        for rank, writer in enumerate((new, other)):
            waiting = Aside(reader.dequeue, PATIENCE).until_blocked()
            writer.call("enqueue", rank)
            assert waiting.result() == rank
        new.peer.kill()
        with refuses(WriterDied) as caught:
            reader.dequeue(PATIENCE)
        assert (caught.value.rank, caught.value.pid) == (0, new.pid)


def test_a_closed_writer_is_replaced() -> None:
    """Once everything that it has sent was read; whether the reader has noticed its end or not."""
    with gather_of(2, ready=False) as (reader, writers):
        writers[1].enqueue("one")
        writers[1].close()
        with refuses(InvalidArgument, match="closed, with messages that were not read"):
            reader.readmit(1)
        assert reader.dequeue(0) == "one"
        with attached(reader.readmit(1)) as new:
            new.enqueue("two")
            assert reader.dequeue(0) == "two"
        with refuses(TimedOut):
            reader.dequeue(0)
        with attached(reader.readmit(1)) as new:
            new.enqueue("three")
            writers[0].close()
            assert reader.dequeue(0) == "three"
        with refuses(WriterClosed):
            reader.dequeue(0)
        with attached(reader.readmit(0)) as new:  # a gather of nobody goes on
            new.enqueue("four")
            assert reader.dequeue(0) == "four"
        assert [row.state for row in reader.statistics().writers] == ["closed", "closed"]
        assert reader.statistics().messages == 4


def test_handles_from_before_are_refused() -> None:
    """Also of one that was given up, never came, and comes now."""
    with Gather(1, 4096, 4) as reader:
        handles = [reader.export_handle(0)]
        for _ in range(2):
            with refuses(InvalidArgument, match="writer 0 is absent: only the place"):
                reader.readmit(0)
            reader.release_writer(0)
            with refuses(InvalidArgument, match=r"until readmit\(0\) returns a new handle"):
                reader.export_handle(0)
            handles.append(reader.readmit(0))
        assert len({handle.queue_id for handle in handles}) == 3
        for old in handles[:-1]:
            with refuses(SegmentMissing, match=r"writer 0 cannot attach: .* by readmit\(\)"):
                attached(old)
        assert reader.export_handle(0) == handles[-1]
        with attached(handles[-1]) as new:
            new.enqueue("the right one")
            assert reader.dequeue(0) == "the right one"


def test_a_late_message_is_not_the_next_writers() -> None:
    """A process that has lost its place while it attached sends to nobody."""
    with Gather(1, 4096, 4) as reader:
        old = attached(reader.export_handle(0))
        reader._reader._leave(0)  # type: ignore[union-attr]
        with attached(reader.readmit(0)) as new:
            for number in range(3):
                old.enqueue(("old", number), 0)
                new.enqueue(("new", number), 0)
                assert reader.dequeue(0) == ("new", number)
            with refuses(TimedOut):
                reader.dequeue(0)
        old.close()


def test_refused() -> None:
    with gather_of(2, ready=False) as (reader, writers):
        with refuses(InvalidArgument, match="writer 1 is running: only the place"):
            reader.readmit(1)
        with refuses(InvalidArgument, match="no writer 2"):
            reader.readmit(2)
        with refuses(WrongRole):
            writers[0].readmit(1)
        writers[1].enqueue("here")
        assert reader.dequeue(0) == "here"
        writers[1].close()
        waiting = Aside(reader.dequeue).until_blocked()
        with refuses(ConcurrentUse):
            reader.readmit(1)
        writers[0].enqueue("still here")
        assert waiting.result() == "still here"
        attached(reader.readmit(1)).close()
    with refuses(Closed):
        reader.readmit(1)
    assert not segments()


def test_a_watched_descriptor_shows_the_new_writers_messages() -> None:
    """The descriptor shows the new writer's messages, also after the last one had left."""
    with gather_of(2, ready=False) as (reader, writers):
        poller = select.poll()
        poller.register(reader.fileno(), select.POLLIN)
        for writer in writers:
            writer.close()
        with refuses(WriterClosed):
            reader.dequeue(0)
        assert poller.poll(0)
        new = attached(reader.readmit(1))
        until(lambda: not poller.poll(0))
        waiting = Aside(first_ready, [reader], PATIENCE).until_blocked()
        new.enqueue("shown")
        assert waiting.result() is reader
        assert reader.dequeue(0) == "shown"

        async def awaited() -> Any:
            waiting = asyncio.ensure_future(reader.adequeue(PATIENCE))
            await asyncio.sleep(0)
            again = attached(reader.readmit(0))
            again.enqueue("awaited")
            got = await waiting
            again.close()
            return got

        assert asyncio.run(awaited()) == "awaited"
        new.close()
        with refuses(WriterClosed):
            reader.dequeue(0)
        assert poller.poll(0)


def test_what_observers_see() -> None:
    """The new ring has the name of the place, and answers the same requests."""
    with queue_of(1) as (work, _), gather_of(2, name="replies") as (reader, writers):
        reader.answers(work)
        writers[1].close()
        with attached(reader.readmit(1)):
            rings = {one.label: one.answers_to for one in inspect.segments() if one.label}
            assert rings == {f"replies[{rank}]": work.handle.queue_id for rank in range(2)}


def test_a_close_meanwhile_ends_the_new_ring(monkeypatch: Any) -> None:
    """By another thread: the new ring goes, too."""
    with gather_of(1) as (reader, (writer,)):
        writer.close()
        new_ring = module._Reader._new_ring

        def closing(self: Any, rank: int, *former: Any) -> Any:
            made = new_ring(self, rank, *former)
            thread = threading.Thread(target=reader.close)
            thread.start()
            thread.join()
            return made

        monkeypatch.setattr(module._Reader, "_new_ring", closing)
        with refuses(Closed):
            reader.readmit(0)
        assert not segments()


# Any sequence of calls, against a model -----------------------------------------------------------

RANKS = 2
CALLS = st.sampled_from(
    ["attach", "attach", "attach late", "send", "send", "send", "close", "die", "dequeue",
     "dequeue", "dequeue", "release", "readmit", "readmit"]
)  # fmt: skip


class Model:
    """The table of `gather.py`, and what each writer has sent that was not read."""

    def __init__(self, reader: Gather) -> None:
        self.reader = reader
        self.states = ["absent"] * RANKS
        self.unread: list[deque[int]] = [deque() for _ in range(RANKS)]
        self.writers: list[Gather | None] = [None] * RANKS
        self.handles = [[reader.export_handle(rank)] for rank in range(RANKS)]
        self.raised: int | None = None
        self.sent = 0

    def step(self, call: str, rank: int) -> None:
        getattr(self, call.replace(" ", "_"))(rank)

    def attach(self, rank: int) -> None:
        if self.states[rank] == "absent":
            self.writers[rank] = attached(self.handles[rank][-1])
            self.states[rank] = "taken"
        else:
            with pytest.raises(SegmentMissing if self.states[rank] == "left" else Exception):
                attached(self.handles[rank][-1])

    def attach_late(self, rank: int) -> None:
        for old in self.handles[rank][:-1]:
            with pytest.raises(SegmentMissing):
                attached(old)

    def send(self, rank: int) -> None:
        if self.states[rank] == "taken" and len(self.unread[rank]) < 3:
            self.sent += 1
            self.writers[rank].enqueue(self.sent, 0)  # type: ignore[union-attr]
            self.unread[rank].append(self.sent)

    def close(self, rank: int) -> None:
        if self.states[rank] == "taken":
            self.writers[rank].close()  # type: ignore[union-attr]
            self.states[rank] = "closed"

    def die(self, rank: int) -> None:
        if self.states[rank] == "taken":
            self.writers[rank] = None  # collected, which is a death to its peers
            self.states[rank] = "dead"

    def dequeue(self, _rank: int) -> None:
        """A death is raised once its messages were read, however many others are there, at some
        time; until its release, by every call."""
        try:
            got = self.reader.dequeue(0)
        except TimedOut:
            assert self.raised is None
            assert not any(self.unread)
            assert "closed" not in self._left()
        except WriterDied as death:
            self._died(death.rank)
        except WriterClosed:
            assert set(self._left()) == {"left"}
        else:
            assert self.raised is None
            rank = next(rank for rank in range(RANKS) if got in self.unread[rank])
            assert self.unread[rank].popleft() == got
            self._left()

    def _died(self, rank: int | None) -> None:
        assert rank is not None
        assert self.states[rank] == "dead"
        assert not self.unread[rank]
        assert self.raised in (None, rank)
        self.raised = rank

    def _left(self) -> list[str]:
        """The states, once the reader may have noticed who had closed."""
        for rank, row in enumerate(self.reader.statistics().writers):
            if self.states[rank] == "closed" and row.state == "closed" and row.pid is None:
                assert not self.unread[rank]
                self.states[rank] = "left"
        return self.states

    def release(self, rank: int) -> None:
        state = self._left()[rank]
        if state in ("left", "absent") or (state == "dead" and not self.unread[rank]):
            self.reader.release_writer(rank)
            self.states[rank] = "left"
            if self.raised == rank:
                self.raised = None
        else:
            with pytest.raises(InvalidArgument):
                self.reader.release_writer(rank)

    def readmit(self, rank: int) -> None:
        state = self._left()[rank]
        if state == "left" or (state == "closed" and not self.unread[rank]):
            self.handles[rank].append(self.reader.readmit(rank))
            self.states[rank] = "absent"
        else:
            with pytest.raises(InvalidArgument):
                self.reader.readmit(rank)
        if self.states[rank] == "left":
            with pytest.raises(InvalidArgument):
                self.reader.export_handle(rank)
        else:
            assert self.reader.export_handle(rank) == self.handles[rank][-1]


@pytest.mark.property
@given(st.lists(st.tuples(CALLS, st.integers(0, RANKS - 1)), max_size=40))
@settings(max_examples=60)
def test_any_sequence_of_calls_loses_nothing(steps: list[tuple[str, int]]) -> None:
    """As the table says: no message is lost, doubled, or another writer's."""
    with Gather(RANKS, 64, 3) as reader:
        model = Model(reader)
        for call, rank in steps:
            model.step(call, rank)
