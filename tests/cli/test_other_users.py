"""Other users put into /dev/shm and /proc what they like: root's commands open, remove and believe
none of it."""

import ctypes
import inspect
import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memlane import MessageQueue
from memlane._base import processes
from memlane.cli import users
from memlane.inspect.foreign import rings
from memlane.inspect.foreign.rings import Geometry
from memlane.inspect.segment import open_to_read
from tests.inspect.test_foreign_files import map_without_descriptor
from tests.support import PATIENCE, Link, Peer, run_memlane, start, until
from tests.support.queues import name_in

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("commands")]

NOBODY = 65534
SHM = Path("/dev/shm")
LONG = 60  # processes
CHAIN = f"""from multiprocessing.process import *; import os, sys
os.setuid({NOBODY})
for _ in range({LONG}):
    if os.fork():
        os.wait()
        os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def found(*arguments: str) -> dict[str, list[dict[str, object]]]:
    done = run_memlane(*arguments, "--json")
    assert done.stderr == "", done
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.fixture
def name() -> Iterator[str]:
    """A region's, by its name."""
    made = f"vllm_offload_{os.getpid()}_of_another"
    yield made
    (SHM / made).unlink(missing_ok=True)


def lead(link: Link, name: str, folder: str) -> None:
    """Role: another user's link in the place of a region's folder."""
    os.setuid(NOBODY)
    os.symlink(folder, SHM / name)
    link.tell()
    link.hear()


def test_another_users_link_to_a_folder_leads_nowhere(name: str, tmp_path: Path) -> None:
    """Root's own file behind it is no region: it is neither shown nor removed."""
    (tmp_path / "memlane").write_bytes(b"precious")
    peer = start(lead, name, str(tmp_path))
    peer.hear()
    run_memlane("clean", "--foreign", "--yes", f"{name}/memlane")
    assert (tmp_path / "memlane").read_bytes() == b"precious"
    assert not [each for each in found("ls")["segments"] if name in str(each["name"])]
    peer.kill()


@pytest.mark.parametrize("what", ["/dev/null", "/dev/zero", "/proc/self/status"])
def test_what_is_no_file_of_the_folder_is_not_opened(what: str) -> None:
    file = os.open(what, os.O_RDONLY)
    link = SHM / f"link-{os.getpid()}"
    link.symlink_to(what)
    folder = SHM / f"folder-{os.getpid()}"
    folder.symlink_to(os.path.dirname(what))
    try:
        for path in (f"/proc/self/fd/{file}", str(link), f"{folder}/{os.path.basename(what)}"):
            with pytest.raises(OSError, match=r"no file of|symbolic links|Not a directory"):
                open_to_read(path)
    finally:
        link.unlink()
        folder.unlink()
        os.close(file)


def mount_over(folder: Path) -> None:
    """From now on it is this process's /dev/shm."""
    libc = ctypes.CDLL(None, use_errno=True)
    private, bind = 0x44000, 0x1000  # MS_REC | MS_PRIVATE, MS_BIND
    assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS
    assert libc.mount(b"none", b"/", None, private, None) == 0
    assert libc.mount(bytes(folder), bytes(SHM), None, bind, None) == 0


def call_it_the_same(link: Link, folder: Path) -> None:
    """Role: another user's ring, whose name it gets; in a mount of its own."""
    mount_over(folder)
    os.setuid(NOBODY)
    name, size = link.hear()
    with open(SHM / name, "w+b") as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size):
            link.tell()
            link.hear()


@pytest.fixture
def namesake() -> Iterator[Peer]:
    """Another user's process, which makes a ring of the name and size that it is told."""
    folder = SHM / f"of-{os.getpid()}"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    peer = start(call_it_the_same, folder)
    yield peer
    peer.kill()
    shutil.rmtree(folder)


def test_another_users_ring_of_the_same_name_does_not_join_roots(namesake: Peer) -> None:
    """Else its processes would be taken for the ring's readers, and its flags for the ring's."""
    size = Geometry(16 << 20, 1, 10).size
    with open(SHM / f"psm_{os.getpid()}", "w+b") as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size):
            namesake.tell((os.path.basename(file.name), size))
            namesake.hear()
            (ring,) = [each for each in rings._rings(None) if each.name in file.name]
            assert ring.pids == (os.getpid(),)
        os.unlink(file.name)


