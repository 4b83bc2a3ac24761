"""M13 and M16: whatever happens to a whole group, nothing is left behind.

Fails without the guard: a name that is kept for the life of the queue survives kill -9.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memlane import MessageQueue
from tests.support import PATIENCE, Link, Peer, children_of, reap, start, until
from tests.support.queues import segments, start_reader, sweep


def group(link: Link, ready: bool) -> None:
    """Role: lead a process group of a writer and two readers, all at work."""
    os.setpgid(0, 0)
    writer = MessageQueue(2, 2, None, 256, 2)
    readers = [start_reader(writer.export_handle(rank), rank) for rank in range(2)]
    if ready:
        writer.wait_until_ready(PATIENCE)
    for reader in readers:
        reader.begin("dequeue").until_blocked()
    link.tell(os.getpgid(readers[0].pid) == os.getpid())
    signal.pause()


def kill_group(leader: Peer) -> None:
    """Kill all of the group at once; the members become children of this process, and end."""
    os.killpg(leader.pid, signal.SIGKILL)
    assert leader.join() == -signal.SIGKILL

    def all_ended() -> bool:
        reap(children_of(os.getpid()))
        return not children_of(os.getpid())

    until(all_ended)


def test_a_ready_group_leaves_nothing(method: str) -> None:
    """The name is gone since wait_until_ready returned: kill -9 of all leaves no file."""
    before = segments()
    leader = start(group, True, method=method)
    assert leader.hear()
    assert segments() == before
    kill_group(leader)
    assert segments() == before


def test_a_half_started_group_is_swept(method: str) -> None:
    """A group that was not ready is removed by the next creation of any segment."""
    before = segments()
    leader = start(group, False, method=method)
    assert leader.hear()
    assert len(segments() - before) == 1
    kill_group(leader)
    sweep()
    assert segments() == before


SCRIPT = """
import os, sys, threading
from memlane import MessageQueue, ShmRingBuffer
writer = MessageQueue(1, 1, None, 256, 2)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
ring = ShmRingBuffer(1, 64, 2)
writer.enqueue({"a": 1})
assert reader.dequeue() == {"a": 1}
assert threading.active_count() == 1
before_close = len(os.listdir("/proc/self/task"))
%s
sys.exit(0)
"""


@pytest.mark.parametrize(
    "way",
    [
        "pass",
        "writer.wait_until_ready(10)",
        "writer.close(); reader.close(); ring.close()",
        "sys.modules[__name__].kept = [writer, reader, ring]; kept.append(kept)",
        "raise SystemExit(0)",
        "import atexit; atexit.register(lambda: (writer.close(), reader.close()))",
    ],
)
def test_a_script_that_ends_leaves_nothing(tmp_path: Path, way: str) -> None:
    """No segment, no socket, no other file, no word on stderr, however the script ends."""
    before = segments()
    done = run_script(SCRIPT % way, tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    assert segments() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["reader.dequeue", "writer.wait_until_ready"])
def test_a_script_that_ends_while_a_thread_is_blocked(tmp_path: Path, call: str) -> None:
    """A daemon thread in a call neither keeps the interpreter nor crashes it."""
    before = segments()
    way = f"writer = MessageQueue(1, 1); threading.Thread(target={call}, daemon=True).start()"
    done = run_script(SCRIPT % way, tmp_path)
    assert done.returncode == 0
    assert "nanobind" not in done.stderr
    assert segments() == before
    assert list(tmp_path.iterdir()) == []


def run_script(script: str, place: Path) -> "subprocess.CompletedProcess[str]":
    """In a fresh interpreter whose temporary files would show."""
    return subprocess.run(
        [sys.executable, "-X", "dev", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=place,
        env={**os.environ, "TMPDIR": str(place), "XDG_RUNTIME_DIR": str(place)},
    )
