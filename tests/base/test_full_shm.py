"""A full /dev/shm raises in the call that needs space, and never causes a SIGBUS later.

Fails without the guard: ftruncate instead of fallocate gives a segment without memory behind it.
"""

import gc
import os
import pickle
import resource
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import pytest

from memlane import (
    Handle,
    MessageQueue,
    ReaderDied,
    ShmExhausted,
    ShmRingBuffer,
    TimedOut,
    ViewInUse,
)
from tests.support import (
    PATIENCE,
    Alarm,
    Aside,
    Link,
    alarm_after,
    assert_in_time,
    private_shm,
    start,
    unshare_refusal,
)
from tests.support.queues import (
    BOUND,
    drain,
    file_of,
    path_of,
    queue_of,
    refuses,
    ring_in,
    segments,
    start_reader,
    start_writer,
    sweep,
)

pytestmark = pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())

MIB = 1 << 20
FILLER = "/dev/shm/filler"


def used() -> int:
    facts = os.statvfs("/dev/shm")
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize


def free() -> int:
    facts = os.statvfs("/dev/shm")
    return facts.f_bavail * facts.f_frsize


@contextmanager
def full(leaving: int = 0) -> Any:
    """Takes all space of this /dev/shm except ``leaving`` bytes."""
    descriptor = os.open(FILLER, os.O_CREAT | os.O_RDWR)
    try:
        os.posix_fallocate(descriptor, 0, free() - leaving)
        yield
    finally:
        os.close(descriptor)
        os.unlink(FILLER)


def exhausted(call: Callable[[], object]) -> ShmExhausted:
    """The ShmExhausted that the call raises, with numbers that make sense."""
    with refuses(MemoryError) as caught:
        call()
    error = caught.value
    assert isinstance(error, ShmExhausted)
    assert 0 <= error.free < error.need
    assert error.hint
    assert str(error.need) in str(error)
    return error


def ring_that_does_not_fit(_link: Link) -> None:
    before = used()
    for _ in range(3):
        error = exhausted(lambda: ShmRingBuffer(1, 100 * MIB, 1))
        assert error.need >= 100 * MIB
        assert error.free <= 64 * MIB
        assert (segments(), used()) == (set(), before)
    with full():
        exhausted(lambda: ShmRingBuffer(1, 4096, 1))
        exhausted(lambda: MessageQueue(1, 1, None, 4096, 1))
        exhausted(lambda: MessageQueue(1, 1))
        assert segments() == set()
    assert used() == before
    ShmRingBuffer(1, 50 * MIB, 1).close()
    assert used() == before


def default_queue(_link: Link) -> None:
    with queue_of(4, max_chunk_bytes=10 * MIB, max_chunks=10) as (writer, readers):
        assert used() < 4 * MIB
        for number in range(100):
            writer.enqueue({"step": number, "tokens": list(range(1000))})
            for reader in readers:
                assert reader.dequeue()["step"] == number
        writer.enqueue(np.ones(9 * MIB, np.uint8))
        assert all(reader.dequeue().all() for reader in readers)
    assert used() == 0


def ring_buffer_alone(_link: Link) -> None:
    """Reserved at creation: every byte can be touched when no other space is left."""
    ring = ShmRingBuffer(1, 4 * MIB, 3)
    other = ShmRingBuffer(*ring.handle())
    with full():
        for chunk in range(3):
            with ring.get_data(chunk) as data:
                data[:] = b"\1" * len(data)
            with other.get_data(chunk) as data:
                assert data[-1] == 1
    other.close()
    ring.close()


def large_messages(_link: Link) -> None:
    """Only some of the chunks of 4 MiB fit in sixteen MiB: the writer waits for its readers."""
    with queue_of(1, max_chunk_bytes=4 * MIB, max_chunks=8) as (writer, (reader,)):
        sent: list[int] = []
        received: list[int] = []
        waits = 0
        for number in range(1, 60):
            try:
                writer.enqueue(bytes([number]) * (3 * MIB), timeout=0)
                sent.append(number)
            except TimedOut:
                waits += 1
                for _ in range(min(1 + number % 4, len(sent) - len(received))):
                    text = reader.dequeue(timeout=0)
                    assert text == text[:1] * (3 * MIB)
                    received.append(text[0])
        received += [bytes(text)[0] for text in drain(reader)]
        assert received == sent
        assert waits > 4
        assert len(sent) > 30


