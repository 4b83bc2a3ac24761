"""Any sequence of calls against a simple model: a list with one position per reader."""

from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlane import Cancelled, Closed, CorruptMessage, MessageQueue, TimedOut
from tests.support.queues import flags, queue_of, ring_in

pytestmark = pytest.mark.property

PAYLOADS = (
    st.none()
    | st.integers()
    | st.text(max_size=20)
    | st.binary(max_size=60)
    | st.lists(st.integers(0, 255), max_size=10)
)
READER = st.integers(0, 2)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("enqueue"), PAYLOADS),
        st.tuples(st.just("enqueue"), PAYLOADS),
        st.tuples(st.just("enqueue many"), st.lists(PAYLOADS, max_size=7)),
        st.tuples(st.just("enqueue large"), PAYLOADS),
        st.tuples(st.just("dequeue"), READER),
        st.tuples(st.just("dequeue"), READER),
        st.tuples(st.just("dequeue"), READER),
        st.tuples(st.just("dequeue many"), READER),
        st.tuples(st.just("write by hand"), st.binary(max_size=30)),
        st.tuples(st.just("read by hand"), READER),
        st.tuples(st.just("give up a write"), st.binary(max_size=30)),
        st.tuples(st.just("unpicklable"), st.just(None)),
        st.tuples(st.just("close a reader"), READER),
    ),
    max_size=60,
)


class GaveUp(Exception):
    pass


@dataclass(frozen=True)
class Raw:
    """A chunk filled by hand."""

    data: bytes


@dataclass
class Model:
    """The messages that the queue should hold."""

    n_readers: int
    chunks: int
    sent: list[object] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.positions = dict.fromkeys(range(self.n_readers), 0)

    def full(self) -> bool:
        """Returns whether some reader has not read the next chunk yet."""
        oldest = min(self.positions.values(), default=len(self.sent))
        return len(self.sent) - oldest >= self.chunks

    def flags(self, chunk: int, reader: int) -> tuple[int, int] | None:
        """``written`` and a reader's flag of a chunk, where the documentation fixes them."""
        turns = [turn for turn in range(len(self.sent)) if turn % self.chunks == chunk]
        if not turns:
            return 0, 0
        return 1, int(self.positions[reader] > turns[-1])


class Run:
    """Applies every step to queue and model."""

    def __init__(self, model: Model, writer: MessageQueue, readers: list[MessageQueue]) -> None:
        self.model, self.writer, self.readers = model, writer, readers

    def step(self, name: str, value: object) -> None:
        if isinstance(value, int) and name in (
            "dequeue",
            "dequeue many",
            "read by hand",
            "close a reader",
        ):
            value %= len(self.readers)
        getattr(self, name.replace(" ", "_"))(value)

    def enqueue(self, value: object) -> None:
        if self.model.full():
            with pytest.raises(TimedOut):
                self.writer.enqueue(value, timeout=0)
        else:
            self.writer.enqueue(value, timeout=0)
            self.model.sent.append(value)

    def enqueue_many(self, values: list[object]) -> None:
        sent = len(values)
        try:
            self.writer.enqueue_many(values, timeout=0)
        except TimedOut as error:
            sent = error.sent
        for value in values[:sent]:
            assert not self.model.full()
            self.model.sent.append(value)
        assert sent == len(values) or self.model.full()

    def write_by_hand(self, data: bytes) -> None:
        if self.model.full():
            with pytest.raises(TimedOut), self.writer.acquire_write(timeout=0):
                pass
        else:
            with self.writer.acquire_write(timeout=0) as chunk:
                chunk[: len(data)] = data
            self.model.sent.append(Raw(data))

    def give_up_a_write(self, data: bytes) -> None:
        if not self.model.full():
            with suppress(GaveUp), self.writer.acquire_write(timeout=0) as chunk:
                chunk[: len(data)] = data
                raise GaveUp
            self.gave_up = len(self.model.sent) % self.model.chunks

    def enqueue_large(self, value: object) -> None:
        """It does not fit a chunk, and is stored in an extent, in the same order."""
        message = (value, bytes(100_000))
        if self.model.full():
            with pytest.raises(TimedOut):
                self.writer.enqueue(message, timeout=0)
        else:
            self.writer.enqueue(message, timeout=0)
            self.model.sent.append(message)

    def unpicklable(self, _: object) -> None:
        with pytest.raises(Exception, match=r"(?i)pickle|lambda|local|timed|block|full"):
            self.writer.enqueue(lambda: 0, timeout=0)

    def _next(self, reader: int) -> object:
        """Returns what the reader reads next; None if nothing is there, or no longer."""
        position = self.model.positions.get(reader)
        if position is None or position == len(self.model.sent):
            return None
        self.model.positions[reader] += 1
        return (self.model.sent[position],)

    def dequeue(self, reader: int) -> None:
        end = self.readers[reader]
        expected = self._next(reader)
        match expected:
            case None:
                wanted = TimedOut if reader in self.model.positions else Closed
                with pytest.raises(wanted):
                    end.dequeue(timeout=0)
            case (Raw(),):
                with pytest.raises(CorruptMessage):
                    end.dequeue(timeout=0)
            case (value,):
                assert end.dequeue(timeout=0) == value

    def dequeue_many(self, reader: int) -> None:
        end, most = self.readers[reader], 1 + len(self.model.sent) % 4
        if not isinstance(first := self._peek(reader), tuple) or isinstance(first[0], Raw):
            self._next(reader)
            with pytest.raises((TimedOut, Closed, CorruptMessage)):
                end.dequeue_many(most, timeout=0)
            return
        batch = end.dequeue_many(most, timeout=0)
        assert 1 <= len(batch) <= most
        assert [(value,) for value in batch] == [self._next(reader) for _ in batch]
        ends = self._peek(reader)
        is_long = ends is not None and isinstance(ends[0], Raw | tuple)
        is_alone = isinstance(batch[0], tuple)
        assert len(batch) == most or ends is None or is_long or is_alone

    def _peek(self, reader: int) -> tuple[object] | None:
        position = self.model.positions.get(reader)
        if position is None or position == len(self.model.sent):
            return None
        return (self.model.sent[position],)

    def read_by_hand(self, reader: int) -> None:
        end = self.readers[reader]
        match self._next(reader):
            case None:
                with pytest.raises((TimedOut, Closed)), end.acquire_read(timeout=0):
                    pass
            case (Raw(data=data),):
                with end.acquire_read(timeout=0) as chunk:
                    assert bytes(chunk[: len(data)]) == data
            case _:
                with end.acquire_read(timeout=0) as chunk:  # memlane's own bytes, or elsewhere
                    assert len(chunk) > 0

    def close_a_reader(self, reader: int) -> None:
        self.readers[reader].close()
        self.model.positions.pop(reader, None)

    gave_up: int | None = None

    def check(self) -> None:
        """The documented flags and positions match the model."""
        model = self.model
        if self.gave_up is not None and self.gave_up != len(model.sent) % model.chunks:
            self.gave_up = None
        assert self.writer.current_idx == len(model.sent) % model.chunks
        for reader, position in model.positions.items():
            assert self.readers[reader].current_idx == position % model.chunks
            for chunk in range(model.chunks):
                if chunk != self.gave_up:  # such a chunk is free: written or not
                    found = flags(ring_in(self.writer), chunk)
                    assert (found[0], found[1 + reader]) == model.flags(chunk, reader)


