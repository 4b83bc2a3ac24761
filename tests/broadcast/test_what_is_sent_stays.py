"""Sending changes nothing on the sender's side, and keeps nothing alive."""

import gc
import pickle
import sys
import weakref
from pickle import PickleBuffer

import numpy as np
import pytest

from tests.support.queues import queue_of

pytestmark = [pytest.mark.wheel, pytest.mark.unit]


class Array(np.ndarray):
    """An array of a type that supports weak references."""


@pytest.mark.parametrize("size", [100, 50_000])
def test_a_pickle_buffer_of_the_caller_stays_read_only(size: int) -> None:
    """It stays as read-only as it is, and arrives so at any size."""

    class Blob:
        def __init__(self, data: object) -> None:
            self.data = data

    buffer = PickleBuffer(bytes(size))
    with queue_of(max_chunk_bytes=4096) as (writer, (reader,)):
        writer.enqueue({"buffer": buffer})
        got = reader.dequeue()["buffer"]
        assert bytes(got) == bytes(size)
        assert memoryview(got).readonly
    assert type(pickle.loads(pickle.dumps(buffer, protocol=5))) is bytes


def test_nothing_is_kept_alive() -> None:
    """Neither by the pickler's memo nor by the buffers, even if the send fails."""
    with queue_of(max_chunk_bytes=4096, max_chunks=1) as (writer, (reader,)):
        for fails in (False, True):
            array = np.zeros(100_000).view(Array)
            alive = weakref.ref(array)
            if fails:
                with pytest.raises(TimeoutError):
                    writer.enqueue([array], timeout=0)
            else:
                writer.enqueue([array])
            del array
            gc.collect()
            assert alive() is None
        reader.dequeue()


def test_messages_are_sent_though_torch_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sys.modules["torch"] = None` forbids the import; messages are still sent."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with queue_of() as (writer, (reader,)):
        writer.enqueue(1)
        assert reader.dequeue() == 1


def test_decoding_keeps_the_gil_beside_a_busy_thread() -> None:
    """Decoding a large stream does not hand the GIL over at every few bytes."""
    import threading
    import time

    message = [b"x" * 66_000 for _ in range(100)]
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    with queue_of(max_chunk_bytes=16 << 20) as (writer, (reader,)):
        thread = threading.Thread(target=compute)
        thread.start()
        try:
            writer.enqueue(message)
            began = time.perf_counter()
            assert reader.dequeue() == message
            took = time.perf_counter() - began
            began = time.perf_counter()
            for _ in message:
                time.sleep(0)  # hands the GIL over, and waits for its turn, once per object
            per_object = time.perf_counter() - began
        finally:
            stop.set()
            thread.join()
        assert took < 4 * max(per_object, 0.05)
