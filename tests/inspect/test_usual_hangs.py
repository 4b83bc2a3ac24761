"""Hangs of a small engine on memlane's queues, as `memlane stuck` sees them: a scheduler that asks
two workers and waits for their answers. Real processes, real stacks, exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from memlane import Gather, Handle, MessageQueue, TimedOut, inspect
from memlane._base import processes
from tests.support import PATIENCE, Link, Peer, dismiss, run_memlane, start, until, until_asleep
from tests.support.queues import fill, segments, start_reader, start_writer, sweep

AFTER = "0.3"
SIZES: dict[str, Any] = {"max_chunk_bytes": 4096, "max_chunks": 4}
# The command, with more time for stacks: on a busy machine five seconds may be too short.
MEMLANE = f"""from memlane.inspect import stacks
stacks.stacks_of.__kwdefaults__["timeout"] = {PATIENCE / 2}
from memlane.__main__ import main
main()"""


pytestmark = pytest.mark.usefixtures("commands")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = segments()
    yield
    dismiss()
    sweep()
    assert segments() <= before


def stuck(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_memlane("stuck", "--after", AFTER, *arguments, program=MEMLANE)


def until_code(code: int, *arguments: str, shows: str = "") -> str:
    """Returns what `memlane stuck` prints once it ends with that code, and prints `shows`: a look
    may come before a process has entered the call that it says it makes."""
    done: list[subprocess.CompletedProcess[str]] = []

    def is_seen() -> bool:
        done.append(stuck(*arguments))
        return done[-1].returncode == code and shows in done[-1].stdout

    try:
        until(is_seen, "the exit code", pause=0.1)
    except AssertionError:
        raise AssertionError(f"{done[-1].returncode}: {done[-1].stdout}{done[-1].stderr}") from None
    return done[-1].stdout


def until_waiting(count: int) -> None:
    """Return when so many ends have waited for longer than AFTER."""

    def waits() -> int:
        people = [who for segment in inspect.segments() for who in segment.participants]
        since = [who.activity_since for who in people if who.activity in ("waiting", "attaching")]
        return sum(each is not None and time.monotonic() - each > float(AFTER) for each in since)

    until(lambda: waits() >= count, f"{count} wait", pause=0.05)


# The engine ---------------------------------------------------------------------------------------


def hang() -> None:
    time.sleep(3600)


def all_reduce() -> None:
    """As a collective: it returns when the peer has entered it, too."""
    time.sleep(3600)


def work(link: Link, steps: Handle, rank: int, answers: Any, what: Callable[[], None]) -> None:
    """Role: answers the first step, and does not answer the second."""
    todo = MessageQueue.create_from_handle(steps, rank)
    if answers is None:
        queue = MessageQueue(1, 1, **SIZES)
        link.tell(queue.export_handle())
        done: MessageQueue | Gather = queue
    else:
        done = Gather.create_from_handle(answers, rank)
        link.tell("attached")
    done.enqueue(todo.dequeue())
    todo.dequeue()
    link.tell("taken")
    what()
    done.enqueue("late")
    todo.dequeue()


def schedule(link: Link, kind: str, timeout: float | None) -> None:
    """Role: sends two steps to two workers, and waits for the answers to each."""
    steps = MessageQueue(2, 2, **SIZES)
    gather: Gather | None = Gather(2, **SIZES) if "gather" in kind else None
    places = [None, None] if gather is None else [gather.export_handle(n) for n in range(2)]
    link.tell((steps.export_handle(), places))
    handles = link.hear()
    queues = [] if gather else [MessageQueue.create_from_handle(each, 0) for each in handles]
    if "linked" in kind:
        for each in [gather] if gather else queues:
            each.answers(steps)
    ends = [gather, gather] if gather else queues
    steps.wait_until_ready(PATIENCE)
    for step in range(2):
        steps.enqueue(step)
        link.tell(step)
        for end in ends:
            while True:
                try:
                    end.dequeue(timeout)
                    break
                except TimedOut:
                    continue
    link.tell("idle")
    if "elsewhere" in kind:
        hang()
    if "thread" in kind:
        threading.Thread(target=wait_for_a_lock, daemon=True).start()
    link.hear()


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def engine(
    kind: str, *doing: Callable[[], None], timeout: float | None = None
) -> tuple[Peer, list[Peer]]:
    """Its processes; both workers have taken the second step."""
    scheduler = start(schedule, kind, timeout)
    steps, answers = scheduler.hear()
    workers = [start(work, steps, rank, answers[rank], doing[rank]) for rank in range(2)]
    scheduler.tell([worker.hear() for worker in workers])
    assert [scheduler.hear(), scheduler.hear()] == [0, 1]
    assert [worker.hear() for worker in workers] == ["taken", "taken"]
    return scheduler, workers


def nothing() -> None:
    """Answers at once."""


KINDS = ["linked pairs", "pairs", "linked gather", "gather"]


@pytest.mark.parametrize("timeout", [None, 0.05])
@pytest.mark.parametrize("kind", KINDS)
def test_the_worker_that_does_not_answer_is_named(kind: str, timeout: float | None) -> None:
    """Also if the scheduler asks again and again."""
    scheduler, (first, second) = engine(kind, nothing, hang, timeout=timeout)
    text = until_code(1, shows="hang (")
    assert f"(pid {scheduler.pid} " in text.splitlines()[0]
    assert f"waits for the writer (pid {second.pid} " in text
    assert "hang (" in text
    assert f"pid {first.pid} " not in text
    code = 1 if "linked" in kind else 3
    until(
        lambda: f"(pid {second.pid} " in until_code(code, "--no-stacks"),
        "a look that is not between two calls of the scheduler",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_worker_outside_of_a_collective_is_named(kind: str) -> None:
    """Without stacks it is one of both, which exit code 3 says."""
    _, (first, second) = engine(kind, all_reduce, hang)
    text = until_code(1)
    assert f"Process {second.pid} computes, or is blocked elsewhere: its stack says where." in text
    assert text.index(f"pid {second.pid} ") < text.index(f"pid {first.pid} ")
    text = until_code(3, "--no-stacks")
    assert "undecided: one of these" in text
    assert f"pid {first.pid} " in text
    assert f"pid {second.pid} " in text


@pytest.mark.parametrize("kind", KINDS)
def test_both_inside_a_collective_is_undecided(kind: str) -> None:
    _, (first, second) = engine(kind, all_reduce, all_reduce)
    text = until_code(3)
    assert f"pid {first.pid} " in text
    assert f"pid {second.pid} " in text


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_worker_is_named(kind: str) -> None:
    _, (_, second) = engine(kind, nothing, hang)
    second.stop()
    assert f"`kill -CONT {second.pid}` resumes it" in until_code(1, "--no-stacks")


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_engine_is_not_stuck(kind: str) -> None:
    scheduler, _ = engine(kind, nothing, nothing)
    assert scheduler.hear() == "idle"
    scheduler.until_asleep()
    until_waiting(2)
    until_code(0)
    until_code(0, "--no-stacks")


@pytest.mark.parametrize("kind", ["linked pairs", "gather"])
def test_a_scheduler_that_hangs_elsewhere_is_shown(kind: str) -> None:
    """Nobody waits for it in a queue: an idle engine looks the same, but for its stack."""
    scheduler, workers = engine(f"{kind} elsewhere", nothing, nothing)
    assert scheduler.hear() == "idle"
    until_waiting(2)
    text = until_code(3, shows="    hang (")
    assert "no queue of these processes has moved for " in text
    first, *rest = (line for line in text.splitlines() if line.startswith("  pid "))
    assert first.startswith(f"  pid {scheduler.pid} ")
    assert "    hang (" in text
    assert all(any(f" {worker.pid} " in line for line in rest) for worker in workers)
    until(lambda: until_code(3, "--no-stacks").count(": at rest") == 2, "the workers are at rest")
    assert f"  pid {scheduler.pid} " in until_code(3, "--no-stacks")
    assert f"pid {scheduler.pid} " in until_code(3, str(scheduler.pid))


def test_a_thread_that_hangs_is_shown() -> None:
    """The main thread waits for work, as in an engine whose outputs are stuck."""
    scheduler, _ = engine("linked pairs thread", nothing, nothing)
    assert scheduler.hear() == "idle"
    scheduler.until_asleep()
    until_waiting(2)
    text = until_code(3, shows="    wait_for_a_lock (")
    assert f"  pid {scheduler.pid} " in text
    assert re.search(r"thread Thread-\d+ \(wait_for_a_lock\):", text), text
    assert "    wait_for_a_lock (" in text

    def at_rest() -> list[tuple[bool, bool]]:
        answer = json.loads(until_code(3, "--json"))
        assert answer["stuck"] == []
        (silence,) = answer["silent"]
        return [(who["pid"] == scheduler.pid, who["at_rest"]) for who in silence["processes"]]

    until(lambda: at_rest() == [(True, False), (False, True), (False, True)], "their stacks")


# Engines on several hosts ----------------------------------------------------------------------


def answer_from_afar(link: Link, steps: Handle, hangs: bool) -> None:
    """Role: a worker on another host, which answers the first step, and perhaps never takes the
    third."""
    todo = MessageQueue.create_from_handle(steps, 0)
    done = MessageQueue(1, 0, connect_ip="127.0.0.1")
    link.tell(done.export_handle())
    done.wait_until_ready(PATIENCE)
    done.enqueue(todo.dequeue())
    if hangs:
        todo.dequeue()
        link.tell("taken")
        hang()
    todo.dequeue()


def ask_afar(link: Link, steps: int) -> None:
    """Role: sends steps to a worker on another host, and waits for one answer more than it gets."""
    todo = MessageQueue(1, 0, connect_ip="127.0.0.1")
    link.tell(todo.export_handle())
    done = MessageQueue.create_from_handle(link.hear(), 0)
    todo.wait_until_ready(PATIENCE)
    for step in range(steps):
        todo.enqueue(step)
        if not step:
            done.dequeue(PATIENCE)
    done.dequeue()


@pytest.mark.parametrize("hangs", [True, False])
def test_a_worker_on_another_host_that_does_not_answer_is_named(hangs: bool) -> None:
    """One that waits for the next step is idle."""
    asker = start(ask_afar, 1 + hangs)
    worker = start(answer_from_afar, asker.hear(), hangs)
    asker.tell(worker.hear())
    if hangs:
        assert worker.hear() == "taken"
    until_waiting(1)
    text = until_code(int(hangs), "--no-stacks")
    if not hangs:
        worker.until_asleep()
        return
    assert f"reader 0 (pid {asker.pid} " in text.splitlines()[0]
    assert re.search(rf"waits for the writer \(pid {worker.pid} at \S+:\d+, connected, last ", text)
    assert f"Process {worker.pid} is at " in text


def test_a_start_of_which_a_reader_on_another_host_is_missing_is_no_stall() -> None:
    """The command says who is missing, and that nobody is stuck."""
    queue = start(wait_for_hosts)
    queue.hear()
    until_waiting(1)
    text = until_code(0, shows="starting: ")
    assert f"starting: writer (pid {queue.pid} " in text
    assert "waiting for reader 0 (never attached)" in text


def wait_for_hosts(link: Link) -> None:
    queue = MessageQueue(1, 0, connect_ip="127.0.0.1")
    link.tell("created")
    queue.wait_until_ready()


# Engines without queues ---------------------------------------------------------------------------

LOCKED = """import threading
lock = threading.Lock()
lock.acquire()
print(flush=True)
lock.acquire()
"""
IDLE = "import queue; print(flush=True); queue.Queue().get()"


@contextmanager
def titled(program: str) -> "Iterator[subprocess.Popen[bytes]]":
    """A process that calls itself as vLLM calls an engine that runs its model itself."""
    command = ["VLLM::EngineCore", "-c", program]
    out = subprocess.PIPE
    with subprocess.Popen(command, executable=sys.executable, stdout=out) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_an_engine_without_queues_that_hangs_is_shown() -> None:
    with titled(LOCKED) as hung, titled(IDLE) as idle:
        until_asleep(hung.pid)
        until_asleep(idle.pid)
        text = until_code(3, shows="    <module> (<string>:5)")
        assert text.startswith("no stack of these processes has moved for 0.3 s")
        assert f"  pid {hung.pid} VLLM::EngineCore (" in text
        assert "    <module> (<string>:5)" in text
        assert f"pid {idle.pid} " not in text
        until_code(0, str(idle.pid))
        assert f"pid {hung.pid} " in until_code(3, str(hung.pid), "--no-stacks")


SERVER = f"""import subprocess, sys, threading
subprocess.Popen(["VLLM::EngineCore", "-c", {IDLE!r}], executable=sys.executable)
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""


