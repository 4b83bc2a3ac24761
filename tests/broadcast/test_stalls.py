"""A stall is logged within the interval, in one line that begins with the process to blame.

Fails without the guard: a line that says only that no block is available, or none at all.
"""

import itertools
import logging
import os
import re
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from memlane import Closed, Handle, MessageQueue, ReaderDied, TimedOut, WriterDied
from memlane._base.processes import name_of
from tests.support import (
    Aside,
    Link,
    Peer,
    own_pid_namespace,
    start,
    unshare_refusal,
    until,
    until_asleep,
)
from tests.support.queues import drain, fill, queue_of, start_reader, start_writer

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
    """The line that a writer logs if the ring is full for twice the interval."""
    fill(writer)
    with pytest.raises(TimedOut):
        writer.enqueue("one too many", timeout=2 * INTERVAL)
    line, *_ = warnings_of(caplog)
    assert WORDS in line
    return line


def named(pid: int) -> str:
    """Returns a process as lines name it."""
    return f"pid {pid} {name_of(pid)}"


def blamed(line: str) -> str:
    """Those that a line says are waited for."""
    return line.partition("; waiting for ")[2]


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
    """Role: a reader whose own code takes long between two messages."""
    queue = attach(link, handle)
    for _ in queue:
        time.sleep(3600)


def spin_aside(link: Link, handle: Handle) -> None:
    """Role: a reader whose main thread sleeps while another thread computes and never reads."""
    threading.Thread(target=spin, args=(link, handle), daemon=True).start()
    time.sleep(3600)


def stay(link: Link, handle: Handle) -> None:
    """Role: a reader that does not leave its acquire_read block."""
    queue = attach(link, handle)
    with queue.acquire_read():
        link.tell("holding")
        time.sleep(3600)


def stay_in_view(link: Link, handle: Handle) -> None:
    """Role: a reader that does not leave its dequeue_view block."""
    queue = attach(link, handle)
    with queue.dequeue_view():
        link.tell("holding")
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


def test_a_stopped_reader_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """It is named as stopped (SIGSTOP)."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        reader = start_reader(writer.export_handle(), 7)
        reader.peer.stop()
        line = blocked_line(caplog, writer)
        assert blamed(line).startswith(
            f"reader 7 ({named(reader.pid)}, stopped, 2 behind, last progress "
        )
        reader.peer.resume()
        reader.call("close")


@pytest.mark.parametrize("role", [sleep, spin_aside])
def test_reader_whose_main_thread_is_blocked(
    role: object, caplog: pytest.LogCaptureFixture
) -> None:
    """It is running, but its main thread is asleep in the kernel; that is not said of the process,
    in which another thread may be busy."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        reader = reader_of(role, writer)
        until_asleep(reader.pid)
        line = blocked_line(caplog, writer)
        who = f"reader 7 ({named(reader.pid)}, running, its main thread asleep in the kernel ("
        assert blamed(line).startswith(who)
        reader.kill()


def test_a_spinning_reader_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """It is on a core, and not in a call of memlane."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        reader = reader_of(spin, writer)
        line = blocked_line(caplog, writer)
        assert blamed(line).startswith(f"reader 7 ({named(reader.pid)}, running")
        assert "asleep" not in line
        reader.kill()


def test_reader_slow_in_its_own_code(caplog: pytest.LogCaptureFixture) -> None:
    """It has read something, and then nothing for a while."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        reader = reader_of(slow, writer)
        writer.enqueue("taken")
        until(lambda: writer.statistics().readers[0].behind == 0)
        line = blocked_line(caplog, writer)
        assert blamed(line).startswith(f"reader 7 ({named(reader.pid)}, running")
        assert "2 behind" in line
        reader.kill()


def test_a_reader_that_holds_a_view_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """It continued to read, but still refers to a chunk."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        reader = reader_of(hold, writer)
        with writer.acquire_write():
            pass
        assert reader.hear() == "holding"
        line = blocked_line(caplog, writer)
        assert blamed(line).startswith(f"reader 7 ({named(reader.pid)}, ")
        assert "holds views of 1 chunk for " in line
        reader.kill()


@pytest.mark.parametrize("role", [stay, stay_in_view])
def test_a_reader_in_the_block_of_a_view_is_named(
    caplog: pytest.LogCaptureFixture, role: object
) -> None:
    """A long block holds its chunk from its start, not only after its end."""
    with MessageQueue(1, 1, [7], 1 << 16, 2) as writer:
        reader = reader_of(role, writer)
        writer.enqueue(np.zeros(8192, np.uint8))
        assert reader.hear() == "holding"
        assert writer.statistics().readers[0].views == 1
        assert "holds views of 1 chunk for " in blocked_line(caplog, writer)
        reader.kill()


def test_a_block_that_was_left_holds_nothing() -> None:
    """Whichever way it was left."""
    with queue_of() as (writer, (reader,)):
        for number in range(3):
            writer.enqueue(number)
            with suppress(KeyError), reader.acquire_read():
                (entry,) = writer.statistics().readers
                assert entry.views == 1
                assert entry.views_since is not None
                raise KeyError
            (entry,) = writer.statistics().readers
            assert (entry.views, entry.views_since) == (0, None)


def test_the_worst_of_many_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    """Ten readers stop reading because one of them is stopped, and one never attached."""
    with MessageQueue(12, 12, None, 256, 2) as writer:
        readers = [start_reader(writer.export_handle(), rank) for rank in range(11)]
        readers[10].peer.stop()
        line = blocked_line(caplog, writer)
        assert blamed(line).startswith(f"reader 10 ({named(readers[10].pid)}, stopped, 2 behind")
        assert "), reader 11 (never attached), " in blamed(line)
        assert "and 4 more [" in line
        readers[10].peer.resume()
        for reader in readers:
            reader.peer.kill()


def test_of_many_that_run_the_longest_silent_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    """All are equally far behind: the last to make progress is the least suspect."""
    with queue_of(3, max_chunks=2) as (writer, readers):
        writer.enqueue("taken")
        for reader in (readers[1], readers[2], readers[0]):
            time.sleep(0.02)  # progress is noted by the tick: one of at most 10 ms
            reader.dequeue()
        line = blocked_line(caplog, writer)
        assert re.findall(r"reader \d", line) == ["reader 1", "reader 2", "reader 0"]


def test_a_reader_in_another_pid_namespace_is_named_without_its_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its pid means nothing here, and the line does not pretend that it does."""
    if refusal := unshare_refusal():
        pytest.skip(refusal)
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        reader = start_reader(writer.export_handle(), 7, "spawn", own_pid_namespace())
        line = blocked_line(caplog, writer)
        assert blamed(line).startswith(
            "reader 7 (pid 1, alive but not visible from here, 2 behind, "
        )
        reader.peer.kill()