def arrays_that_are_kept(_link: Link) -> None:
    """Nothing is lent unless half of the space stays free; the rest is copied, never refused."""
    with queue_of(1, max_chunk_bytes=64 * 1024, max_chunks=3) as (writer, (reader,)):
        kept = []
        for number in range(12):
            writer.enqueue(np.full(3 * MIB, number, np.uint8), timeout=0)
            kept.append(reader.dequeue(timeout=0))
        assert all((array == number).all() for number, array in enumerate(kept))
        with full():
            for array in kept:
                array[::4096] = 99  # copies of its own, which need no space of the file system
            del kept, array
            writer.enqueue(np.full(3 * MIB, 7, np.uint8), timeout=0)
            assert (reader.dequeue(timeout=0) == 7).all()
    assert used() == 0


def kept_array_and_a_larger_one(_link: Link) -> None:
    """A lent array leaves half of the space for the next message, which is then copied."""
    with queue_of(1, max_chunk_bytes=4096, max_chunks=3) as (writer, (reader,)):
        for size in (24 * MIB, 40 * MIB):
            writer.enqueue(np.ones(size, np.uint8))
            kept = reader.dequeue()
            writer.enqueue(np.full(32 * MIB - 8192, 2, np.uint8), timeout=0)
            assert (reader.dequeue() == 2).all()
            assert (kept == 1).all()
            del kept


def last_two_arrays(_link: Link) -> None:
    """Docker's 64 MiB, the default queue, a reader that keeps its last two arrays of 6 MiB."""
    for queues in (1, 3):
        with ExitStack() as stack:
            ends = [
                stack.enter_context(queue_of(1, max_chunk_bytes=10 * MIB, max_chunks=10))
                for _ in range(queues)
            ]
            kept: list[deque[Any]] = [deque(maxlen=2) for _ in ends]
            for number in range(60):
                for (writer, (reader,)), last in zip(ends, kept, strict=True):
                    writer.enqueue(np.full(6 * MIB, number, np.uint8), timeout=0)
                    last.append(reader.dequeue(timeout=0))
                    assert [array[-1] for array in last] == [number - 1, number][-len(last) :]


def chunks_of_other_sizes(_link: Link) -> None:
    """The space of chunks is given back before another message is refused."""
    with (
        queue_of(1, max_chunk_bytes=10 * MIB, max_chunks=10) as (one, (one_reader,)),
        queue_of(1, max_chunk_bytes=MIB) as (other, (other_reader,)),
    ):
        for _ in range(30):
            one.enqueue(bytes(6 * MIB), timeout=0)
            assert len(one_reader.dequeue(timeout=0)) == 6 * MIB
            other.enqueue(bytes(30 * MIB), timeout=0)
            assert len(other_reader.dequeue(timeout=0)) == 30 * MIB
        other.enqueue("small")  # only a call of the writer gives back what was read
        one.enqueue(bytes(60 * MIB), timeout=0)
        assert len(one_reader.dequeue(timeout=0)) == 60 * MIB


def one_kept_array(_link: Link) -> None:
    """After both ends have ended, in any order, it takes no space of the file system."""
    for order in (0, 1):
        with queue_of(2, max_chunk_bytes=10 * MIB, max_chunks=3) as (writer, readers):
            for number in range(4):
                writer.enqueue(np.full(3 * MIB, number, np.uint8))
                writer.enqueue(bytes(8 * MIB))
                kept, other = (reader.dequeue() for reader in readers)
                for reader in readers:
                    reader.dequeue()
            for end in (writer, *readers) if order else (*readers, writer):
                end.close()
            assert used() < MIB
            assert (kept == 3).all()
            assert (other == 3).all()
            kept[:] = 9
            assert (other == 3).all()


