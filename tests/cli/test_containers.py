"""Root sees the containers of its machine: each /dev/shm of its own, by who holds files in it."""

import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from memlane import MessageQueue
from memlane._base import processes
from memlane.cli import containers, metrics_of_all, users
from memlane.cli.containers import Container
from memlane.inspect import segment, stacks
from tests.support import PATIENCE, Link, Peer, run_memlane, start, until
from tests.support.exporters import exporter
from tests.support.processes import children_of
from tests.support.queues import name_in
from tests.support.regions import region_of

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("commands")]

NOBODY = 65534
COMMAND = (sys.executable, "-m", "memlane")
MOUNT = 'mount -t tmpfs -o mode=1777 tmpfs /dev/shm && exec "$@"'


OWN = ("--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
CONTAINER = ("unshare", *OWN, "sh", "-c", MOUNT, "sh", sys.executable)
NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x00020000  # CLONE_NEWUSER, _NEWPID, _NEWNS


def block(link: Link) -> None:
    """Role: waits in a full queue for a reader that is its own; its files have no names any more,
    but for a region's."""
    with ExitStack() as ends:
        queue = ends.enter_context(MessageQueue(1, 1, None, 64, 2, name="inside"))
        reader = MessageQueue.create_from_handle(queue.handle, 0)
        ends.enter_context(reader)
        queue.wait_until_ready(PATIENCE)
        region = ends.enter_context(region_of("inside"))
        assert region is not None
        link.tell((os.getpid(), name_in(queue.handle)))
        while True:
            queue.enqueue(0)


def block_rootless(link: Link) -> None:
    """Role: the same in a container that another user has made, who is root in there."""
    libc = ctypes.CDLL(None, use_errno=True)
    users.become(users.User(NOBODY, NOBODY))
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE
    assert libc.unshare(NEW_NAMESPACES) == 0
    for kind in ("uid", "gid"):
        Path("/proc/self/setgroups").write_text("deny")
        Path(f"/proc/self/{kind}_map").write_text(f"0 {NOBODY} 1")
    if os.fork():
        os.wait()
        os._exit(0)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    for kind, place in ((b"tmpfs", b"/dev/shm"), (b"proc", b"/proc")):
        assert libc.mount(kind, place, kind, 0, None) == 0
    block(link)


def inside(peer: Peer) -> int:
    """The pid here of who plays the role in there."""
    (found,) = children_of(peer.pid)
    return found


def in_containers(*arguments: str) -> dict[int, dict[str, Any]]:
    """Returns what root's command says of each container, by the pid of its first process."""
    done = run_memlane(*arguments, "--all", "--json")
    assert done.stderr == "", done
    listed = json.loads(done.stdout)["users"]
    return {each["container"]["pid"]: each for each in listed if each["container"] is not None}


def until_stuck(peer: Peer) -> dict[str, Any]:
    """Returns what is said of the container once its queue is full: who waits for whom."""
    waits: list[dict[str, Any]] = []

    def is_stuck() -> bool:
        waits[:] = in_containers("stuck", "--after", "0")[peer.pid]["stuck"]
        return bool(waits)

    until(is_stuck, "its queue is full")
    (wait,) = waits
    return wait


@pytest.fixture(params=["root", "rootless"])
def blocked(request: pytest.FixtureRequest) -> Iterator[tuple[Peer, int, int]]:
    """A process that is stuck in a container, its pid here, and its user."""
    is_root = request.param == "root"
    peer = start(block, method="spawn", command=CONTAINER) if is_root else start(block_rootless)
    there, _ = peer.hear()
    pid = inside(peer)
    assert there != pid
    yield peer, pid, 0 if is_root else NOBODY
    peer.kill()


def test_root_sees_who_is_stuck_in_a_container_by_its_pid_here(
    blocked: tuple[Peer, int, int],
) -> None:
    peer, pid, uid = blocked
    wait = until_stuck(peer)
    seen = in_containers("stuck", "--after", "0", "--no-stacks")[peer.pid]
    assert (seen["uid"], seen["problem"]) == (uid, None)
    assert (wait["label"], wait["waiter"]["pid"]) == ("inside", pid)
    assert wait["waiter"]["name"] == processes.name_of(pid) != ""
    assert [(who["pid"], who["state"]) for who in wait["awaited"]] == [(pid, "running")]


def test_root_lists_the_segments_of_a_container(blocked: tuple[Peer, int, int]) -> None:
    peer, pid, uid = blocked
    listed = {each["kind"]: each for each in in_containers("ls")[peer.pid]["segments"]}
    assert {kind: each["pids"] for kind, each in listed.items()} == {
        "queue": [pid],
        "region": [pid],
    }
    (holder,) = listed["region"]["participants"]
    assert (holder["pid"], holder["state"]) == (pid, "running")
    assert (
        f"user {uid} of the mount namespace of process {peer.pid}"
        in run_memlane("ls", "--all").stdout
    )
    assert f"\nwriter   {pid} " in run_memlane("show", "--all", "inside").stdout
    assert "inside" not in run_memlane("ls").stdout


def test_metrics_say_whose_they_are(blocked: tuple[Peer, int, int]) -> None:
    peer, pid, uid = blocked
    end = f'memlane_stuck_seconds{{queue="inside",role="writer",rank="",pid="{pid}"'
    lines: list[str] = []

    def is_shown() -> bool:  # from half a second on
        lines[:] = run_memlane("export", "--all", "--once").stdout.splitlines()
        return any(line.startswith(end) for line in lines)

    until(is_shown, "the wait is a metric")
    names = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(names) == len(set(names)), "Prometheus refuses a scrape with two equal ones"
    (stuck,) = [line for line in lines if line.startswith(end)]
    assert f'uid="{uid}",pod="",container="pid {peer.pid}"' in stuck
    assert 'memlane_look_errors_total{uid="0",pod="",container=""} 0.0' in lines


def test_an_exporter_for_all_runs_nothing_of_its_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may have started it where others can write."""
    (tmp_path / "typer.py").write_text("raise SystemExit('theirs')")
    monkeypatch.chdir(tmp_path)
    assert metrics_of_all.Source().metrics().startswith("# HELP memlane_")


def test_an_exporter_for_all_serves_metrics_and_nothing_else() -> None:
    with exporter("--all") as server:
        assert "memlane_shm_bytes{" in server.metrics()
        assert server.get("/json") == (404, "served: /metrics\n")


def forge(link: Link, innocent: tuple[int, int, int]) -> None:
    """Role: writes another process into the slot of its reader, with a namespace and a start."""
    queue = MessageQueue(1, 1, None, 64, 2, name="forged")
    reader = MessageQueue.create_from_handle(queue.handle, 0)
    pid, ticks, namespace = innocent
    path = Path("/dev/shm", name_in(queue.handle))
    own = struct.pack("<QQ", os.getpid(), processes.start_ticks(os.getpid()))
    data = path.read_bytes()
    assert reader is not None
    with path.open("r+b") as file:
        file.seek(data.rindex(own))
        file.write(struct.pack("<QQQ", pid, ticks, namespace))
    link.tell(None)
    while True:
        queue.enqueue(0)


def test_a_process_that_holds_nothing_in_the_container_is_not_named_as_one_of_it() -> None:
    namespace = os.stat("/proc/self/ns/pid").st_ino
    innocent = (os.getpid(), processes.start_ticks(os.getpid()), namespace)
    peer = start(forge, innocent, method="spawn", command=CONTAINER)
    peer.hear()
    (who,) = until_stuck(peer)["awaited"]
    assert (who["pid"], who["state"], who["name"]) == (os.getpid(), "unknown", "")
    assert "stack" not in who
    peer.kill()


def lead_elsewhere(link: Link, target: str) -> None:
    """Role: its /dev/shm is a link, over which the real one was mounted."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(b"tmpfs", b"/dev", b"tmpfs", 0, None) == 0
    os.symlink(target, "/dev/shm")
    link.tell(None)
    link.hear()


@pytest.mark.parametrize("target", ["/proc/self/cwd", "/tmp", "/dev"])
def test_a_link_in_the_place_of_a_containers_folder_is_not_followed(target: str) -> None:
    peer = start(lead_elsewhere, target, method="spawn", command=CONTAINER)
    peer.hear()
    pid = inside(peer)
    asked = Container(os.stat(target).st_dev, (pid,), None, ())
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        containers.entered(asked, 0)
    peer.kill()


def hold(link: Link) -> None:
    """Role: has a file in /dev/shm."""
    with open("/dev/shm/psm_file", "w"):
        link.tell(None)
        link.hear()


def test_another_file_system_than_the_one_that_was_seen_is_not_entered() -> None:
    peer = start(hold, method="spawn", command=CONTAINER)
    peer.hear()
    with pytest.raises(OSError, match="something else is mounted"):
        containers.entered(Container(1, (inside(peer),), None, ()), 0)
    peer.kill()


def shows_its_rights() -> int:
    print(*(line for line in Path("/proc/self/status").read_text().splitlines() if "Cap" in line))
    return 0


def test_who_looks_as_a_containers_root_has_no_right_of_roots() -> None:
    peer = start(hold, method="spawn", command=CONTAINER)
    peer.hear()
    pid = inside(peer)
    device = os.stat(f"/proc/{pid}/root/dev/shm").st_dev
    user = users.User(0, NOBODY, Container(device, (pid,), None, ()))
    ((_, answer),) = users.answers_as([user], shows_its_rights, PATIENCE)
    assert {line for line in answer.text.split() if not line.startswith("Cap")} == {"0" * 16}
    peer.kill()


def asks_for_a_stack() -> int:
    own = {os.getpid(): processes.start_ticks(os.getpid()) or 0}
    print(stacks.stacks_of(own))
    return 0


def test_no_program_looks_at_a_containers_root_with_roots_number() -> None:
    """A path in there may lead to a device of this machine."""
    peer = start(hold, method="spawn", command=CONTAINER)
    peer.hear()
    (user,) = [each for each in users.in_containers()[0] if peer.pid in _pids(each)]
    ((_, answer),) = users.answers_as([user], asks_for_a_stack, PATIENCE)
    assert "of a container's root none is taken" in answer.text
    peer.kill()


def test_processes_that_root_may_not_look_at_are_no_all_clear() -> None:
    done = subprocess.run(
        ["setpriv", "--bounding-set=-sys_ptrace", *COMMAND, "ls", "--all"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4
    assert "without CAP_SYS_PTRACE cannot look at" in done.stdout


def test_a_container_that_has_ended_is_named_as_not_looked_at() -> None:
    peer = start(hold, method="spawn", command=CONTAINER)
    peer.hear()
    user = users.User(0, NOBODY, Container(1, (inside(peer),), None, ()))
    peer.kill()
    ((_, answer),) = users.answers_as([user], shows_its_rights, PATIENCE)
    assert answer.code == 4
    assert answer.problem


def test_who_makes_many_mount_namespaces_hides_no_other_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of one owner of user namespaces come one at a time, between the others'."""

    def hundred() -> tuple[list[list[int]], int]:
        return [[number] for number in range(1000, 1100)], 0

    monkeypatch.setattr(containers, "_by_mount_namespace", hundred)
    monkeypatch.setattr(containers, "_device_of", lambda pid: pid)
    monkeypatch.setattr(containers, "_users", lambda device, pids: [0, 1])
    monkeypatch.setattr(containers, "_owner", lambda pid: 0 if pid == 1099 else 70001)
    found, left, _ = users.in_containers()
    assert 1099 in {user.container.pids[0] for user in found if user.container is not None}
    assert (len(found), left) == (32, 168)


def test_a_users_many_files_in_a_container_are_a_problem_and_no_all_clear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(containers, "_MOST_FILES", 0)
    peer = start(hold, method="spawn", command=CONTAINER)
    peer.hear()
    (user,) = [each for each in users.in_containers()[0] if peer.pid in _pids(each)]
    ((_, answer),) = users.answers_as([user], shows_its_rights, PATIENCE)
    assert (answer.code, "more than 0 files" in answer.problem) == (4, True)
    peer.kill()


def _pids(user: users.User) -> tuple[int, ...]:
    return () if user.container is None else user.container.pids


def test_a_region_of_another_pid_namespace_has_holders_without_names() -> None:
    """The number in its lock is another process's here."""
    found = segment.Found("", set(), True, {os.getpid()}, set())
    who = segment._holder(1, found, segment.Known())
    assert (who.pid, who.state, who.start_ticks) == (1, "unknown", None)
