"""Error classes: each is also the builtin that fits, and survives pickling."""

import copy
import pickle
from collections.abc import Callable

import pytest

import memlane
from memlane import Handle, MessageQueue, ShmRingBuffer
from tests.support.queues import queue_of, ring_of

pytestmark = pytest.mark.unit

CLASSES = {
    "InvalidArgument": ValueError,
    "InvalidType": TypeError,
    "Closed": RuntimeError,
    "WrongRole": RuntimeError,
    "WrongProcess": RuntimeError,
    "ConcurrentUse": RuntimeError,
    "Cancelled": RuntimeError,
    "TimedOut": TimeoutError,
    "ReaderDied": RuntimeError,
    "WriterDied": RuntimeError,
    "CorruptMessage": ValueError,
    "ViewInUse": BufferError,
    "SegmentMissing": FileNotFoundError,
    "SegmentRefused": PermissionError,
    "LayoutMismatch": ValueError,
    "RankTaken": ValueError,
    "ShmExhausted": MemoryError,
    "SystemFault": OSError,
    "AccessDenied": PermissionError,
    "AccessRefused": PermissionError,
    "WriterUnreachable": ConnectionError,
    "OutOfMemory": MemoryError,
    "RankMissing": TimeoutError,
    "GroupFailed": RuntimeError,
}


def timed_out() -> None:
    with queue_of() as (_, (reader,)):
        reader.dequeue(timeout=0)


def full() -> None:
    with queue_of(max_chunks=1) as (writer, _):
        writer.enqueue(0)
        writer.enqueue(1, timeout=0)


def not_ready() -> None:
    with MessageQueue(2, 2) as writer:
        writer.wait_until_ready(0)


def wrong_role() -> None:
    with queue_of() as (writer, _):
        writer.dequeue()


def closed() -> None:
    with queue_of() as (writer, (reader,)):
        writer.close()
        reader.dequeue()


def corrupt() -> None:
    with queue_of() as (writer, (reader,)):
        with writer.acquire_write() as chunk:
            chunk[:4] = b"\xff" * 4
        reader.dequeue()


def taken() -> None:
    with queue_of(ready=False) as (writer, _):
        MessageQueue.create_from_handle(writer.export_handle(), 0)


def mismatch() -> None:
    with ring_of(2) as ring:
        ShmRingBuffer(3, 64, 3, name=ring.shared_memory.name)


def missing() -> None:
    ShmRingBuffer(1, 1, 1, name="memlane-nobody")


def exhausted() -> None:
    ShmRingBuffer(1, 2**40, 1)


PROVOKED: list[Callable[[], object]] = [
    timed_out,
    full,
    not_ready,
    wrong_role,
    closed,
    corrupt,
    taken,
    mismatch,
    missing,
    exhausted,
    lambda: ShmRingBuffer(0, 1, 1),
    lambda: Handle.from_json("{}"),
]


@pytest.mark.parametrize(("name", "builtin"), CLASSES.items())
def test_every_error_is_a_memlane_error_and_a_builtin_one(
    name: str, builtin: type[Exception]
) -> None:
    """Every error can be caught as MemlaneError and as the builtin."""
    kind = getattr(memlane, name)
    assert issubclass(kind, memlane.MemlaneError)
    assert issubclass(kind, builtin)


def test_base_is_an_exception_and_no_more() -> None:
    """Catching MemlaneError does not catch other libraries' errors."""
    assert issubclass(memlane.MemlaneError, Exception)
    assert not issubclass(memlane.MemlaneError, OSError | ValueError | RuntimeError)


@pytest.mark.parametrize("provoke", PROVOKED, ids=lambda provoke: provoke.__name__)
def test_errors_survive_pickling(provoke: Callable[[], object]) -> None:
    """A real error passes through a pipe with its text and its attributes."""
    with pytest.raises(memlane.MemlaneError) as caught:
        provoke()
    error = caught.value
    assert str(error)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
        assert getattr(again, "errno", None) == getattr(error, "errno", None)
    assert str(copy.copy(error)) == str(error)


def test_missing_segment_says_which() -> None:
    """SegmentMissing has the name in an attribute and in its text."""
    with pytest.raises(memlane.SegmentMissing) as caught:
        missing()
    assert caught.value.name == "memlane-nobody"
    assert "memlane-nobody" in str(caught.value)