def one_kept_array_of_a_killed_writer(_link: Link) -> None:
    """The reader that is left gives the space back when it ends."""
    writer = start_writer(max_chunk_bytes=MIB)
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        for number in range(4):
            writer.call("enqueue", np.full(4 * MIB, number, np.uint8))
            kept = reader.dequeue()
        writer.peer.kill()
        assert used() > 4 * MIB
    assert used() < MIB
    assert (kept == 3).all()


def views_that_survive_all_ends(_link: Link) -> None:
    """They keep what they show, though another reader's array was lent."""
    with queue_of(2, max_chunk_bytes=MIB) as (writer, (one, other)):
        writer.enqueue(np.full(4 * MIB, 5, np.uint8))
        lent = one.dequeue()
        with refuses(ViewInUse), other.dequeue_view() as view:
            kept = view[1:]
        del view
        with refuses(ViewInUse), writer.acquire_write() as chunk:
            chunk[:] = b"x" * MIB
            by_hand = chunk[5:]
        del chunk
        for end in (writer, one, other):
            end.close()
        assert (kept == 5).all()
        assert (lent == 5).all()
        assert bytes(by_hand) == b"x" * (MIB - 5)
        del kept, by_hand, lent
    gc.collect()
    assert used() == 0


def one_kept_array_of_killed_ends(_link: Link) -> None:
    """The space goes at the next call that creates, attaches or closes an end, in a process that
    keeps an array or a view."""
    for does_view in (False, True):
        for call in range(3):
            with ExitStack() as stack:
                other = stack.enter_context(MessageQueue(2, 2, max_chunk_bytes=64))
                reader = MessageQueue.create_from_handle(other.export_handle(0), 0)
                own = used()
                writer = start_writer(max_chunk_bytes=MIB)
                doomed = MessageQueue.create_from_handle(writer.greeting, 0)
                for number in range(4):
                    writer.call("enqueue", np.full(4 * MIB, number, np.uint8))
                    writer.call("enqueue", bytes(6 * MIB))
                    if does_view:
                        with refuses(ViewInUse), doomed.dequeue_view() as view:
                            kept = view[1:]
                        del view
                    else:
                        kept = doomed.dequeue()
                    doomed.dequeue()
                writer.call("wait_until_ready")
                doomed.close()
                writer.peer.kill()
                assert used() > own + 8 * MIB
                if call == 0:
                    stack.enter_context(MessageQueue(1, 1, max_chunk_bytes=64))
                elif call == 1:
                    late = MessageQueue.create_from_handle(other.export_handle(1), 1)
                    stack.callback(late.close)
                else:
                    reader.close()
                assert used() < own + (5 if does_view else 1) * MIB
                assert (kept == 3).all()
                reader.close()
            del kept
            gc.collect()
            assert used() == 0, (does_view, call, used())