def become_nobody() -> None:
    """Its own files in /proc are its own again, as a program's that it executes would be."""
    os.setuid(NOBODY)
    assert ctypes.CDLL(None).prctl(4, 1) == 0  # PR_SET_DUMPABLE


def map_only(link: Link, path: Path) -> None:
    """Role: an engine's reader that has closed its descriptor."""
    become_nobody()
    map_without_descriptor(link, str(path), True)


def see_who_maps(link: Link, path: Path, has_it_open: bool) -> tuple[int, ...]:
    """Role: an engine's writer; returns the ring's pids, as its user sees them."""
    become_nobody()
    with path.open("w+b") as file:
        file.truncate(Geometry(16 << 20, 1, 10).size)
        kept = mmap.mmap(file.fileno(), mmap.PAGESIZE) if has_it_open else None
    link.tell()
    link.hear()
    (ring,) = [each for each in rings._rings(None) if each.name == path.name]
    del kept
    return ring.pids


@pytest.mark.parametrize("case", ["its name", "no name", "no descriptor"])
def test_a_user_counts_who_only_maps_its_ring(case: str) -> None:
    """Only root may open what a mapping leads to."""
    path = SHM / f"psm_{os.getpid()}"
    writer = start(see_who_maps, path, case != "no descriptor")
    try:
        writer.hear()
        reader = start(map_only, path)
        pid = reader.hear()
        if case == "no name":
            path.unlink()
        writer.tell()
        mapping = {pid} if case == "no descriptor" else {pid, writer.pid}
        assert set(writer.result()) == mapping
        reader.kill()
    finally:
        path.unlink(missing_ok=True)


def test_a_pipe_in_the_place_of_another_users_ring_is_not_waited_for(namesake: Peer) -> None:
    pipe = SHM / f"psm_{os.getpid()}"
    os.mkfifo(pipe)
    try:
        namesake.tell((pipe.name, Geometry(16 << 20, 1, 10).size))
        namesake.hear()
        assert run_memlane("stuck", "--after", "0", "--no-stacks").stderr == ""
    finally:
        pipe.unlink()


