"""An end that disappears without close(), in whatever way, is dead to its peers.

Fails without the guard: finalizers that announce "closed" would make a crash look like an end.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from memlane import Handle, MessageQueue, ReaderDied, WriterDied
from tests.support import PATIENCE, Link, start
from tests.support.queues import BOUND, refuses, sweep

KEPT: list[object] = []


def leave(queue: MessageQueue, how: str) -> None:
    """Exits, with everything that Python does at exit."""
    match how:
        case "return":
            return
        case "end of the interpreter":
            KEPT.append(queue)
        case "in a cycle":
            KEPT.append([queue, KEPT])
        case "sys.exit in a with block":
            with queue:
                sys.exit(0)
        case "os._exit":
            os._exit(0)
        case "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        case "blocked daemon thread":
            threading.Thread(target=use_for_ever, args=(queue,), daemon=True).start()


def use_for_ever(queue: MessageQueue) -> None:
    while queue._is_writer:
        queue.enqueue(1)
    queue.dequeue()


def leaving_writer(link: Link, how: str) -> None:
    queue = MessageQueue(1, 1, None, 256, 4)
    link.tell(queue.export_handle())
    link.hear()
    queue.enqueue("last words")
    leave(queue, how)


def leaving_reader(link: Link, handle: Handle, how: str) -> None:
    queue = MessageQueue.create_from_handle(handle, 0)
    link.tell()
    link.hear()
    leave(queue, how)


WAYS = [
    "return",
    "end of the interpreter",
    "in a cycle",
    "sys.exit in a with block",
    "os._exit",
    "SIGTERM",
    "blocked daemon thread",
]


@pytest.mark.parametrize("how", WAYS)
def test_a_writer_that_exits_without_close_is_dead(how: str) -> None:
    """Its reader gets the last message, then WriterDied with its pid."""
    writer = start(leaving_writer, how, method="spawn")
    with MessageQueue.create_from_handle(writer.hear(), 0) as reader:
        writer.tell("go")
        assert reader.dequeue() == "last words"
        with refuses(WriterDied) as caught:
            for message in reader:
                assert message == 1
        assert caught.value.pid == writer.pid
        assert writer.join() in (0, 1, -signal.SIGTERM)
    sweep()


@pytest.mark.parametrize("how", WAYS)
def test_a_reader_that_exits_without_close_is_dead(how: str) -> None:
    """Its writer raises ReaderDied with rank and pid."""
    with MessageQueue(1, 1, None, 256, 4) as writer:
        reader = start(leaving_reader, writer.export_handle(), how, method="spawn")
        reader.hear()
        reader.tell("go")
        assert reader.join() in (0, 1, -signal.SIGTERM)
        with refuses(ReaderDied) as caught:
            while True:
                writer.enqueue("more", timeout=10 * BOUND)
        assert (caught.value.rank, caught.value.pid) == (0, reader.pid)


def test_an_exit_with_close_is_no_death() -> None:
    """For comparison: an end closed before the same exit is closed to its peers."""
    with MessageQueue(1, 1, None, 256, 2) as writer:
        reader = start(closing_reader, writer.export_handle(), method="spawn")
        assert reader.result() is None
        for number in range(10):
            writer.enqueue(number, timeout=0)


def closing_reader(_link: Link, handle: Handle) -> None:
    with MessageQueue.create_from_handle(handle, 0):
        pass


FORGETFUL = """
import multiprocessing
import sys
import weakref

weakref.finalize(sys, print)  # whose function at exit is the first to be registered, so the last

from memlane import MessageQueue, WriterDied


def read(handle):
    queue = MessageQueue.create_from_handle(handle, 0)
    try:
        queue.dequeue()
    except WriterDied:
        print("the writer died", flush=True)


if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    queue = MessageQueue(1, 1, None, 256, 2)
    multiprocessing.Process(target=read, args=(queue.export_handle(),)).start()
    queue.wait_until_ready(90)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_program_that_forgets_to_close_its_queue(method: str, tmp_path: Path) -> None:
    """It ends, although multiprocessing joins a child that waits for a message."""
    program = tmp_path / "forgetful.py"
    program.write_text(FORGETFUL)
    command = [sys.executable, str(program), method]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (run.stdout.strip(), run.stderr, run.returncode) == ("the writer died", "", 0)


DAEMONS = """
import sys
import threading
import time

from memlane import MessageQueue

call, how = sys.argv[1:]
local, relay = how == "local", how == "relay"
writer = MessageQueue(2, 2 * local, connect_ip="127.0.0.1", relay=relay)
readers = [MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in range(2)]
at_work = set()  # the threads that are in their loops


def write():
    while True:
        writer.enqueue(b"x")
        at_work.add(threading.get_native_id())


def read(reader):
    if call == "read":
        at_work.add(threading.get_native_id())
    while True:
        reader.dequeue()


def poll(reader):
    while True:
        try:
            reader.dequeue(timeout=0.001)
        except TimeoutError:
            at_work.add(threading.get_native_id())


def blocked(thread):
    with open(f"/proc/self/task/{thread}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"


for reader in readers:
    target = poll if call == "poll" else read
    threading.Thread(target=target, args=(reader,), daemon=True).start()
if call == "write":
    threading.Thread(target=write, daemon=True).start()
while len(at_work) < (1 if call == "write" else 2):
    time.sleep(0.001)
while call == "read" and not all(map(blocked, at_work)):
    time.sleep(0.001)
"""


@pytest.mark.parametrize("how", ["local", "remote", "relay"])
@pytest.mark.parametrize("call", ["read", "write", "poll"])
def test_daemon_threads_end_without_a_word(call: str, how: str, tmp_path: Path) -> None:
    """At exit their queues are closed under them, which is no error of theirs."""
    program = tmp_path / "daemons.py"
    program.write_text(DAEMONS)
    command = [sys.executable, str(program), call, how]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (run.stdout, run.stderr, run.returncode) == ("", "", 0)
