"""A writer of local and remote readers closes right after a call that raised: all get the same.

What such a call has staged for the network is settled by where the ring ended.
"""

from collections.abc import Iterator

import pytest

from memlane import Closed, MessageQueue, ReaderDied, TimedOut, WriterClosed
from memlane.broadcast.network.sending import Sending
from memlane.broadcast.network.writer import NetworkWriter
from tests.support import PATIENCE, Aside
from tests.support.queues import fill, refuses, start_reader
from tests.support.remote_queues import enqueue_and_go_on, remote_queue, remote_writer

CHUNKS = 4  # of the ring of `remote_writer`
Ends = tuple[MessageQueue, MessageQueue, MessageQueue]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A writer, its local reader, and its remote one."""
    with remote_queue(1, 1) as (writer, (here, there)):
        yield writer, here, there


def rest_of(reader: MessageQueue) -> list[object]:
    got = []
    with refuses(WriterClosed):
        while True:
            got.append(reader.dequeue(timeout=PATIENCE))
    return got


def test_before_anybody_has_come(caplog: pytest.LogCaptureFixture) -> None:
    """A reader on another host may still come; then nobody reports that all have everything."""
    writer = remote_writer(1, 1, remote_liveness=0.5)
    writer.enqueue("work")
    with refuses(TimedOut, match=r"reader 1 \(never attached\)") as caught:
        writer.close()
    assert caught.value.ranks == (1,)
    assert "reader 0 (never attached)" in caplog.text


def test_while_a_reader_comes() -> None:
    writer = remote_writer()
    writer.enqueue("work")
    handle = writer.export_handle(0)
    closing = Aside(writer.close).until_blocked()
    reader = MessageQueue.create_from_handle(handle, 0)
    assert rest_of(reader) == ["work"]
    closing.result()
    reader.close()


@pytest.mark.parametrize("is_here", [True, False], ids=["and all are there", "local missing"])
def test_who_comes_while_the_writer_closes_may_wait_for_all(is_here: bool) -> None:
    """It hears that everybody is there, if that is so, and gets what was sent."""
    writer = remote_writer(1, 1)
    handles = [writer.export_handle(rank) for rank in range(2)]
    here = MessageQueue.create_from_handle(handles[0], 0) if is_here else None
    writer.enqueue("work")
    closing = Aside(writer.close).until_blocked()
    reader = MessageQueue.create_from_handle(handles[1], 1)
    if here is None:
        with refuses(WriterClosed):
            reader.wait_until_ready(PATIENCE)
    else:
        reader.wait_until_ready(PATIENCE)
        assert rest_of(here) == ["work"]
        here.close()
    assert rest_of(reader) == ["work"]
    closing.result()
    reader.close()


def test_a_queue_without_a_message_closes(caplog: pytest.LogCaptureFixture) -> None:
    remote_writer(1, 1).close()
    assert not caplog.records


def test_a_queue_closes_after_a_timeout(ends: Ends) -> None:
    writer, here, there = ends
    sent = fill(writer)  # the next one raises TimedOut
    writer.close()
    assert rest_of(here) == rest_of(there) == list(range(sent))


def test_while_another_thread_sends(ends: Ends) -> None:
    writer, here, there = ends
    for number in range(CHUNKS):
        writer.enqueue(number)
    blocked = Aside(writer.enqueue, "never sent").until_blocked()
    writer.close()
    with refuses(Closed):
        blocked.result()
    assert rest_of(here) == rest_of(there) == list(range(CHUNKS))


def test_after_a_block_that_raised(ends: Ends) -> None:
    writer, here, there = ends
    writer.enqueue(1)
    with pytest.raises(KeyError), writer.acquire_write():
        raise KeyError
    writer.close()
    assert rest_of(here) == rest_of(there) == [1]


def test_a_queue_closes_after_a_death() -> None:
    with remote_writer(1, 1) as writer:
        here = start_reader(writer.export_handle(0), 0)
        with MessageQueue.create_from_handle(writer.export_handle(1), 1) as there:
            for number in range(CHUNKS):
                writer.enqueue(number)
            here.peer.kill()
            with refuses(ReaderDied):
                writer.enqueue("never sent")
            writer.close()
            assert rest_of(there) == list(range(CHUNKS))


@pytest.mark.parametrize("before", [[], [1]], ids=["the first message", "a later one"])
def test_a_close_interrupted_between_ring_and_network_can_be_repeated(
    ends: Ends,
    before: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer, here, there = ends
    for message in before:
        writer.enqueue(message)

    def interrupt(_self: Sending) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Sending, "_publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            enqueue_and_go_on(writer, "the ring has it")
    writer.close()
    assert rest_of(here) == rest_of(there) == [*before, "the ring has it"]


def test_a_closed_writer_answers_nobody() -> None:
    writer = remote_writer()
    writer.close(0)
    with MessageQueue(1) as work, refuses(Closed):
        writer.answers(work)


def test_of_two_threads_that_close_neither_forgets_who_never_came() -> None:
    """The second looks when the ring has been closed, and nobody is absent from it any more."""
    writer = remote_writer(1, 1, remote_liveness=0.5)
    end = writer._writer
    assert isinstance(end, NetworkWriter)
    end._here.close()
    end._here.close()
    assert end._here.absent() == ["reader 0 (never attached)"]
    writer.close()
