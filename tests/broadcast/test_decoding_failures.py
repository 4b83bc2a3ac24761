"""M3: a message that cannot be encoded or decoded is lost, and nothing else is."""

import functools
import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memlane import ConcurrentUse, CorruptMessage, InvalidType, MessageQueue, OutOfMemory
from tests.support import PATIENCE, Alarm
from tests.support.queues import flags, queue_of, refuses, ring_in
from tests.support.remote_queues import remote_queue

pytestmark = pytest.mark.unit


class Bomb:
    """Raises the given error wherever it is unpickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return explode, (self.error,)


def explode(error: BaseException) -> None:
    raise error


class Shy:
    """Raises while it is being pickled, after ``size`` bytes have been written."""

    def __init__(self, error: BaseException, size: int = 0) -> None:
        self.error, self.size = error, size

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (), None, iter(self._parts())

    def _parts(self) -> Any:
        yield bytes(self.size)
        raise self.error


class Rings:
    """Sends this process a signal wherever it is unpickled, if `armed`."""

    armed = False

    def __init__(self, content: object) -> None:
        self.content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return rings, (self.content,)


def rings(content: object) -> object:
    if Rings.armed:
        Rings.armed = False
        signal.raise_signal(signal.SIGUSR1)
    return content


class Handler:
    """Raises as an object, as a method and as a function do."""

    def __call__(self, *_: object) -> None:
        raise Alarm

    def method(self, *_: object) -> None:
        raise Alarm


def restoring(number: int, _frame: object) -> None:
    """Raises after it has restored the default, so that it is not installed any more."""
    signal.signal(number, signal.SIG_DFL)
    raise Alarm


class Wrapper(Handler):
    func = None  # as a partial has, but for something else


HANDLERS: dict[str, Callable[..., Any]] = {
    "object": Handler(),
    "restoring": restoring,
    "wrapper": Wrapper(),
    "method": Handler().method,
    "partial": functools.partial(Handler.method, Handler()),
}
CONTENTS = {"small": 1, "stream": bytes(1 << 20), "array": np.ones(1 << 17)}


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("is_remote", [False, True], ids=["here", "elsewhere"])
def test_a_handler_s_error_loses_no_message(is_remote: bool, content: str, handler: str) -> None:
    """The next call returns it. Fails without the guard: an ordinary exception that a handler
    raised during decoding counted as the message's, or only that of a handler that has restored
    the former one."""
    former = signal.signal(signal.SIGUSR1, HANDLERS[handler])
    try:
        with remote_queue() if is_remote else queue_of() as (writer, (reader,)):
            writer.enqueue(Rings(CONTENTS[content]))
            writer.enqueue("next")
            Rings.armed = True
            with pytest.raises(Alarm):
                reader.dequeue(PATIENCE)
            np.testing.assert_array_equal(reader.dequeue(PATIENCE), CONTENTS[content])
            assert reader.dequeue(PATIENCE) == "next"
    finally:
        signal.signal(signal.SIGUSR1, former)


DECODING_ERRORS: list[BaseException] = [ValueError("of the message"), KeyError(1)]
# What the queue raises itself must not be taken for its own when a message raises it.
DECODING_ERRORS += [TimeoutError("not the queue's"), EOFError(), StopIteration(), RecursionError()]
INTERRUPTS = [MemoryError(), KeyboardInterrupt(), SystemExit()]
ERRORS = DECODING_ERRORS + INTERRUPTS


@pytest.mark.parametrize("error", DECODING_ERRORS, ids=lambda error: type(error).__name__)
def test_decoding_raises(error: BaseException) -> None:
    """One dequeue of every reader raises that error; the next message arrives."""
    with queue_of(2, max_chunks=2) as (writer, readers):
        for _ in range(3):
            writer.enqueue(Bomb(error))
            writer.enqueue("next")
            for reader in readers:
                with pytest.raises(type(error)) as caught:
                    reader.dequeue(timeout=0)
                assert caught.value.args == error.args
                assert reader.current_idx == 1
                assert reader.dequeue(timeout=0) == "next"


class Fuse:
    """Raises the given error until it has been unpickled `Fuse.length` times."""

    length = 0

    def __init__(self, error: BaseException, payload: object) -> None:
        self.error, self.payload = error, payload

    def __reduce__(self) -> tuple[Any, ...]:
        return burn, (self.error, self.payload)


def burn(error: BaseException, payload: object) -> object:
    Fuse.length -= 1
    if Fuse.length >= 0:
        raise error
    return payload


def take(reader: MessageQueue, how: str) -> object:
    if how == "dequeue":
        return reader.dequeue(timeout=0)
    with reader.dequeue_view(timeout=0) as view:
        return [part.copy() if isinstance(part, np.ndarray) else part for part in view]


@pytest.mark.parametrize("error", INTERRUPTS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("how", ["dequeue", "dequeue_view"])
@pytest.mark.parametrize("size", [0, 100_000, 2 << 20])
@pytest.mark.parametrize("kind", [bytes, lambda size: np.ones(size, np.uint8)])
def test_decoding_that_is_interrupted(
    error: BaseException, how: str, size: int, kind: Callable[[int], Any]
) -> None:
    """The next call gets the same message, and then the chunk is free."""
    with queue_of(max_chunks=2) as (writer, (reader,)):
        for number in range(3):
            writer.enqueue([Fuse(error, number), kind(size)])
            writer.enqueue("next")
            Fuse.length = 2
            for way in ("dequeue", how):
                wanted = OutOfMemory if isinstance(error, MemoryError) else type(error)
                with pytest.raises(wanted):
                    take(reader, way)
            got: Any = take(reader, how)
            assert got[0] == number
            assert bytes(got[1]) == bytes(kind(size))
            del got
            assert reader.dequeue(timeout=0) == "next"
            assert [flags(ring_in(writer), chunk) for chunk in range(2)] == [[1, 1], [1, 1]]


def test_a_block_after_an_interrupt() -> None:
    """The message that is due is no chunk any more: `acquire_read` refuses until it is taken."""
    with queue_of() as (writer, (reader,)):
        writer.enqueue(Fuse(KeyboardInterrupt(), "first"))
        writer.enqueue("next")
        Fuse.length = 1
        with pytest.raises(KeyboardInterrupt):
            reader.dequeue()
        with refuses(RuntimeError, match="dequeue it first"), reader.acquire_read():
            pass
        assert [reader.dequeue(timeout=0) for _ in range(2)] == ["first", "next"]


def test_the_chunk_is_released() -> None:
    """The chunk of a message that could not be decoded is free for the writer."""
    with queue_of(1, max_chunks=1) as (writer, (reader,)):
        writer.enqueue(Bomb(ZeroDivisionError()))
        with pytest.raises(ZeroDivisionError):
            reader.dequeue()
        assert flags(ring_in(writer), 0) == [1, 1]
        writer.enqueue("next", timeout=0)
        assert reader.dequeue(timeout=0) == "next"


def test_a_class_that_the_reader_does_not_have() -> None:
    """The usual failure: a class that cannot be imported there."""
    with queue_of() as (writer, (reader,)):
        for missing in (b"cno_such_module\nname\n.", b"cos\nno_such_name\n."):
            writer.enqueue(Raw(missing))
            writer.enqueue("next")
            with pytest.raises((ImportError, AttributeError)):
                reader.dequeue()
            assert reader.dequeue() == "next"


class Raw:
    """Unpickles to the content of the given pickle."""

    def __init__(self, pickled: bytes) -> None:
        self.pickled = pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.pickled,)


@pytest.mark.parametrize("size", [0, 100, 3000, 100_000])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_encoding_raises(error: BaseException, size: int) -> None:
    """enqueue raises that error, sends nothing, and the next message takes its place."""
    with queue_of(2, max_chunks=2) as (writer, readers):
        for number in range(3):
            # A generator turns StopIteration into RuntimeError.
            with pytest.raises((type(error), RuntimeError)):
                writer.enqueue(Shy(error, size))
            assert writer.current_idx == number % 2
            writer.enqueue(number)
            assert [reader.dequeue(timeout=0) for reader in readers] == [number, number]


class Local:
    """Not what pickle finds under its name."""


Hidden, Local = Local, None  # type: ignore[misc, assignment]
NOT_PICKLABLE = {
    "PicklingError": Hidden(),
    "TypeError": threading.Lock(),
    "AttributeError": (lambda: lambda: 0)(),
    "in it": {"a": [1], "b": (number for number in range(3))},
}


@pytest.mark.parametrize("message", NOT_PICKLABLE.values(), ids=NOT_PICKLABLE)
def test_what_cannot_be_pickled(message: Any) -> None:
    """The error says so, is of the type that pickle raised, its cause, and nothing was sent."""
    with queue_of() as (writer, (reader,)):
        with refuses(TypeError, match="the message cannot be pickled and was not sent") as caught:
            writer.enqueue(message)
        with pytest.raises(Exception, match="pickle") as pickles:
            pickle.dumps(message)
        assert isinstance(caught.value, InvalidType)
        assert isinstance(caught.value, pickles.type)
        assert type(caught.value.__cause__) is pickles.type
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        with refuses(TimeoutError):
            reader.dequeue(timeout=0)
        writer.enqueue(1)
        assert reader.dequeue() == 1


class SendsMore:
    """Sends another message while it is being pickled."""

    writer: MessageQueue
    seen: list[BaseException]

    def __getstate__(self) -> dict[str, int]:
        try:
            SendsMore.writer.enqueue("from inside", timeout=0)
        except RuntimeError as error:
            SendsMore.seen.append(error)
        return {"a": 1}


class ReadsMore:
    """Reads another message while it is being unpickled."""

    reader: MessageQueue
    seen: list[BaseException]

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadsMore.read, ()

    @staticmethod
    def read() -> str:
        try:
            ReadsMore.reader.dequeue(timeout=0)
        except RuntimeError as error:
            ReadsMore.seen.append(error)
        return "whole"


def test_an_enqueue_inside_an_enqueue_is_refused() -> None:
    """The inner enqueue is refused, and the outer message is sent."""
    with queue_of() as (writer, (reader,)):
        SendsMore.writer, SendsMore.seen = writer, []
        try:
            writer.enqueue([SendsMore(), "whole"])
            assert [type(error) for error in SendsMore.seen] == [ConcurrentUse]
            assert reader.dequeue(timeout=0)[1] == "whole"
            with refuses(TimeoutError):
                reader.dequeue(timeout=0)
        finally:
            del SendsMore.writer, SendsMore.seen


def test_a_dequeue_inside_a_dequeue_is_refused() -> None:
    """The inner dequeue is refused, and the outer message is read."""
    with queue_of() as (writer, (reader,)):
        ReadsMore.reader, ReadsMore.seen = reader, []
        try:
            writer.enqueue(ReadsMore())
            writer.enqueue("next")
            assert reader.dequeue(timeout=0) == "whole"
            assert [type(error) for error in ReadsMore.seen] == [ConcurrentUse]
            assert reader.dequeue(timeout=0) == "next"
        finally:
            del ReadsMore.reader, ReadsMore.seen


FILLINGS = [b"", b"\0", b"\xff", b"\x80\x05N.", b"\x01\x00\x00\x00\x00\x00\x00\x00", b"MEML"]


@pytest.mark.parametrize("filling", FILLINGS, ids=repr)
def test_a_dequeue_of_a_chunk_filled_by_hand_raises_corrupt_message(filling: bytes) -> None:
    """It is CorruptMessage, a ValueError; the chunk is released and the next one comes."""
    with queue_of(2, max_chunks=1, max_chunk_bytes=64) as (writer, readers):
        for number in range(3):
            with writer.acquire_write(timeout=0) as chunk:
                chunk[:] = (filling * 64 + bytes(64))[:64]
            for reader in readers:
                with refuses(ValueError) as caught:
                    reader.dequeue(timeout=0)
                assert isinstance(caught.value, CorruptMessage)
            writer.enqueue(number, timeout=0)
            assert [reader.dequeue(timeout=0) for reader in readers] == [number] * 2


def test_a_hand_made_copy_of_a_message_is_no_message() -> None:
    """Bytes in memlane's format are not decoded if the chunk was filled by hand."""
    with queue_of(2) as (writer, (one, other)):
        writer.enqueue("genuine")
        with one.acquire_read() as chunk:
            image = bytes(chunk)
        assert other.dequeue() == "genuine"
        for _ in range(5):  # more than a lap, so that every chunk has held a message before
            with writer.acquire_write() as chunk:
                chunk[:] = image
            for reader in (one, other):
                with refuses(CorruptMessage):
                    reader.dequeue(timeout=0)
            writer.enqueue("between")
            assert [one.dequeue(), other.dequeue()] == ["between"] * 2