def views_that_spare_no_more_than_they_show(_link: Link) -> None:
    """The space that a view shows stays, in a chunk or an extent; all other space is given back."""
    with queue_of(1, max_chunk_bytes=2 * MIB, max_chunks=4) as (writer, (reader,)):
        views = []
        for kind, size in (("small", MIB // 2), ("large", 4 * MIB)):
            writer.enqueue(bytes(5 * MIB))
            writer.enqueue(np.full(size, len(kind), np.uint8))
            reader.dequeue()
            with refuses(ViewInUse), reader.dequeue_view() as view:
                views.append(view[1:])
            del view
    assert 4.5 * MIB <= used() < 7 * MIB
    assert [bool((view == 5).all()) for view in views] == [True, True]
    views.clear()
    gc.collect()
    assert used() == 0


def kept_view(reader: MessageQueue) -> Any:
    """The next array as a view that outlives its block."""
    kept = []
    with refuses(ViewInUse), reader.dequeue_view() as view:
        kept.append(view[1:])
    return kept[0]


def kept_chunk(reader: MessageQueue) -> Any:
    """The next chunk as a memoryview that outlives its block."""
    kept = []
    with refuses(ViewInUse), reader.acquire_read() as chunk:
        kept.append(chunk[1:])
    return kept[0]


def any_kept_view_of_killed_ends(_link: Link) -> None:
    """The space goes whatever keeps the file: a mapping that the reader has replaced since by a
    larger one, or the ring's own."""
    for keep in (kept_view, kept_chunk):
        writer = start_writer(max_chunk_bytes=64 << 10)
        reader = MessageQueue.create_from_handle(writer.greeting, 0)
        writer.call("enqueue", np.full(50 << 10, 7, np.uint8))
        writer.call("wait_until_ready")
        kept = keep(reader)
        writer.call("enqueue", np.ones(16 * MIB, np.uint8))
        with reader.dequeue_view() as large:
            assert large.all()
        del large
        reader.close()
        writer.peer.kill()
        assert used() > 16 * MIB
        sweep()
        assert used() < MIB
        assert 7 in bytes(kept)
        del kept
        gc.collect()
        assert used() == 0


def kept_chunk_of_a_writer(_link: Link) -> None:
    """A writer that has closed gives the space back at its next call, once its readers are
    killed."""
    writer = MessageQueue(1, 1, max_chunk_bytes=4096)
    doomed = start_reader(writer.export_handle())
    writer.wait_until_ready()
    writer.enqueue(np.ones(16 * MIB, np.uint8))
    with refuses(ViewInUse), writer.acquire_write() as chunk:
        kept = chunk[1:]
    del chunk
    writer.close()
    doomed.peer.kill()
    assert used() > 16 * MIB
    sweep()
    assert used() < MIB
    del kept
    gc.collect()
    assert used() == 0


def view_in_a_block(link: Link, handle: Handle) -> None:
    """Role: reads by a view until it is killed."""
    with MessageQueue.create_from_handle(handle, 0) as reader, reader.dequeue_view() as view:
        link.tell(view.all())
        link.hear()


def views_of_a_killed_reader(_link: Link) -> None:
    """The space that it showed is given back with everything else: nobody sees it any more."""
    with MessageQueue(2, 2, max_chunk_bytes=4096) as writer:
        viewing = start(view_in_a_block, writer.export_handle(0))
        with MessageQueue.create_from_handle(writer.export_handle(1), 1) as reader:
            writer.enqueue(np.ones(16 * MIB, np.uint8))
            writer.enqueue(np.ones(4 * MIB, np.uint8))
            reader.dequeue()
            kept = reader.dequeue()
            assert viewing.hear()
            viewing.kill()
    assert used() < MIB
    assert kept.all()


def lent_array(link: Link, handle: Handle, rank: int) -> None:
    """Role: keeps an array after its queue is closed; then tries to create a segment."""
    with MessageQueue.create_from_handle(handle, rank) as reader:
        kept = reader.dequeue()
    link.tell()
    link.hear()
    with suppress(ShmExhausted):
        sweep()
    assert kept.all()
    link.tell()
    link.hear()


def space_that_another_process_gave_back(_link: Link) -> None:
    """The second of two processes with an array of killed ends finds that nothing is left to do,
    and touches nothing: the file system may be full by then."""
    writer = start_writer(2, max_chunk_bytes=4096)
    keeping = [start(lent_array, writer.greeting, rank) for rank in range(2)]
    writer.call("enqueue", np.ones(4 * MIB, np.uint8))
    writer.call("wait_until_ready")
    for peer in keeping:
        peer.hear()
    writer.peer.kill()
    for number, peer in enumerate(keeping):
        with full() if number else nullcontext():
            peer.tell()
            peer.hear()
        assert used() < MIB
    for peer in keeping:
        peer.tell()
        peer.result()


def never_claimed_slot(_link: Link) -> None:
    """A process that knows only the ring may be reading in that place, but sees nothing else."""
    with MessageQueue(2, 2, max_chunk_bytes=MIB, max_chunks=2) as writer:
        descriptor = os.open(path_of(writer), os.O_RDONLY)
        reader = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        writer.enqueue(np.full(8 * MIB, 7, np.uint8))
        kept = reader.dequeue()
        writer.enqueue(b"needle")
        reader.close()
        assert used() > 8 * MIB
    assert used() < 3 * MIB
    assert os.pread(descriptor, 6, MIB) == b"needle"
    assert (kept == 7).all()
    os.close(descriptor)


def foreign_reader_that_goes_on(_link: Link) -> None:
    """A process that only maps the ring, in place of a reader, sees the messages to the end."""
    writer = MessageQueue(1, 1)
    descriptor = os.open(path_of(writer), os.O_RDONLY)
    writer.enqueue(b"needle")
    writer.close()
    assert os.pread(descriptor, 6, 0) == b"needle"
    os.close(descriptor)


def whole_chunk_whose_space_was_given_back(_link: Link) -> None:
    """A reader that saw all of a chunk reserved does not rely on it after it was given back."""
    with queue_of(1, max_chunk_bytes=10 * MIB, max_chunks=3) as (writer, (reader,)):
        for _ in range(2):
            for _ in range(3):
                writer.enqueue("small")
                with reader.acquire_read() as chunk:
                    assert chunk[-1] == 0  # reserves the whole chunk in this reader
            writer.enqueue(bytes(9 * MIB))
            reader.dequeue()
            writer.enqueue(bytes(45 * MIB), timeout=0)  # takes the space of the chunks
            reader.dequeue()
            writer.enqueue("small")
            with full():
                exhausted(lambda: reader.acquire_read().__enter__())
            assert reader.dequeue() == "small"


def watching(link: Link, handle: Handle, rank: int) -> None:
    """Role: a camera's reader that keeps one frame by its loop's name; rank 1 is slower."""
    with MessageQueue.create_from_handle(handle, rank) as reader:
        link.tell()
        for number, frame in enumerate(reader):
            if rank:
                time.sleep(0.005)  # the work, not a wait
            assert frame[0] == frame[-1] == number % 200
        link.tell(number)


def camera(_link: Link) -> None:
    """Two readers, one slower, nothing kept but the loop's own name: the writer waits."""
    for size in (6 * MIB, 8 * MIB):
        with MessageQueue(2, 2) as writer:
            readers = [start(watching, writer.export_handle(rank), rank) for rank in range(2)]
            for reader in readers:
                reader.hear()
            for number in range(60):
                writer.enqueue(np.full(size, number % 200, np.uint8), timeout=PATIENCE)
        assert [reader.hear() for reader in readers] == [59, 59]
        for reader in readers:
            reader.result()


def limit_of_file_sizes(_link: Link) -> None:
    """`ulimit -f` forbids extents, and nothing that fits its chunk."""
    with queue_of(1, max_chunk_bytes=4 * MIB, max_chunks=3) as (writer, (reader,)):
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_of(writer).st_size + MIB, hard))
        for number in range(6):
            writer.enqueue(np.full(3 * MIB, number, np.uint8), timeout=0)
            assert (reader.dequeue(timeout=0) == number).all()
            with refuses(ShmExhausted, match="ulimit -f"):
                writer.enqueue(np.full(5 * MIB, number, np.uint8), timeout=0)


