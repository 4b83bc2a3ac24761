"""A signal handler uses an end, closes it or raises, in the middle of a call of the same thread.

The handler runs at a fixed moment: behind a function that the call makes.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from memlane import Closed, ConcurrentUse, MessageQueue, WriterClosed
from memlane._base import lifetime
from memlane.broadcast.network import transport
from memlane.broadcast.protocol.frames import What
from tests.support import PATIENCE, Alarm, until
from tests.support.queues import refuses
from tests.support.remote_queues import LIVENESS, relayed_queue, remote_queue, remote_writer

Act = Callable[[], object]


def behind(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Act, nth: int = 1) -> None:
    """Calls `act` behind the n-th call of that function in this thread."""
    function, me, left = getattr(owner, name), threading.get_ident(), [nth]

    def called(*args: Any) -> Any:
        result = function(*args)
        if threading.get_ident() == me:
            left[0] -= 1
            if left[0] == 0:
                act()
        return result

    monkeypatch.setattr(owner, name, called)


def interrupt() -> None:
    raise Alarm


def states(writer: MessageQueue) -> list[str]:
    return [row.state for row in writer.statistics().readers]


def test_an_enqueue_during_statistics_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, and the statistics are right. Fails without the guard: it sent in between."""
    with remote_queue() as (writer, (reader,)):
        seen: list[str] = []

        def use() -> None:
            with refuses(ConcurrentUse):
                writer.enqueue("refused")
            seen.extend(states(writer))

        behind(monkeypatch, writer._writer.session, "count_absent", use)
        assert states(writer) == seen == ["running"]
        writer.enqueue("message")
        assert reader.dequeue(PATIENCE) == "message"


def test_close_during_wait_until_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is closed when the call ends. Fails without the guard: never."""
    with remote_queue() as (writer, (reader,)):
        remote = writer._writer
        behind(monkeypatch, remote, "_announce_ready", writer.close)
        writer.wait_until_ready(PATIENCE)
        until(lambda: remote._is_freed)
        with refuses(WriterClosed):
            reader.dequeue(PATIENCE)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_half_a_control_frame_is_ended_first(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """A frame that the handler left half sent is ended before the next one, and sent again.

    Fails without the guard: the next message went into the other half, and was lost.
    """
    with remote_queue(2) as (writer, readers):
        remote = writer._writer
        with remote.lock:  # the end's own thread must not send it first
            for peer in remote.session._peers:
                peer.say(remote.session.replies.frame(What.READY))
            behind(monkeypatch, transport, "_send", interrupt, nth)
            with pytest.raises(Alarm):
                remote.sending.flush()
        writer.enqueue("message")
        for reader in readers:
            assert reader.dequeue(PATIENCE) == "message"


@pytest.mark.parametrize("role", ["writer", "reader"])
@pytest.mark.parametrize("name", ["is_alive", "close"])
def test_close_that_was_interrupted(monkeypatch: pytest.MonkeyPatch, role: str, name: str) -> None:
    """It can be called again, and then frees everything."""
    with remote_queue() as (writer, (reader,)):
        queue = writer if role == "writer" else reader
        end = writer._writer if role == "writer" else reader._reader
        reader.close() if role == "writer" else None
        behind(monkeypatch, end._thread if name == "is_alive" else end.transport, name, interrupt)
        with pytest.raises(Alarm):
            queue.close()
        queue.close()
        assert end._is_freed
        assert end._context.closed
        if role == "reader":
            until(lambda: states(writer) == ["closed"])


def test_two_closes_of_a_relay_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither waits for the other."""
    with relayed_queue(2) as (writer, readers):
        relay = readers[0]._reader._relay
        behind(monkeypatch, relay, "_is_awaited", readers[0].close)
        readers[0].close()
        writer.enqueue("message")
        assert readers[1].dequeue(PATIENCE) == "message"
        until(lambda: states(writer) == ["closed", "running"])


def test_the_writer_sees_a_relay_that_closes_in_its_dequeue() -> None:
    """The writer knows at once that this reader closed, though the call has yet to end.

    Fails without the guard: it counted as dead if its process ended in the handler.
    """
    with relayed_queue(2) as (writer, readers):
        relaying, done = readers[0], threading.Event()

        class Handler:
            """A `cancel` that closes the end from within the call."""

            def is_set(self) -> bool:
                if not done.is_set():
                    relaying.close()
                    until(lambda: states(writer)[0] == "closed")
                    done.set()
                return False

        with refuses(Closed):
            relaying.dequeue(PATIENCE, Handler())  # type: ignore[arg-type]
        assert done.is_set()
        writer.enqueue("message")
        assert readers[1].dequeue(PATIENCE) == "message"


def test_creation_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end that was open already is abandoned. Fails without the guard: its thread kept it."""
    with remote_writer(remote_liveness=LIVENESS) as writer:
        before = threading.active_count()
        behind(monkeypatch, lifetime, "_come_before_multiprocessing", interrupt)
        with pytest.raises(Alarm):
            MessageQueue.create_from_handle(writer.export_handle(0), 0)
        assert threading.active_count() == before