def test_a_server_that_hangs_above_an_idle_engine_is_shown() -> None:
    """Not one that waits for its engine to end."""
    for server, code in ((SERVER, 3), (SERVER.replace("lock.acquire", "os.wait"), 0)):
        program = f"import os\n{server}"
        out = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", program], stdout=out) as process:
            assert process.stdout is not None
            process.stdout.readline()
            (engine,) = [
                pid for pid, parent in processes.parents().items() if parent == process.pid
            ]
            try:
                text = until_code(code, shows="EngineCore: at rest" if code else "")
                assert (f"  pid {process.pid} " in text) == (code == 3)
                assert (f"  pid {engine} VLLM::EngineCore: at rest" in text) == (code == 3)
            finally:
                os.kill(engine, signal.SIGKILL)
                process.kill()


def test_an_engine_that_has_ended_is_not_shown() -> None:
    with titled(LOCKED) as process:
        process.kill()
        until(lambda: processes.state(process.pid) == "dead", "its end")  # nobody has reaped it
        assert stuck().returncode == 0


# Other waits --------------------------------------------------------------------------------------


def write_with_timeouts(link: Link) -> None:
    """Role: a writer whose calls give up and begin anew."""
    queue = MessageQueue(2, 2, **SIZES)
    link.tell(queue.export_handle())
    link.hear()
    while True:
        try:
            queue.enqueue("x", timeout=0.1)
        except TimedOut:
            continue


