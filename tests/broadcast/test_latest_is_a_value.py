"""Any sequence of calls on a queue of the latest, against a model: one value, and what is kept."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlane import MessageQueue, TimedOut, ViewInUse
from tests.support.queues import queue_of

pytestmark = pytest.mark.property

READER = st.integers(0, 2)
SIZES = st.sampled_from([10, 5000, 9000, 40_000, 1 << 20])
"""Bytes of an array: in the stream, in a chunk, in extents, and lent."""
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), SIZES),
        st.tuples(st.just("send"), SIZES),
        st.tuples(st.just("fill a chunk"), st.integers(0, 100)),
        st.tuples(st.just("take"), READER),
        st.tuples(st.just("copy"), READER),
        st.tuples(st.just("view"), READER),
        st.tuples(st.just("view"), READER),
        st.tuples(st.just("read a chunk"), READER),
        st.tuples(st.just("drop the oldest"), READER),
        st.tuples(st.just("drop all but the oldest"), READER),
        st.tuples(st.just("replace"), READER),
    ),
    max_size=60,
)
ON_WRITER = ("send", "fill a chunk")


class Run:
    """Applies every step to the queue and to the model."""

    def __init__(self, writer: MessageQueue, readers: list[MessageQueue]) -> None:
        self.writer, self.readers = writer, readers
        self.sent = 0
        self.is_raw = False  # of the latest message
        self.position = [0] * len(readers)  # of the next message that a reader may get
        self.skipped = [0] * len(readers)
        self.kept: list[list[tuple[int, Any]]] = [[] for _ in readers]

    def step(self, name: str, value: int) -> None:
        if name not in ON_WRITER:
            value %= len(self.readers)
        getattr(self, name.replace(" ", "_"))(value)

    def send(self, size: int) -> None:
        self.writer.enqueue(np.full(size, self.sent % 251, np.uint8), timeout=0)
        self.sent, self.is_raw = self.sent + 1, False

    def fill_a_chunk(self, _: int) -> None:
        with suppress(ViewInUse), self.writer.acquire_write(0) as chunk:
            np.frombuffer(chunk, np.uint8)[:] = self.sent % 251
            self.sent, self.is_raw = self.sent + 1, True

    def _take(self, reader: int) -> int | None:
        """The number of the message that the reader gets."""
        if self.sent == self.position[reader]:
            with pytest.raises(TimedOut):
                self.readers[reader].dequeue(0)
            return None
        self.skipped[reader] += self.sent - 1 - self.position[reader]
        self.position[reader] = self.sent
        return self.sent - 1

    def take(self, reader: int, lend: bool = True) -> None:
        if not self.is_raw and (number := self._take(reader)) is not None:
            self.kept[reader].append((number, self.readers[reader].dequeue(0, lend=lend)))

    def copy(self, reader: int) -> None:
        self.take(reader, lend=False)

    def view(self, reader: int) -> None:
        if not self.is_raw and (number := self._take(reader)) is not None:
            with suppress(ViewInUse), self.readers[reader].dequeue_view(0) as view:
                self.kept[reader].append((number, view[:]))

    def read_a_chunk(self, reader: int) -> None:
        if self.is_raw and (number := self._take(reader)) is not None:
            with suppress(ViewInUse), self.readers[reader].acquire_read(0) as chunk:
                self.kept[reader].append((number, np.frombuffer(chunk, np.uint8)[:]))

    def drop_the_oldest(self, reader: int) -> None:
        del self.kept[reader][:1]

    def drop_all_but_the_oldest(self, reader: int) -> None:
        del self.kept[reader][1:]

    def replace(self, reader: int) -> None:
        """The former message's lent arrays stay; its views may change."""
        self.readers[reader].close()
        self.kept[reader].clear()
        handle = self.writer.readmit(reader)
        self.readers[reader] = MessageQueue.create_from_handle(handle, reader)
        self.position[reader], self.skipped[reader] = self.sent, 0

    def check(self) -> None:
        for kept in self.kept:
            for number, array in kept:
                assert (array == number % 251).all()
        assert [reader.skipped for reader in self.readers] == self.skipped
        rows = self.writer.statistics().readers
        assert [row.skipped for row in rows] == self.skipped
        assert [row.behind for row in rows] == [int(at < self.sent) for at in self.position]
        assert self.writer.statistics().waits == 0


@settings(max_examples=200)
@given(n_readers=st.integers(1, 3), chunks=st.sampled_from([1, 7]), steps=STEPS)
def test_latest_is_a_value(n_readers: int, chunks: int, steps: list[tuple[str, int]]) -> None:
    """A reader gets the latest that it lacks; nothing that is kept changes; no call waits."""
    with queue_of(
        n_readers, mode="latest", max_chunk_bytes=8192, max_chunks=chunks, max_extent_bytes=16 << 20
    ) as (writer, readers):
        run = Run(writer, readers)
        try:
            for name, value in steps:
                run.step(name, value)
                run.check()
        finally:
            for reader in run.readers:
                reader.close()
