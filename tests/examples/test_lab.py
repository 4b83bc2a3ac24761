"""Hosts and cables: what a cable does to frames; nothing of them is ever left behind."""

import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import lab
from tests.support import PATIENCE, Link, start, until
from tests.support.hosts import Neighbour, neighbour

pytestmark = pytest.mark.hosts

ECHO = """
import socket, sys
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind((sys.argv[1], 4000))
print("ready", flush=True)
while True:
    end.sendto(*end.recvfrom(100))
"""


SPEAK = """
import socket, sys
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind((sys.argv[1], 0))
end.sendto(b"hello", (sys.argv[2], 4000))
print(end.recv(100).decode(), end="")
"""


@contextmanager
def echo(there: Neighbour) -> Iterator[socket.socket]:
    """A socket whose datagrams the neighbour returns."""
    command = [*there.command, "-c", ECHO, there.there]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end,
    ):
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            end.connect((there.there, 4000))
            yield end
        finally:
            server.kill()


def received(end: socket.socket, count: int = 0) -> list[int]:
    """So many numbers that come back, and those that are right behind them."""
    numbers: list[int] = []
    while select.select([end], [], [], PATIENCE if len(numbers) < count else 0.02)[0]:
        numbers += struct.unpack("q", end.recv(100))
    return numbers


def send(end: socket.socket, numbers: range) -> None:
    for number in numbers:
        end.send(struct.pack("q", number))


def test_a_cable_delays() -> None:
    """Each way; a frame with a shorter delay still waits for those sent before it."""
    with neighbour() as there, echo(there) as end:
        there.cable.set(delay_ms=20)
        sent = time.monotonic()
        send(end, range(1))
        assert select.select([end], [], [], PATIENCE)[0]
        # Who has the address is asked, and answered, first: also by the other.
        assert time.monotonic() - sent >= 4 * 0.02
        assert received(end, 1) == [0]
        there.cable.set(jitter_ms=5)
        send(end, range(50))
        assert received(end, 50) == list(range(50))


def test_a_cable_loses() -> None:
    """That share of all frames, at random and not because of a queue; the rest arrives in order."""
    with neighbour() as there, echo(there) as end:
        send(end, range(1))
        assert received(end, 1) == [0]
        there.cable.set(loss_percent=10, jitter_ms=1)
        before = there.cable.counts()
        back: list[int] = []

        def missing() -> int:
            """Returns how many of the sent are neither back nor lost; frames are lost that carry
            none."""
            back.extend(received(end))
            return sent - len(back) - (there.cable.counts().lost - before.lost)

        for sent in range(50, 1001, 50):  # fewer at a time than a queue has room for
            send(end, range(sent - 50, sent))
            until(lambda: missing() <= 0, "all have come back, or are lost")
        assert missing() >= -5
        assert back == sorted(set(back))
        assert 700 < len(back) < 900  # 810 on average


def test_a_cable_is_pulled_and_plugged() -> None:
    """Frames in flight are lost, too."""
    with neighbour() as there, echo(there) as end:
        send(end, range(1))
        assert received(end, 1) == [0]
        there.cable.set(delay_ms=1e3 * PATIENCE)
        send(end, range(1, 2))
        for _ in range(2):  # after the second answer it is in the cable
            there.cable.counts()
        there.pull()
        there.cable.set()
        there.plug()
        send(end, range(2, 3))
        assert received(end, 1) == [2]
        there.pull()
        send(end, range(3, 4))
        assert received(end) == []
        there.plug()
        send(end, range(4, 5))
        # The kernel may have kept 3, if it had to ask whose the address is before it could send it.
        until(lambda: 4 in received(end, 1))


def test_hosts_do_not_share_memory() -> None:
    """A cable need not involve this host: here it connects two others."""
    with lab.Host() as one, lab.Host() as other, lab.Cable(one, other) as cable:
        for host in (one, other):
            subprocess.run([*host.command, "touch", f"/dev/shm/of-{host.pid}"], check=True)
            seen = subprocess.run([*host.command, "ls", "/dev/shm"], capture_output=True, text=True)
            assert seen.stdout == f"of-{host.pid}\n"
            assert not Path(f"/dev/shm/of-{host.pid}").exists()
        command = [*other.command, sys.executable, "-c", ECHO, cable.addresses[1]]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            speak = [*one.command, sys.executable, "-c", SPEAK, *cable.addresses]
            heard = subprocess.run(speak, capture_output=True, check=True, timeout=PATIENCE)
            server.kill()
        assert heard.stdout == b"hello"


def owner(link: Link) -> None:
    """Role: has a host, and never closes it."""
    before = socket.if_nameindex()
    with lab.Host() as host, lab.Cable(None, host) as cable:
        number = int(cable.addresses[0].split(".")[2])
        device = socket.if_nametoindex(f"cable{number}")
        assert device not in dict(before)
        link.tell((device, host.pid, cable.pid))
        link.hear()


def test_nothing_is_left_of_who_is_killed() -> None:
    peer = start(owner)
    device, *helpers = peer.hear()
    assert device in dict(socket.if_nameindex())
    assert not any(map(is_gone, helpers))
    peer.kill()
    until(lambda: device not in dict(socket.if_nameindex()), "the device is gone")
    until(lambda: all(map(is_gone, helpers)), "its processes are gone")


def is_gone(pid: int) -> bool:
    """Or dead, and not yet reaped by this process, which inherits orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_what_is_refused_is_told() -> None:
    """By the program that would have been the cable; process 0 has no network."""
    with lab.Host() as host:
        host_that_is_gone = lab.Host()
        host_that_is_gone.close()
        with pytest.raises(lab.Refused, match=r"no cable: .*No such file"):
            lab.Cable(host, host_that_is_gone)