def read_all(link: Link, handle: Handle, rank: int) -> None:
    queue = MessageQueue.create_from_handle(handle, rank)
    link.tell()
    for _ in queue:
        pass


def test_a_full_ring_is_found_though_its_writer_gives_up_and_tries_again() -> None:
    """The reader that does not read is named, not the writer for which the other one waits."""
    writer = start(write_with_timeouts)
    handle = writer.hear()
    quick = start(read_all, handle, 0)
    quick.hear()
    slow = start_reader(handle, 1)
    slow.peer.stop()
    writer.tell()
    text = until_code(1, "--no-stacks")
    assert f"writer (pid {writer.pid} " in text.splitlines()[0]
    assert f"waits for reader 1 (pid {slow.pid} " in text
    assert f"kill -CONT {slow.pid}" in text


class Slow:
    """Its pickling does not end."""

    def __reduce__(self) -> Any:
        hang()


def begin(link: Link, in_block: bool) -> None:
    """Role: begins a message that it does not end; a thread of it hangs, and another is idle."""
    threading.Thread(target=wait_for_a_lock, daemon=True).start()
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    queue = MessageQueue(1, 1, **SIZES)
    link.tell(queue.export_handle())
    link.hear()
    if in_block:
        with queue.acquire_write():
            hang()
    queue.enqueue(Slow())