def refusal_names_who_keeps_what(_link: Link) -> None:
    """With messages left to read the writer waits; with none, it says who keeps the space."""
    with queue_of(2, max_chunk_bytes=MIB) as (writer, (one, other)), full(leaving=75 * MIB):
        for _ in range(2):
            writer.enqueue(np.ones(10 * MIB, np.uint8))
            other.dequeue(lend=False)
        lent = [one.dequeue(), one.dequeue()]
        writer.enqueue(np.ones(9 * MIB, np.uint8))
        with refuses(ViewInUse), other.dequeue_view() as view:
            kept = view[1:]
        del view
        with refuses(TimeoutError, match=r"reader 0 \(pid"):
            writer.enqueue(np.ones(57 * MIB, np.uint8), timeout=0.05)
        one.dequeue(lend=False)
        error = exhausted(lambda: writer.enqueue(np.ones(57 * MIB, np.uint8)))
        pid = os.getpid()
        assert [(holder.rank, holder.pid) for holder in error.holders] == [(0, pid), (1, pid)]
        assert [holder.lent_messages for holder in error.holders] == [2, 0]
        assert 20 * MIB <= error.holders[0].lent_bytes < 21 * MIB
        assert [holder.viewed_messages for holder in error.holders] == [0, 1]
        assert 9 * MIB <= error.holders[1].viewed_bytes < 10 * MIB
        assert error.others is not None
        assert 0 <= error.others - os.stat(FILLER).st_size < MIB
        assert f"reader 0 (pid {pid}) keeps 2 lent messages of 20" in str(error)
        assert f"reader 1 (pid {pid}) keeps views of 1 message of 9" in str(error)
        assert f"other files use {error.others} bytes" in str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        assert all(array.all() for array in (*lent, kept))


