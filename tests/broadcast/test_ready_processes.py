"""wait_until_ready: processes that come, are late, or die."""

import errno
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from memlane import MessageQueue, ReaderDied, Unsupported, WriterDied
from tests.support import PATIENCE, Aside, Link, assert_in_time, start
from tests.support.queues import (
    BOUND,
    refuses,
    start_reader,
    start_writer,
    sweep,
)
from tests.support.remote_queues import remote_queue, remote_writer
from tests.support.seccomp import refuse


def test_it_waits_for_the_last_reader(method: str) -> None:
    """It blocks while a reader is missing, and returns when that one attaches."""
    with MessageQueue(2, 2, None, 4096, 2) as writer:
        first = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        waits = [Aside(end.wait_until_ready).until_blocked() for end in (writer, first)]
        second = start_reader(writer.export_handle(1), 1, method)
        for wait in waits:
            assert wait.result() is None
        second.call("wait_until_ready", 0)
        first.close()


def test_a_dead_reader_is_named() -> None:
    """A reader that dies before all are there ends the wait of the writer within 1 s."""
    with MessageQueue(2, 2, None, 64, 2) as writer:
        doomed = start_reader(writer.export_handle(1), 1)
        wait = Aside(writer.wait_until_ready).until_blocked()
        killed = doomed.peer.kill()
        with refuses(ReaderDied) as caught:
            wait.result()
        assert (caught.value.rank, caught.value.pid) == (1, doomed.pid)
        assert_in_time(BOUND, killed, wait.ended)


def test_a_dead_writer_is_named() -> None:
    """A writer that dies before all are there ends the wait of its readers within 1 s."""
    doomed = start_writer(2)
    with MessageQueue.create_from_handle(doomed.greeting, 0) as reader:
        wait = Aside(reader.wait_until_ready).until_blocked()
        killed = doomed.peer.kill()
        with refuses(WriterDied) as caught:
            wait.result()
        assert caught.value.pid == doomed.pid
        assert_in_time(BOUND, killed, wait.ended)
    sweep()


def waiting_process() -> "subprocess.Popen[bytes]":
    """Ends when its input does."""
    program = "import sys; sys.stdin.read()"
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)


def it_is_named(end: MessageQueue, process: "subprocess.Popen[bytes]", given: object) -> None:
    """The wait of `end` that was given that process raises within the bound of its end."""
    waiting = Aside(end.wait_until_ready, PATIENCE, processes=[given]).until_blocked()
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
    ended = time.monotonic()
    with refuses(ReaderDied, match=rf"process {process.pid} died before it attached") as e:
        waiting.result()
    assert_in_time(BOUND, ended, waiting.ended)
    assert (e.value.rank, e.value.pid) == (None, process.pid)


@pytest.mark.parametrize(("local", "remote", "missing"), [(0, 2, 1), (2, 1, 1), (1, 2, 2)])
def test_process_that_ends_before_it_attaches_to_a_queue_over_the_network(
    local: int, remote: int, missing: int
) -> None:
    """It is named as on one host, whether it was to read here or over the network."""
    with remote_writer(remote, local) as writer, ExitStack() as stack:
        for rank in {*range(local + remote)} - {missing}:
            handle = writer.export_handle(rank)
            stack.callback(MessageQueue.create_from_handle(handle, rank).close)
        with waiting_process() as process:
            it_is_named(writer, process, process)
        with refuses(ReaderDied):  # it has been reaped by now
            writer.wait_until_ready(timeout=PATIENCE, processes=[process.pid])


@pytest.mark.parametrize("local", [0, 1])
def test_processes_that_attached_over_the_network_are_waited_for_no_longer(local: int) -> None:
    """Those that have attached are waited for no longer, and their end costs no processor time."""
    with remote_writer(2, local) as writer:
        for rank in range(local):
            reader = start_reader(writer.export_handle(rank), rank)
            reader.call("close")
            reader.peer.kill()
        first = start_reader(writer.export_handle(local), local)
        first.call("close")
        waiting = Aside(writer.wait_until_ready, 1, processes=[first.pid]).until_blocked()
        began = time.process_time()
        first.peer.kill()
        with refuses(TimeoutError, match=f"reader {local + 1}"):
            waiting.result()
        assert time.process_time() - began < 0.3
        second = start_reader(writer.export_handle(local + 1), local + 1)
        writer.wait_until_ready(timeout=PATIENCE, processes=[first.pid, second.pid])
        second.call("close")


