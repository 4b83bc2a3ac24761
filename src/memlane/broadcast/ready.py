"""Waits for many queues by one sleep."""

from __future__ import annotations

import select
from itertools import count
from math import ceil
from typing import TYPE_CHECKING, Any, TypeVar

from memlane._base.deadline import Deadline
from memlane.errors import InvalidArgument, TimedOut

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memlane.broadcast.queue import MessageQueue

Queue = TypeVar("Queue", bound="MessageQueue[Any]")

_LONGEST = 86400.0  # seconds; poll() takes milliseconds as a 32-bit int
_turns = count(1)


def first_ready(queues: Iterable[Queue], timeout: float | None = None) -> Queue:
    """Waits until one of these queues' readers has a message, or an end, and returns that queue.

    Nothing is consumed: call `dequeue` on it. If several are ready, it is the one that was returned
    longest ago. A queue whose writer has closed or died is ready, too, until you leave it out.

    Args:
        queues: readers, as many as you like; each has a descriptor (`ulimit -n`).
        timeout: in seconds; 0 polls.

    Raises:
        TimedOut: after `timeout` seconds none is ready.
        InvalidArgument: there is none to wait for.
        WrongRole, Closed, WrongProcess, SystemFault: as `MessageQueue.fileno`, of any of them.
    """
    deadline = Deadline(timeout)
    watched = [(queue, queue._watch_of("first_ready")) for queue in queues]
    if not watched:
        raise InvalidArgument("first_ready needs at least one queue")
    for queue, _ in watched:
        queue._check()
    poller = select.poll()
    for _, watch in watched:
        poller.register(watch, select.POLLIN)
    while True:
        ready = [queue for queue, watch in watched if watch.is_readable]
        if ready:
            first = min(ready, key=lambda queue: queue._turn)
            first._turn = next(_turns)
            return first
        if deadline.has_passed():
            raise TimedOut(
                f"timed out after {timeout} s; none of {len(watched)} queues is ready", timeout
            )
        poller.poll(ceil(1000 * deadline.left(_LONGEST)))