def test_a_reader_that_never_attached_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """It is named as never attached."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        assert blamed(blocked_line(caplog, writer)).startswith("reader 7 (never attached)")


def test_a_dead_reader_raises_without_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A death raises an error, without a warning."""
    monkeypatch.setenv("MEMLANE_RINGBUFFER_WARNING_INTERVAL", "60")
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        reader = reader_of(sleep, writer)
        fill(writer)
        reader.kill()
        with pytest.raises(ReaderDied, match=rf"reader 7 \(pid {reader.pid}\) died"):
            writer.enqueue(0)
        assert warnings_of(caplog) == []


def test_waiting_for_an_idle_writer_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A reader that waits on an idle queue logs nothing."""
    writer = start_writer()
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        with pytest.raises(TimedOut):
            reader.dequeue(timeout=3 * INTERVAL)
        assert warnings_of(caplog) == []
        writer.call("close")


def test_a_stopped_writer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A writer that cannot write is named."""
    writer = start_writer()
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        writer.peer.stop()
        with pytest.raises(TimedOut):
            reader.dequeue(timeout=2 * INTERVAL)
        line, *_ = warnings_of(caplog)
        assert blamed(line).startswith(f"the writer ({named(writer.pid)}, stopped, last progress ")
        assert f"reader 0 ({named(os.getpid())})" in line
        writer.peer.resume()
        writer.call("close")


def test_writer_kept_by_another_reader() -> None:
    """A reader whose writer is waiting itself is told that another reader is to blame."""
    with queue_of(2, max_chunks=2) as (writer, (fast, _slow)):
        fill(writer)
        drain(fast)
        blocked = Aside(writer.enqueue, "never").until_blocked()
        with pytest.raises(TimedOut, match=r"the writer \(pid \d+ .*, itself waiting for others, "):
            fast.dequeue(timeout=INTERVAL)
        writer.close()
        with pytest.raises(Closed):
            blocked.result()


def test_the_timeout_of_a_reader_names_the_writers_state() -> None:
    """A reader's timeout says what the writer does, as a writer's says what the readers do."""
    writer = start_writer()
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:

        def says_so() -> bool:  # in the end: it may sleep for a moment on its way to its sleep
            with pytest.raises(TimedOut) as raised:
                reader.dequeue(timeout=0)
            return "running, its main thread asleep in the kernel (" in str(raised.value)

        until(says_so)
        writer.call("close")


def test_a_dead_writer_raises_without_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A death raises an error, without a warning."""
    monkeypatch.setenv("MEMLANE_RINGBUFFER_WARNING_INTERVAL", "60")
    writer = start_writer()
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        writer.peer.kill()
        with pytest.raises(WriterDied, match=rf"pid {writer.pid}\) died"):
            reader.dequeue()
        assert warnings_of(caplog) == []


def test_not_everybody_has_attached(caplog: pytest.LogCaptureFixture) -> None:
    """wait_until_ready names who is missing."""
    with MessageQueue(2, 2, [7, 9], 256, 2) as writer:
        reader = start_reader(writer.export_handle(), 7)
        with pytest.raises(TimedOut):
            writer.wait_until_ready(2 * INTERVAL)
        line, *_ = warnings_of(caplog)
        assert blamed(line).startswith("reader 9 (never attached)")
        reader.call("close")


def test_lines_become_rarer(caplog: pytest.LogCaptureFixture) -> None:
    """The interval doubles."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        fill(writer)
        blocked = Aside(writer.enqueue, 0)
        until(lambda: len(warnings_of(caplog)) == 3, "there are three lines")
        lines = warnings_of(caplog)
        writer.close()
        with pytest.raises(Closed):
            blocked.result()
    seconds = [float(re.findall(r"blocked for ([\d.]+) s", line)[0]) for line in lines]
    for times, (before, after) in zip((2, 4), itertools.pairwise(seconds), strict=True):
        assert after - before > times * INTERVAL - 0.15  # both are rounded


def test_vllms_setting_counts_and_nonsense_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's setting counts if memlane's own is unset; an invalid value is logged."""
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