@pytest.mark.parametrize("form", [lambda process: process, lambda process: process.pid])
def test_process_that_ends_before_it_attaches(form: Callable[[Any], Any]) -> None:
    """It is named within a second, with its pid and no rank, by the writer and by readers."""
    with MessageQueue(2, 2, None, 64, 2) as writer:
        first = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        with waiting_process() as process:
            it_is_named(first, process, form(process))
        with refuses(ReaderDied) as e:  # it has been reaped by now
            writer.wait_until_ready(timeout=PATIENCE, processes=iter([form(process)]))
        assert e.value.pid == process.pid
        first.close()


@pytest.mark.parametrize(
    ("program", "code"),
    [("raise SystemExit(3)", 3), ("import os; os.abort()", -signal.SIGABRT), ("", 0)],
)
@pytest.mark.parametrize("is_reaped", [False, True])
def test_the_exitcode_of_a_process_that_never_attached_is_named(
    program: str, code: int, is_reaped: bool
) -> None:
    """It is said, and left to its owner, who has perhaps asked for it already."""
    with MessageQueue(1, 1, None, 64, 2) as writer:
        process = subprocess.Popen([sys.executable, "-c", program])
        if is_reaped:
            process.wait()
        with refuses(ReaderDied, match=f"attached to the queue: exit code {code}$") as caught:
            writer.wait_until_ready(PATIENCE, processes=[process])
        assert (caught.value.rank, caught.value.exitcode) == (None, code)
        assert process.wait() == code


def test_processes_that_attached_are_waited_for_no_longer() -> None:
    """Those that have attached are waited for no longer, whatever becomes of them."""
    with MessageQueue(2, 2, None, 64, 2) as writer:
        first = start_reader(writer.export_handle(0), 0)
        first.call("close")
        first.peer.kill()
        with refuses(TimeoutError, match="reader 1"):
            writer.wait_until_ready(timeout=0.3, processes=[first.pid])
        second = start_reader(writer.export_handle(1), 1)
        writer.wait_until_ready(timeout=PATIENCE, processes=[first.pid, second.pid])
        second.peer.kill()
    with MessageQueue(1, 1, None, 64, 2) as writer:
        reader = start_reader(writer.export_handle(0), 0)
        reader.peer.kill()
        with refuses(ReaderDied) as caught:
            writer.wait_until_ready(timeout=PATIENCE, processes=[reader.pid])
        assert caught.value.rank == 0
    with MessageQueue(0, 0) as nobody:
        nobody.wait_until_ready(processes=[])


def test_what_is_no_process() -> None:
    """Neither a process that was not started, nor anything without a pid."""

    class Unstarted:
        pid = None

    with MessageQueue(1, 1, None, 64, 2) as writer:
        with refuses(ValueError, match="start it before"):
            writer.wait_until_ready(processes=[Unstarted()])
        with refuses(TypeError, match="not str"):
            writer.wait_until_ready(processes=["1"])
        with refuses(ValueError, match="at least 1"):
            writer.wait_until_ready(processes=[0])
        with refuses(TypeError, match=r"values\(\)"):
            writer.wait_until_ready(processes={1: 1})
        for number in (2**31, 2**70):
            with refuses(ValueError, match="at most 2147483647"):
                writer.wait_until_ready(processes=[number])
    with remote_queue(1, 1) as (_, readers):
        for reader in readers:
            with refuses(Unsupported, match="only the writer"):
                reader.wait_until_ready(processes=[1])


ATTACHES = """
import sys
from memlane import Handle, MessageQueue
with MessageQueue.create_from_handle(Handle.from_json(sys.argv[1]), 1) as reader:
    assert list(reader) == []
"""


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=errno.errorcode.get)
def test_processes_where_pidfd_open_is_refused(error: int) -> None:
    """As older container runtimes do, and kernels before 5.3."""

    def child(_link: Link) -> None:
        refuse("pidfd_open", error)
        with MessageQueue(2, 2, None, 64, 2) as writer:
            first = MessageQueue.create_from_handle(writer.export_handle(0), 0)
            with waiting_process() as process:
                it_is_named(writer, process, process)
            with refuses(ReaderDied, match=f"process {process.pid} died before"):  # reaped by now
                writer.wait_until_ready(PATIENCE, processes=[process])
            with subprocess.Popen(
                [sys.executable, "-c", ATTACHES, writer.export_handle(1).to_json()]
            ) as second:
                writer.wait_until_ready(PATIENCE, processes=[second])
                writer.close()
            assert second.returncode == 0
            first.close()

    start(child).result()
