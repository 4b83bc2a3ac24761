"""Who is stuck has a name: one line in the log, the culprit first, within the interval.

Fails without the guard: a line that says only that no block is available, or none at all.
"""

import logging
import os
import time

import pytest

from memlane import Handle, MessageQueue, ReaderDied, TimedOut, WriterDied
from tests.harness import Link, Peer, start, until
from tests.queues import fill, start_reader, start_writer, sweep

INTERVAL = 0.3
WORDS = "No available shared memory broadcast block"


@pytest.fixture(autouse=True)
def _short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLANE_RINGBUFFER_WARNING_INTERVAL", str(INTERVAL))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.split(".")[0] == "memlane" and record.levelno == logging.WARNING
    ]


def blocked_line(caplog: pytest.LogCaptureFixture, writer: MessageQueue) -> str:
    """The one line that a writer logs who finds the ring full for twice the interval."""
    fill(writer)
    with pytest.raises(TimedOut):
        writer.enqueue("one too many", timeout=2 * INTERVAL)
    (line,) = warnings_of(caplog)
    assert WORDS in line
    return line


def attach(link: Link, handle: Handle) -> MessageQueue:
    queue = MessageQueue.create_from_handle(handle, 7)
    link.tell("attached")
    return queue


def spin(link: Link, handle: Handle) -> None:
    """Role: a reader that computes and never reads."""
    queue = attach(link, handle)
    while not queue.statistics().messages:
        pass


def sleep(link: Link, handle: Handle) -> None:
    """Role: a reader that is blocked in a system call."""
    queue = attach(link, handle)
    time.sleep(3600)
    queue.close()


def slow(link: Link, handle: Handle) -> None:
    """Role: a reader whose own code between two messages takes long."""
    queue = attach(link, handle)
    for _ in queue:
        time.sleep(3600)


def hold(link: Link, handle: Handle) -> None:
    """Role: a reader that keeps a view of a chunk."""
    queue = attach(link, handle)
    kept = []
    try:
        with queue.acquire_read() as chunk:
            kept.append(chunk[:4])
    except BufferError:
        link.tell("holding")
    time.sleep(3600)


def reader_of(role: object, writer: MessageQueue) -> Peer:
    peer = start(role, writer.export_handle(7))  # type: ignore[arg-type]
    assert peer.hear() == "attached"
    return peer


def test_reader_stopped(caplog: pytest.LogCaptureFixture) -> None:
    """SIGSTOP."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        reader = start_reader(writer.export_handle(), 7)
        reader.peer.stop()
        line = blocked_line(caplog, writer)
        assert line.startswith(f"reader 7 (pid {reader.pid}, stopped, 2 behind, last progress ")
        reader.peer.resume()
        reader.call("close")


def test_reader_blocked_in_a_system_call(caplog: pytest.LogCaptureFixture) -> None:
    """It runs, but sleeps in the kernel."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        reader = reader_of(sleep, writer)
        line = blocked_line(caplog, writer)
        assert line.startswith(f"reader 7 (pid {reader.pid}, running, asleep in the kernel (")
        reader.kill()


def test_reader_spinning(caplog: pytest.LogCaptureFixture) -> None:
    """It is on a core, and not in memlane."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        reader = reader_of(spin, writer)
        line = blocked_line(caplog, writer)
        assert line.startswith(f"reader 7 (pid {reader.pid}, running")
        assert "asleep" not in line
        reader.kill()


def test_reader_slow_in_its_own_code(caplog: pytest.LogCaptureFixture) -> None:
    """It has read something, and then nothing for a while."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        reader = reader_of(slow, writer)
        writer.enqueue("taken")
        until(lambda: writer.statistics().readers[0].behind == 0)
        line = blocked_line(caplog, writer)
        assert line.startswith(f"reader 7 (pid {reader.pid}, running")
        assert "2 behind" in line
        reader.kill()


def test_reader_holding_a_view(caplog: pytest.LogCaptureFixture) -> None:
    """It went on, but something of it still refers to a chunk."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        reader = reader_of(hold, writer)
        with writer.acquire_write():
            pass
        assert reader.hear() == "holding"
        line = blocked_line(caplog, writer)
        assert line.startswith(f"reader 7 (pid {reader.pid}, ")
        assert "holds views of 1 chunk for " in line
        reader.kill()


def test_reader_never_attached(caplog: pytest.LogCaptureFixture) -> None:
    """Its place is free."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        assert blocked_line(caplog, writer).startswith("reader 7 (never attached) ")


def test_reader_dead(caplog: pytest.LogCaptureFixture) -> None:
    """That is an error before it could be a warning."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        reader = reader_of(sleep, writer)
        fill(writer)
        reader.kill()
        with pytest.raises(ReaderDied, match=rf"reader 7 \(pid {reader.pid}\) died"):
            writer.enqueue(0)
        assert warnings_of(caplog) == []


def test_writer_idle(caplog: pytest.LogCaptureFixture) -> None:
    """A reader that waits on an idle queue says nothing."""
    writer = start_writer()
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        with pytest.raises(TimedOut):
            reader.dequeue(timeout=3 * INTERVAL)
        assert warnings_of(caplog) == []
        writer.call("close")


def test_writer_stopped(caplog: pytest.LogCaptureFixture) -> None:
    """One that cannot write any more is named."""
    writer = start_writer()
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        writer.peer.stop()
        with pytest.raises(TimedOut):
            reader.dequeue(timeout=2 * INTERVAL)
        (line,) = warnings_of(caplog)
        assert line.startswith(f"the writer (pid {writer.pid}, stopped, last progress ")
        assert f"reader 0 (pid {os.getpid()})" in line
        writer.peer.resume()
        writer.call("close")


def test_writer_dead(caplog: pytest.LogCaptureFixture) -> None:
    """That is an error before it could be a warning."""
    writer = start_writer()
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        writer.peer.kill()
        with pytest.raises(WriterDied, match=rf"pid {writer.pid}\) died"):
            reader.dequeue()
        assert warnings_of(caplog) == []
    sweep()  # it died before it was ready, so its name is still there


def test_not_everybody_has_attached(caplog: pytest.LogCaptureFixture) -> None:
    """wait_until_ready names who is missing."""
    with MessageQueue(2, 2, [7, 9], 256, 2) as writer:
        reader = start_reader(writer.export_handle(), 7)
        with pytest.raises(TimedOut):
            writer.wait_until_ready(2 * INTERVAL)
        (line,) = warnings_of(caplog)
        assert line.startswith("reader 9 (never attached) ")
        reader.call("close")


def test_lines_become_rarer(caplog: pytest.LogCaptureFixture) -> None:
    """The interval doubles: three lines in seven intervals."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        fill(writer)
        with pytest.raises(TimedOut):
            writer.enqueue(0, timeout=7.9 * INTERVAL)
        assert len(warnings_of(caplog)) == 3


def test_the_other_setting_and_nonsense(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting of the known design counts if memlane's own is unset; nonsense is said."""
    monkeypatch.delenv("MEMLANE_RINGBUFFER_WARNING_INTERVAL")
    monkeypatch.setenv("VLLM_RINGBUFFER_WARNING_INTERVAL", str(INTERVAL))
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        assert WORDS in blocked_line(caplog, writer)
        caplog.clear()
        monkeypatch.setenv("VLLM_RINGBUFFER_WARNING_INTERVAL", "often")
        with pytest.raises(TimedOut):
            writer.enqueue(0, timeout=0.25)
        (line,) = warnings_of(caplog)
        assert "often" in line
