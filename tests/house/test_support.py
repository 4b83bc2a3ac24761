"""The harness itself: what the other tests rely on."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support import (
    Aside,
    Crash,
    Doomed,
    Link,
    NeverCame,
    Passage,
    PeerGone,
    Spot,
    crash_everywhere,
    holdings,
    own_pid_namespace,
    private_shm,
    start,
    surplus,
    unshare_refusal,
    until,
)


def echo(link: Link, word: object) -> object:
    link.tell(os.getpid())
    return word, link.hear()


def fail(_link: Link) -> None:
    raise KeyError("of the role")


def shm_size(_link: Link) -> int:
    facts = os.statvfs("/dev/shm")
    return facts.f_blocks * facts.f_frsize


def test_a_role_talks_and_returns(method: str) -> None:
    """Words go both ways, and the value is returned."""
    peer = start(echo, "a", method=method)
    assert peer.hear() == peer.pid
    peer.tell("b")
    assert peer.result() == ("a", "b")


def test_the_error_of_a_role_is_raised_in_the_test(method: str) -> None:
    """A failing role fails the test with its own exception."""
    with pytest.raises(KeyError, match="of the role"):
        start(fail, method=method).result()


def test_a_killed_role_is_noticed(method: str) -> None:
    """A peer that was killed is gone, with the signal as its exit code."""
    peer = start(echo, "a", method=method)
    peer.hear()
    before = time.monotonic()
    assert before <= peer.kill() <= time.monotonic()
    assert peer.join() == -signal.SIGKILL


def test_a_word_from_the_dead_is_not_waited_for() -> None:
    """Listening to a process that ended raises instead of waiting."""
    peer = start(lambda _link: os._exit(3))
    with pytest.raises(PeerGone):
        peer.hear()
    assert peer.join() == 3


def test_a_stopped_role_goes_on() -> None:
    """A stopped peer keeps still until it is resumed."""
    peer = start(echo, "a")
    peer.hear()
    peer.stop()
    peer.tell("b")
    peer.resume()
    assert peer.result() == ("a", "b")


def test_blocked_calls_are_seen_from_outside() -> None:
    """A waiting thread is told from a running one."""
    go = threading.Event()
    aside = Aside(go.wait, 10).until_blocked()
    go.set()
    assert aside.result() is True
    with pytest.raises(ZeroDivisionError):
        Aside(lambda: 1 // 0).result()


def test_leaks_are_seen(tmp_path: os.PathLike[str]) -> None:
    """A new descriptor, thread, process, mapping or segment is detected."""
    before = holdings("harness-")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    name = f"/dev/shm/harness-{os.getpid()}"
    with open(name, "x"):
        found = "\n".join(surplus(before, holdings("harness-")))
    os.unlink(name)
    stop.set()
    thread.join()
    os.close(descriptor)
    assert all(kind in found for kind in ("segments: ", "descriptors: ", "threads: "))
    until(lambda: not surplus(before, holdings("harness-")), "all is gone again")


class Points:
    """Hooks of a system that consists only of points."""

    def __init__(self) -> None:
        self._stage = ""
        self._target: tuple[object, ...] = ()
        self._report = -1
        self._counts: dict[tuple[str, str], int] = {}

    def begin(self, stage: str) -> None:
        self._stage = stage

    def die_at(self, stage: str, point: str, passage: int, report: int) -> None:
        self._target, self._report = (stage, point, passage), report

    def passages(self) -> list[Passage]:
        return [(stage, point, count) for (stage, point), count in self._counts.items()]

    def come_to(self, point: str) -> None:
        here = self._stage, point
        self._counts[here] = self._counts.get(here, 0) + 1
        if self._target == (*here, self._counts[here]):
            os.write(self._report, time.monotonic_ns().to_bytes(8, "little"))
            os.kill(os.getpid(), signal.SIGKILL)


def put_and_take(_link: Link, begin: Callable[[str], object], points: Points, put: Path) -> None:
    begin("put")
    for _ in range(3):
        points.come_to("lock")
    put.touch()
    points.come_to("unlock")
    begin("take")
    points.come_to("lock")
    put.unlink()


def play_put_and_take(put: Path, spot: Spot | None) -> tuple[list[Passage], str]:
    points = Points()
    doomed = Doomed(points, spot, put_and_take, points, put)
    begun = time.monotonic()
    for stage, _ in doomed.stages():
        assert stage in ("put", "take")
        doomed.go()
    assert spot is None or begun < doomed.died < time.monotonic()
    left = put.exists()
    put.unlink(missing_ok=True)
    return doomed.passages, f"left {left}"


def test_a_role_dies_at_every_point(tmp_path: Path) -> None:
    """Once at each of its first passages, exactly there, whatever system the points are of."""
    crashes = crash_everywhere(partial(play_put_and_take, tmp_path / "put"), most=2)
    assert crashes == [
        Crash(Spot("put", "lock", 1), "left False"),
        Crash(Spot("put", "lock", 2), "left False"),
        Crash(Spot("put", "unlock", 1), "left True"),
        Crash(Spot("take", "lock", 1), "left True"),
    ]


def test_a_point_that_is_not_reached_again_is_told(tmp_path: Path) -> None:
    """A role that does not die where it should fails the test."""
    play = partial(play_put_and_take, tmp_path / "put")
    with pytest.raises(NeverCame, match="fourth"):
        play(Spot("put", "fourth", 1))

    def once(spot: Spot | None) -> tuple[list[Passage], str]:
        return ([("put", "lock", 1), ("put", "fourth", 1)], "") if spot is None else play(spot)

    with pytest.raises(AssertionError, match=r"nobody died at .*fourth"):
        crash_everywhere(once, most=1)


@pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
def test_a_role_can_have_places_of_its_own() -> None:
    """A private /dev/shm has the size asked for, and a PID namespace starts at 1."""
    size = start(shm_size, method="spawn", command=private_shm("8m")).result()
    assert size == 8 * 1024 * 1024
    peer = start(echo, "a", method="spawn", command=own_pid_namespace())
    assert peer.hear() == 1
    peer.kill()


WITHOUT_PACKAGES = """
import sys
import pytest
sys.modules.update(dict.fromkeys(sys.argv[1].split()))
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def test_tests_are_collected_where_optional_packages_are_missing() -> None:
    """Mooncake, torch and Ray have no wheels for some versions of Python and some machines."""
    folders = [str(Path(__file__).parents[1] / name) for name in ("tiers", "engines")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGES, "mooncake torch ray", *folders],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_only_files_of_tests_import_hypothesis() -> None:
    """tests/conftest.py sets the profile before it imports such a file; nobody else imports it."""
    tests = Path(__file__).parents[1]
    texts = {path: path.read_text() for path in tests.rglob("*.py")}
    users = [p for p, text in texts.items() if re.search(r"^(from|import) hypothesis", text, re.M)]
    assert len(users) > 10
    assert [path for path in users if not path.name.startswith("test_")] == []
    names = "|".join(f"{path.parent.name}.{path.stem}" for path in users)
    imports = re.compile(rf"^from tests\.({names}) ", re.M)
    assert [path for path, text in texts.items() if imports.search(text)] == []