@pytest.mark.parametrize("in_block", [True, False])
def test_a_writer_that_does_not_end_its_message_is_named(in_block: bool) -> None:
    """In acquire_write, or inside a `__reduce__`. Its other threads are shown if they hang."""
    writer = start(begin, in_block)
    reader = start(read_all, writer.hear(), 0)
    reader.hear()
    writer.tell()
    text = until_code(1, shows="wait_for_a_lock (")
    assert f"(pid {reader.pid} " in text.splitlines()[0]
    assert f"waits for the writer (pid {writer.pid} " in text
    assert "    hang (" in text
    assert re.search(r"    thread Thread-\d+ \(wait_for_a_lock\):\n    wait_for_a_lock \(", text), (
        text
    )
    assert text.count("    thread ") == 1


def swap(link: Link) -> None:
    """Role: writes until nobody reads, as its peer does."""
    mine = MessageQueue(1, 1, **SIZES)
    link.tell(mine.export_handle())
    theirs = MessageQueue.create_from_handle(link.hear(), 0)
    link.tell()
    link.hear()
    fill(mine)
    mine.enqueue("one more")
    theirs.dequeue()


def test_two_that_wait_for_each_other_are_a_deadlock() -> None:
    one, two = start(swap), start(swap)
    handles = one.hear(), two.hear()
    one.tell(handles[1])
    two.tell(handles[0])
    for each in (one, two):
        each.hear()
    for each in (one, two):
        each.tell()
    until_code(1, shows="wait for each other: a deadlock")
    until(lambda: until_code(1).count("swap (") >= 2, "both stacks")


def test_a_start_is_no_stall() -> None:
    writer = start_writer(2)
    reader = start_reader(writer.greeting)
    writer.begin("wait_until_ready", PATIENCE).until_blocked()
    until_waiting(1)
    done = stuck()
    assert done.returncode == 0
    assert f"starting: writer (pid {writer.pid} " in done.stdout
    assert "reader 1 (never attached)" in done.stdout
    for each in (reader, writer):
        each.peer.kill()
    sweep()


def test_a_damaged_segment_is_a_row_beside_the_others() -> None:
    """No option, and no byte of another, makes the command fail as if somebody were stuck."""
    path = Path("/dev/shm/memlane-" + "0" * 32)
    with MessageQueue(1, 1, **SIZES) as queue:
        assert queue.handle.buffer_handle is not None
        data = bytearray(Path("/dev/shm", queue.handle.buffer_handle[3]).read_bytes())
    at = data.index(b"MEMLANE1")
    data[at + 80 : at + 112] = b"\xff" * 32  # its geometry
    path.write_bytes(data)
    try:
        assert stuck().returncode == 0
    finally:
        path.unlink()


def test_misuse_and_failure_have_exit_codes_of_their_own() -> None:
    assert stuck("--after").returncode == 2
    failing = "import memlane.inspect.waits as w; w.files = None\n"
    failing += "from memlane.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", failing, "stuck"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 4
    assert "TypeError" in done.stderr