@settings(max_examples=300)
@given(
    n_readers=st.integers(1, 3),
    chunks=st.integers(1, 5),
    chunk_bytes=st.sampled_from([256, 257, 300, 512]),
    steps=STEPS,
)
def test_queue_is_a_list(
    n_readers: int, chunks: int, chunk_bytes: int, steps: list[tuple[str, object]]
) -> None:
    """Every reader gets exactly what was sent, in order, and the flags are as documented."""
    with queue_of(n_readers, max_chunk_bytes=chunk_bytes, max_chunks=chunks) as (writer, readers):
        run = Run(Model(n_readers, chunks), writer, readers)
        for name, value in steps:
            run.step(name, value)
            run.check()


@settings(max_examples=100)
@given(
    chunks=st.integers(1, 4),
    messages=st.lists(PAYLOADS, max_size=12),
    read=st.lists(st.integers(0, 12), min_size=1, max_size=3),
)
def test_a_closed_queue_is_read_to_its_end(
    chunks: int, messages: list[object], read: list[int]
) -> None:
    """After the writer's close every reader gets the remaining messages, then the end."""
    with queue_of(len(read), max_chunks=chunks) as (writer, readers):
        sent = []
        for message in messages:
            try:
                writer.enqueue(message, timeout=0)
            except TimedOut:
                break
            sent.append(message)
        received = [
            [reader.dequeue(timeout=0) for _ in sent[:count]]
            for reader, count in zip(readers, read, strict=True)
        ]
        writer.close()
        assert [first + list(reader) for first, reader in zip(received, readers, strict=True)] == [
            sent
        ] * len(readers)


@settings(max_examples=50)
@given(steps=STEPS)
def test_cancel_and_timeout_never_consume(steps: list[tuple[str, object]]) -> None:
    """A set event and an expired timeout change nothing that is visible to others."""
    from tests.support.queues import set_event

    cancelled = set_event()
    with queue_of(3, max_chunk_bytes=256, max_chunks=3) as (writer, readers):
        run = Run(Model(3, 3), writer, readers)
        for name, value in steps:
            run.step(name, value)
            for reader, position in run.model.positions.items():
                if position == len(run.model.sent):
                    with pytest.raises(Cancelled):
                        readers[reader].dequeue(timeout=0, cancel=cancelled)
                    with pytest.raises(TimedOut):
                        readers[reader].dequeue(timeout=-1)
            run.check()