def test_a_name_takes_no_more_calls_the_longer_the_chain_of_processes_is() -> None:
    """A thousand small processes, each the child of another, ended every command."""
    command = [sys.executable, "-IS", "-c", CHAIN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as chain:
        assert chain.stdin is not None
        assert chain.stdout is not None
        last, limit = int(chain.stdout.readline()), sys.getrecursionlimit()
        sys.setrecursionlimit(len(inspect.stack(0)) + LONG // 2)
        try:
            assert processes.name_of(last).endswith(": spawned")
        finally:
            sys.setrecursionlimit(limit)
        chain.stdin.close()


# Root's view of other users -----------------------------------------------------------------------


def block(link: Link) -> None:
    """Role: another user's process that waits in a full queue for a reader that is its own."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as a process that it has started
    queue = MessageQueue(1, 1, None, 64, 2, name="others")
    ends = [queue, MessageQueue.create_from_handle(queue.handle, 0)]
    link.tell(name_in(queue.handle))
    while True:
        ends[0].enqueue(0)


@pytest.fixture
def blocked() -> Iterator[tuple[Peer, str]]:
    """Such a process, and the name of its queue."""
    peer = start(block)
    name = peer.hear()
    until(lambda: stuck_of_all() != [], "it is full")
    yield peer, name
    peer.kill()
    (SHM / name).unlink(missing_ok=True)


def stuck_of_all() -> list[dict[str, Any]]:
    done = run_memlane("stuck", "--all", "--after", "0", "--no-stacks", "--json")
    (theirs,) = [each for each in json.loads(done.stdout)["users"] if each["uid"] == NOBODY]
    assert theirs["problem"] is None
    return list(theirs["stuck"])


def test_root_sees_another_users_queue_where_it_asks_for_it(blocked: tuple[Peer, str]) -> None:
    peer, name = blocked
    (wait,) = stuck_of_all()
    assert (wait["label"], wait["waiter"]["pid"]) == ("others", peer.pid)
    assert name not in str(found("ls"))
    shown = run_memlane("ls", "--all").stdout
    assert f"({NOBODY}):" in shown
    assert "others  queue" in shown
    assert "n reader 1" in run_memlane("show", "--all", "others").stdout
    done = run_memlane("show", "--all", "nothing")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_pid_that_another_user_wrote_into_a_slot_is_not_believed(
    blocked: tuple[Peer, str],
) -> None:
    """Else root would blame any process, and pause it, because that user wants it."""
    peer, name = blocked
    theirs, ours = (
        struct.pack("<QQ", pid, processes.start_ticks(pid)) for pid in (peer.pid, os.getpid())
    )
    data = (SHM / name).read_bytes()
    with (SHM / name).open("r+b") as file:
        file.seek(data.rindex(theirs))
        file.write(ours)
    (wait,) = stuck_of_all()
    assert [(who["pid"], who["state"], who["name"]) for who in wait["awaited"]] == [
        (os.getpid(), "unknown", "")
    ]


def answer_to(command: Callable[[], int], seconds: float = PATIENCE) -> users.Answer:
    """Returns what it answers as another user."""
    ((_, answer),) = users.answers_as([users.User(NOBODY, NOBODY)], command, seconds)
    return answer


def is_stopped() -> int:
    os.kill(os.getpid(), signal.SIGSTOP)
    return 0


def is_killed() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def recurses() -> int:
    return recurses()


def test_a_user_who_stops_or_kills_or_confuses_the_look_hides_only_itself() -> None:
    assert answer_to(is_stopped, 0.1) == users.Answer(4, problem="no answer within 0.1 s")
    assert "without an answer" in answer_to(is_killed).problem
    assert "RecursionError" in answer_to(recurses).problem


def is_stopped_for_one() -> int:
    """Stops as one of two users."""
    if os.getuid() == NOBODY:
        os.kill(os.getpid(), signal.SIGSTOP)
    print("x" * 200_000)  # more than a pipe holds
    return 0


def test_a_user_who_stops_its_look_does_not_hide_those_after_it() -> None:
    both = [users.User(NOBODY, NOBODY), users.User(NOBODY + 1, NOBODY)]
    (_, first), (_, second) = users.answers_as(both, is_stopped_for_one, 2.0)
    assert first.problem == "no answer within 2 s"
    assert (second.code, len(second.text)) == (0, 200_001)


def starts_programs() -> int:
    """Prints the environment that a program has, and the pid of one that goes on."""
    print(subprocess.run(["env"], capture_output=True, text=True, check=True).stdout)
    print(subprocess.Popen(["sleep", "1000"]).pid)
    return 0


def test_what_a_look_has_started_ends_with_it_and_has_nothing_of_roots_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program's environment can be read by its user."""
    monkeypatch.setenv("ROOT_SECRET", "hunter2")
    *environment, pid = answer_to(starts_programs).text.split()
    assert {line.partition("=")[0] for line in environment} <= {"PATH", "LANG"}
    until(lambda: not Path(f"/proc/{pid}").exists() or processes.is_ending(int(pid)))


def test_users_that_are_left_out_are_no_all_clear(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(users, "others", lambda: ([], 3))
    assert users.print_all(lambda: 0, False, 0.0) == 4
    assert "3 users more" in capsys.readouterr().out


def shows_itself() -> int:
    rights = Path("/proc/self/status").read_text()
    print(os.getresuid(), os.getresgid(), os.getgroups(), os.stat("/proc/self/fd").st_uid)
    print(*(line for line in rights.splitlines() if line.startswith("CapEff")))
    print(sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in range(4)))
    with pytest.raises(OSError, match="/dev/tty"):
        os.open("/dev/tty", os.O_RDONLY)
    with pytest.raises(PermissionError):
        os.setuid(0)
    return len(os.listdir("/proc/self/fd"))


def test_who_looks_as_another_user_has_nothing_of_roots() -> None:
    """Neither files nor a terminal nor rights; and that user cannot trace it."""
    answer = answer_to(shows_itself)
    three = (NOBODY, NOBODY, NOBODY)
    assert answer.text.splitlines() == [
        f"{three} {three} [] 0",
        "CapEff:\t0000000000000000",
        "['/dev/null', '/dev/null', '/dev/null', 'pipe']",
    ]
    assert answer.code == 5  # those, and that of the folder


def test_all_is_for_one_look() -> None:
    done = run_memlane("stuck", "--all", "--watch", "1")
    assert (done.returncode, done.stdout) == (2, "")