def chunks_by_hand(_link: Link) -> None:
    """A whole chunk is reserved before it is handed out; without space nothing is handed out."""
    with queue_of(1, max_chunk_bytes=MIB, max_chunks=4) as (writer, (reader,)):
        with full():
            exhausted(lambda: writer.acquire_write(timeout=0).__enter__())
            assert writer.current_idx == 0
            writer.enqueue("small still goes")
            assert reader.dequeue() == "small still goes"
        with writer.acquire_write() as chunk:
            chunk[:] = b"\1" * MIB
        with reader.acquire_read() as chunk:
            assert bytes(chunk) == b"\1" * MIB


def space_kept_for_large_messages(_link: Link) -> None:
    """Space kept warm for large messages is available to small ones, and to larger ones."""
    with queue_of(1, max_chunk_bytes=10 * MIB, max_chunks=10) as (writer, (reader,)):
        for size in (58 * MIB, 9 * MIB, 11 * MIB, 50 * MIB, 52 * MIB, 8 * MIB):
            writer.enqueue(bytes(size), timeout=0)
            assert len(reader.dequeue(timeout=0)) == size


def more_than_there_is(_link: Link) -> None:
    """Refused at once, before anything is written, even while older messages are in flight."""
    with queue_of(1, max_chunk_bytes=MIB) as (writer, (reader,)):
        for older in (0, 1):
            before = free()
            exhausted(lambda: writer.enqueue(bytes(100 * MIB), timeout=0))
            assert free() == before
            if older == 0:
                writer.enqueue(bytes(5 * MIB))
        assert len(reader.dequeue()) == 5 * MIB


def waiting_for_space(_link: Link) -> None:
    """The writer waits for the older message's readers, names them, and then sends."""
    with queue_of(1, max_chunk_bytes=MIB) as (writer, (reader,)):
        writer.enqueue(bytes(40 * MIB))
        with refuses(TimeoutError, match=r"reader 0 \(pid"):
            writer.enqueue(bytes(41 * MIB), timeout=0.05)
        assert len(reader.dequeue(timeout=0)) == 40 * MIB
        with refuses(TimeoutError):
            reader.dequeue(timeout=0)
        writer.enqueue(bytes(41 * MIB), timeout=0)
        assert len(reader.dequeue(timeout=0)) == 41 * MIB


def an_array_that_is_kept_while_the_writer_waits(_link: Link) -> None:
    """It waits for older messages, and never for what readers keep of them."""
    with queue_of(1, max_chunk_bytes=MIB) as (writer, (reader,)):
        writer.enqueue(np.ones(14 * MIB, np.uint8))
        blocked = Aside(writer.enqueue, np.ones(55 * MIB, np.uint8)).until_blocked()
        kept = reader.dequeue()
        exhausted(blocked.result)
        assert kept.all()


def space_of_others_while_the_writer_waits(_link: Link) -> None:
    """Space that another process gives back is as good as an older message's."""
    with queue_of(1, max_chunk_bytes=MIB) as (writer, (reader,)):
        writer.enqueue(np.ones(14 * MIB, np.uint8))
        with full(leaving=20 * MIB):
            blocked = Aside(writer.enqueue, np.ones(30 * MIB, np.uint8)).until_blocked()
        blocked.result()
        assert [len(reader.dequeue()) for _ in range(2)] == [14 * MIB, 30 * MIB]


