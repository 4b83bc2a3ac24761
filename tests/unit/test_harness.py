"""The harness itself: what the other tests rely on."""

import os
import signal
import threading
import time

import pytest

from tests.harness import (
    Aside,
    Link,
    PeerGone,
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
    """Words go both ways and the value comes back."""
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
    """Listening to a process that ended says so instead of waiting."""
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
    """A thread that waits is told from one that runs."""
    go = threading.Event()
    aside = Aside(go.wait, 10).until_blocked()
    go.set()
    assert aside.result() is True
    with pytest.raises(ZeroDivisionError):
        Aside(lambda: 1 // 0).result()


def test_leaks_are_seen(tmp_path: os.PathLike[str]) -> None:
    """A new descriptor, thread, process, mapping or segment is found."""
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


@pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
def test_a_role_can_have_places_of_its_own() -> None:
    """A private /dev/shm has the size asked for, and a PID namespace starts at 1."""
    size = start(shm_size, method="spawn", command=private_shm("8m")).result()
    assert size == 8 * 1024 * 1024
    peer = start(echo, "a", method="spawn", command=own_pid_namespace())
    assert peer.hear() == 1
    peer.kill()
