"""Strangers cannot join, and nobody at the door makes the queue wait."""

import os
import socket
import stat
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from memlane import InvalidArgument, LayoutMismatch, MessageQueue, SegmentRefused, TimedOut
from memlane._doors.admission import MOST_BYTES, MOST_WAITING
from memlane._doors.door import MOST_CALLERS
from memlane._doors.folder import folder_path
from tests.support import PATIENCE, Link, assert_in_time, start, until
from tests.support.queues import refuses


def knocks(path: Path) -> socket.socket:
    """A connection to the door at that path."""
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.settimeout(PATIENCE)
    one.connect(str(path))
    return one


def test_the_folder_is_this_users_alone(run: Path) -> None:
    run.mkdir(mode=0o750)
    for _ in range(2):
        with refuses(SegmentRefused, match=rf"{run} has mode 750: others could .* `chmod 700` it"):
            MessageQueue(1, name="steps", serve=True)
        with refuses(SegmentRefused):
            MessageQueue.open("steps", timeout=PATIENCE)
    run.chmod(0o700)
    with MessageQueue(1, name="steps", serve=True):
        MessageQueue.open("steps").close()


@pytest.mark.root
def test_the_folder_of_another_user_is_refused(run: Path) -> None:
    run.mkdir(mode=0o700)
    os.chown(run, 12345, 12345)
    with refuses(SegmentRefused, match="belongs to uid 12345, not to .*; set MEMLANE_RUN to a fol"):
        MessageQueue(1, name="steps", serve=True)
    with refuses(SegmentRefused):
        MessageQueue.open("steps", timeout=PATIENCE)


@pytest.mark.parametrize("what", ["link", "file"])
def test_a_link_in_place_of_the_folder_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    trap = tmp_path / "trap"
    trap.symlink_to("mine") if what == "link" else trap.touch()
    monkeypatch.setenv("MEMLANE_RUN", str(trap))
    with refuses(SegmentRefused, match="is a link or no folder"):
        MessageQueue(1, name="steps", serve=True)
    with refuses(SegmentRefused):
        MessageQueue.open("steps", timeout=PATIENCE)