def space_of_others_little_by_little(_link: Link) -> None:
    """Somebody who gives back a page at a time does not keep a wait from ending for a signal."""
    with queue_of(1, max_chunk_bytes=MIB) as (writer, _):
        writer.enqueue(np.ones(14 * MIB, np.uint8))
        with full(leaving=MIB):
            stopped = threading.Event()

            def shrink() -> None:
                while not stopped.wait(0.02):
                    os.truncate(FILLER, os.stat(FILLER).st_size - 4096)

            shrinking = Aside(shrink)
            with pytest.raises(Alarm), alarm_after(0.5):
                writer.enqueue(np.ones(29 * MIB // 2, np.uint8))
            stopped.set()
            shrinking.result()


def a_chunk_that_cannot_be(_link: Link) -> None:
    """Older messages are not waited for if the file system is smaller than the message."""
    with queue_of(1, max_chunk_bytes=200 * MIB) as (writer, _):
        writer.enqueue(np.ones(14 * MIB, np.uint8))  # lent, so it lies in an extent
        exhausted(lambda: writer.enqueue(bytes(100 * MIB)))


def a_message_that_others_leave_no_space_for(_link: Link) -> None:
    """Refused once every reader has read everything, and not before."""
    with queue_of(1, max_chunk_bytes=MIB) as (writer, (reader,)):
        writer.enqueue(bytes(2 * MIB))
        with full(leaving=MIB):
            with refuses(TimeoutError, match=r"reader 0 \(pid"):
                writer.enqueue(bytes(4 * MIB), timeout=0.05)
            blocked = Aside(writer.enqueue, bytes(4 * MIB)).until_blocked()
            assert len(reader.dequeue()) == 2 * MIB
            exhausted(blocked.result)


def a_chunk_that_lacks_little(_link: Link) -> None:
    """The space that the chunk lacks counts, not the message's size."""
    with queue_of(1, max_chunk_bytes=12 * MIB, max_chunks=2) as (writer, (reader,)):
        for _ in range(2):  # either chunk has 8 MiB now
            writer.enqueue(bytes(8 * MIB))
            reader.dequeue()
        writer.enqueue(np.ones(3 * MIB, np.uint8))
        with full(leaving=MIB):
            blocked = Aside(writer.enqueue, bytes(10 * MIB)).until_blocked()
            os.truncate(FILLER, os.stat(FILLER).st_size - 2 * MIB)
            blocked.result()
            assert [len(reader.dequeue()) >> 20 for _ in range(2)] == [3, 10]


def waiting_for_the_space_of_a_chunk(_link: Link) -> None:
    """A message that fits its chunk waits like a larger one, if the chunk has no space yet."""
    with queue_of(1, max_chunk_bytes=10 * MIB) as (writer, (reader,)):
        writer.enqueue(bytes(57 * MIB))
        with refuses(TimeoutError, match=r"reader 0 \(pid"):
            writer.enqueue(bytes(9 * MIB), timeout=0.05)
        blocked = Aside(writer.enqueue, bytes(9 * MIB)).until_blocked()
        assert len(reader.dequeue()) == 57 * MIB
        blocked.result()
        assert len(reader.dequeue(timeout=0)) == 9 * MIB


def a_death_while_waiting_for_space(_link: Link) -> None:
    """The reader that keeps the space dies: nothing was sent; after release there is room."""
    with MessageQueue(2, 2, None, MIB) as writer:
        doomed = start_reader(writer.export_handle(0), 0)
        other = MessageQueue.create_from_handle(writer.export_handle(1), 1)
        writer.enqueue(bytes(40 * MIB))
        assert len(other.dequeue()) == 40 * MIB
        blocked = Aside(writer.enqueue, bytes(41 * MIB)).until_blocked()
        killed = doomed.peer.kill()
        with refuses(ReaderDied):
            blocked.result()
        assert_in_time(BOUND, killed, blocked.ended)
        with refuses(TimeoutError):
            other.dequeue(timeout=0)
        writer.release_reader(0)
        writer.enqueue(bytes(41 * MIB), timeout=0)
        assert len(other.dequeue(timeout=0)) == 41 * MIB
        other.close()


def views_keep_space(_link: Link) -> None:
    """Space that a view refers to is not reused, and is given back with the view."""
    with queue_of(1, max_chunk_bytes=MIB) as (writer, (reader,)):
        writer.enqueue(np.ones(40 * MIB, np.uint8))
        with refuses(ViewInUse), reader.dequeue_view() as view:
            kept = view[1:]
        del view
        for _ in range(3):
            with refuses(TimeoutError, match="holds views of 1 chunk"):
                writer.enqueue(bytes(41 * MIB), timeout=0.02)
        writer.enqueue(bytes(10 * MIB), timeout=0)
        assert kept.all()
        del kept
        assert len(reader.dequeue(timeout=0)) == 10 * MIB
        writer.enqueue(bytes(41 * MIB), timeout=0)
        assert len(reader.dequeue(timeout=0)) == 41 * MIB


def look_at_whole_chunk(_link: Link, how: str) -> str:
    """Reads the end of a chunk whose beginning alone is reserved, with no space left."""
    with queue_of(1, max_chunk_bytes=MIB, max_chunks=2) as (writer, (reader,)):
        writer.enqueue("small")
        with full():
            try:
                if how == "acquire_read":
                    with reader.acquire_read() as chunk:
                        return f"byte {chunk[MIB - 1]}"
                ring = ring_in(writer) if how == "get_data of the writer" else ring_in(reader)
                with ring.get_data(1) as chunk:
                    return f"byte {chunk[MIB - 1]}"
            except ShmExhausted:
                return "ShmExhausted"


@pytest.mark.parametrize(
    ("role", "size"),
    [
        (ring_that_does_not_fit, "64m"),
        (default_queue, "64m"),
        (ring_buffer_alone, "16m"),
        (large_messages, "16m"),
        (arrays_that_are_kept, "16m"),
        (kept_array_and_a_larger_one, "64m"),
        (chunks_by_hand, "8m"),
        (space_kept_for_large_messages, "64m"),
        (more_than_there_is, "64m"),
        (waiting_for_space, "64m"),
        (an_array_that_is_kept_while_the_writer_waits, "64m"),
        (space_of_others_while_the_writer_waits, "64m"),
        (space_of_others_little_by_little, "64m"),
        (a_chunk_that_cannot_be, "64m"),
        (a_message_that_others_leave_no_space_for, "64m"),
        (last_two_arrays, "64m"),
        (chunks_of_other_sizes, "64m"),
        (whole_chunk_whose_space_was_given_back, "64m"),
        (camera, "64m"),
        (one_kept_array, "64m"),
        (one_kept_array_of_a_killed_writer, "64m"),
        (one_kept_array_of_killed_ends, "64m"),
        (views_that_survive_all_ends, "64m"),
        (views_that_spare_no_more_than_they_show, "64m"),
        (any_kept_view_of_killed_ends, "64m"),
        (kept_chunk_of_a_writer, "64m"),
        (views_of_a_killed_reader, "64m"),
        (space_that_another_process_gave_back, "64m"),
        (never_claimed_slot, "64m"),
        (foreign_reader_that_goes_on, "64m"),
        (limit_of_file_sizes, "64m"),
        (refusal_names_who_keeps_what, "96m"),
        (a_chunk_that_lacks_little, "64m"),
        (waiting_for_the_space_of_a_chunk, "64m"),
        (a_death_while_waiting_for_space, "64m"),
        (views_keep_space, "64m"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_does_not_fit_is_shm_exhausted_and_the_rest_works(
    role: Callable[[Link], None], size: str
) -> None:
    """A segment that does not fit raises ShmExhausted with need, free and hint; the rest works."""
    start(role, method="spawn", command=private_shm(size)).result()


@pytest.mark.parametrize("how", ["acquire_read", "get_data of the writer", "get_data of a reader"])
def test_looking_at_a_whole_chunk_never_kills(how: str) -> None:
    """Reading the whole chunk of a small message gives bytes or an error, not a SIGBUS."""
    peer = start(look_at_whole_chunk, how, method="spawn", command=private_shm("8m"))
    assert peer.result() in ("byte 0", "ShmExhausted")
