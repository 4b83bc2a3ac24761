"""Queues in a process that gevent has patched: `fileno()` lets other greenlets run."""

import subprocess
import sys

import pytest

from tests.support import PATIENCE
from tests.support.missing import package

PROGRAM = """
import sys
from gevent import monkey
monkey.patch_all(**eval(sys.argv[1]))
import gevent, gevent.select
from memlane import MessageQueue, TimedOut, Unsupported

local = sys.argv[2] == 'local'
try:
    writer = MessageQueue(1, int(local), connect_ip=None if local else '127.0.0.1')
except Unsupported as error:
    print(error)
    sys.exit()
reader = MessageQueue.create_from_handle(writer.export_handle(0), 0, timeout=90)
writer.wait_until_ready(90)
turns = 0

def others():
    global turns
    while True:
        turns += 1
        gevent.sleep(0)

def receive():
    while True:
        gevent.select.select([reader], [], [])
        try:
            return reader.dequeue(timeout=0), turns
        except TimedOut:
            pass

running, receiving = gevent.spawn(others), gevent.spawn(receive)
while turns < 100:  # while nothing comes
    gevent.sleep(0)
writer.enqueue('a message')
message, seen = receiving.get(timeout=90)
assert seen >= 100, seen
gevent.get_hub().threadpool.apply(writer.enqueue, ['by a thread'])
assert reader.dequeue(90) == 'by a thread'
running.kill()
writer.close()
reader.close()
print(message)
"""


def said(patched: str, where: str) -> str:
    """Returns what the program prints in a process of its own."""
    package("gevent")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, patched, where],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("patched", "where"),
    [
        ("{}", "local"),
        ("{'select': False, 'thread': False}", "local"),
        ("{'select': False, 'thread': False}", "remote"),
    ],
)
def test_other_greenlets_run_while_one_waits(patched: str, where: str) -> None:
    assert said(patched, where) == "a message"


@pytest.mark.parametrize("patched", ["{'select': False}", "{'thread': False}"])
def test_an_end_to_other_hosts_says_what_gevent_must_leave_alone(patched: str) -> None:
    """Fails without the guard: it waited for ever for a thread that was a greenlet."""
    assert "monkey.patch_all(select=False, thread=False)" in said(patched, "remote")