def test_where_the_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert folder_path() == str(tmp_path / "run")
    monkeypatch.delenv("MEMLANE_RUN")
    assert folder_path() == str(tmp_path / "memlane")
    for other in (str(tmp_path / "none"), ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", other)
        assert folder_path() == f"/tmp/memlane-{os.geteuid()}"


@pytest.mark.root
def test_the_folder_of_the_user_who_called_sudo_is_not_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEMLANE_RUN")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    os.chown(tmp_path, 12345, 12345)
    assert folder_path() == "/tmp/memlane-0"


@pytest.mark.parametrize("kind", ["file", "link", "stream"])
def test_what_is_no_door_is_not_touched(kind: str, run: Path, tmp_path: Path) -> None:
    run.mkdir(mode=0o700)
    path = run / "steps.sock"
    with ExitStack() as stack:
        if kind == "file":
            path.write_text("mine")
        elif kind == "link":
            path.symlink_to(tmp_path / "elsewhere")
        else:
            other = stack.enter_context(socket.socket(socket.AF_UNIX))
            other.bind(str(path))
            other.listen()
        with refuses(SegmentRefused, match="remove it"):
            MessageQueue(1, name="steps", serve=True)
        with refuses(SegmentRefused, match="remove it"):
            MessageQueue.open("steps", timeout=PATIENCE)
        assert (
            stat.S_IFMT(path.lstat().st_mode)
            == {
                "file": stat.S_IFREG,
                "link": stat.S_IFLNK,
                "stream": stat.S_IFSOCK,
            }[kind]
        )
        path.unlink()
    with MessageQueue(1, name="steps", serve=True):
        MessageQueue.open("steps").close()


@pytest.mark.root
def test_another_user_gets_no_answer(run: Path) -> None:
    """Even one who was let into the folder."""
    with MessageQueue(2, name="steps", serve=True) as writer:
        for path in (run, *run.parents):
            if path != Path("/") and path.stat().st_uid == 0 and path != Path("/tmp"):
                path.chmod(path.stat().st_mode | 0o055)
        (run / "steps.sock").chmod(0o666)
        stranger = start(asks_as_another, str(run / "steps.sock"))
        assert stranger.result() == [b""] * 20
        run.chmod(0o700)
        assert [one.state for one in writer.statistics().readers] == ["absent", "absent"]
        MessageQueue.open("steps").close()


def asks_as_another(_link: Link, path: str) -> list[bytes]:
    """Role: another user, who asks for a place; returns the answers."""
    os.setgroups([])
    os.setresgid(12345, 12345, 12345)
    os.setresuid(12345, 12345, 12345)
    answers = []
    for _ in range(20):
        with knocks(Path(path)) as one:
            with suppress(BrokenPipeError):
                one.send(b'{"version":1,"kind":"MessageQueue"}')
            try:
                answers.append(one.recv(1 << 16))
            except ConnectionResetError:
                answers.append(b"")
    return answers


QUESTIONS = [
    b"{",
    b"\x80\x04N.",
    b"[]",
    b"null",
    b'"text"',
    b"{}",
    b'{"version":1}',
    b'{"version":"1","kind":"MessageQueue"}',
    b'{"version":1,"kind":"MessageQueue","rank":"0"}',
    b'{"version":1,"kind":"MessageQueue","rank":-1}',
    b'{"version":1,"kind":"MessageQueue","rank":1e400}',
    b'{"version":1,"kind":"MessageQueue","rank":99999999999999999999999}',
    b'{"version":1,"kind":"MessageQueue","but_not":[0,[[]]]}',
    b"[" * 10000,
    b"\xff\xfe",
    os.urandom(4000),
    bytes(MOST_BYTES + 1),
]


def test_nonsense_is_refused(run: Path) -> None:
    """And nothing else happens, to the queue or to those who ask after it."""
    with MessageQueue(1, name="steps", serve=True) as writer:
        for question in QUESTIONS:
            with knocks(run / "steps.sock") as one:
                one.send(question)
                answer = one.recv(1 << 16)
                assert answer == b"" or b'"Refused"' in answer, (question, answer)
                assert one.recv(1) == b""
        assert [one.state for one in writer.statistics().readers] == ["absent"]
        MessageQueue.open("steps").close()


def test_another_version_or_kind_is_told_so(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MessageQueue(1, name="steps", serve=True):
        with knocks(run / "steps.sock") as one:
            one.send(b'{"version":1,"kind":"Gather"}')
            assert b"'steps' is a MessageQueue: use MessageQueue.open()" in one.recv(1 << 16)
        with monkeypatch.context() as patch:
            patch.setattr("memlane._doors.search.VERSION", 2)
            with refuses(LayoutMismatch, match="use the same version of memlane on both sides"):
                MessageQueue.open("steps", timeout=PATIENCE)
        with refuses(InvalidArgument):
            MessageQueue.open("steps", -1)


def test_a_place_is_free_again_when_its_holder_is_gone(run: Path) -> None:
    """One that was given a place and was killed before it attached."""
    with MessageQueue(1, max_chunks=2, name="steps", serve=True) as writer:
        MessageQueue.open("steps").close()
        for number in range(3):
            with knocks(run / "steps.sock") as one:
                one.send(b'{"version":1,"kind":"MessageQueue"}')
                assert b'"Handed"' in one.recv(1 << 16)
                with refuses(TimedOut, match="another process is about to attach as reader 0$"):
                    MessageQueue.open("steps", timeout=0.05)
            for _ in range(10):  # nobody is waited for who has never come
                writer.enqueue(number, timeout=0)
        with MessageQueue.open("steps", timeout=PATIENCE) as reader:
            writer.enqueue("next", timeout=0)
            assert reader.dequeue(PATIENCE) == "next"


def test_a_flood_of_connections_keeps_nobody_waiting(run: Path) -> None:
    """Those who say nothing, stay and are many: others get in once they are timed out at the
    latest, and the writer notices nothing."""
    with ExitStack() as stack:
        writer = stack.enter_context(MessageQueue(2, name="steps", serve=True, late_readers=True))
        reader = stack.enter_context(MessageQueue.open("steps"))
        flood = [stack.enter_context(knocks(run / "steps.sock")) for _ in range(4 * MOST_CALLERS)]
        until(lambda: descriptors() >= len(flood) + MOST_CALLERS, "the door is full")
        assert descriptors() < len(flood) + MOST_CALLERS + 100
        for number in range(1000):
            began = time.monotonic()
            writer.enqueue(number, timeout=0.05)
            assert reader.dequeue(PATIENCE) == number
            assert_in_time(0.1, began)
        for one in flood:
            one.close()
        MessageQueue.open("steps", timeout=PATIENCE).close()


def test_those_who_wait_for_a_place_shut_nobody_out(run: Path) -> None:
    """They are many, and others get a free place at once; one too many is told so."""
    with ExitStack() as stack:
        stack.enter_context(MessageQueue(2, name="steps", serve=True))
        doomed = start(attaches_to_zero)
        doomed.hear()
        doomed.kill()
        for number in range(MOST_WAITING + 3):
            one = stack.enter_context(knocks(run / "steps.sock"))
            one.send(b'{"version":1,"kind":"MessageQueue","rank":0}')
            answer = b'"Waits"' if number < MOST_WAITING + 2 else b"too many wait already"
            assert answer in one.recv(1 << 16)
        MessageQueue.open("steps", 1, timeout=PATIENCE).close()


def attaches_to_zero(link: Link) -> None:
    """Role: a reader that is killed."""
    with MessageQueue.open("steps", 0, timeout=PATIENCE):
        link.tell()
        link.hear()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_those_who_say_nothing_are_sent_away(run: Path) -> None:
    """Also those who were given a place, and do not take it."""
    with (
        MessageQueue(1, name="steps", serve=True),
        knocks(run / "steps.sock") as silent,
        knocks(run / "steps.sock") as slow,
    ):
        slow.send(b'{"version":1,"kind":"MessageQueue"}')
        assert b'"Handed"' in slow.recv(1 << 16)
        assert silent.recv(1) == b""
        MessageQueue.open("steps", timeout=PATIENCE).close()
        assert slow.recv(1) == b""


def test_a_server_without_descriptors_accepts_later(run: Path) -> None:
    server = start(serves_with_few_files)
    server.hear()
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(knocks(run / "steps.sock"))
        with refuses(TimedOut):
            MessageQueue.open("steps", timeout=0.3)
    MessageQueue.open("steps", timeout=PATIENCE).close()
    server.tell()
    assert server.result() < 1.0


def serves_with_few_files(link: Link) -> float:
    """Role: serves in a process that has room for a few connections; returns the processor time
    that it took."""
    import resource

    with MessageQueue(1, name="steps", serve=True):
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 10, 4096))
        began = time.process_time()
        link.tell()
        link.hear()
        return time.process_time() - began
