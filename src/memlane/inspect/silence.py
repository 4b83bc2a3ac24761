"""Engines in which nothing moves, though nobody is seen to wait in a queue for somebody else.

Such an engine is idle, or it hangs where no queue shows it: in the scheduler, the thread that sends
outputs, the API server, the loading of a model. Stacks tell the two apart: a process is at rest if
every thread of it waits for work. Which of those that are not at rest hangs is for the reader.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

from memlane._base import processes
from memlane.inspect.decisions import Process, process_of
from memlane.inspect.foreign.rings import Quiet
from memlane.inspect.segment import FOLDER, Segment, device
from memlane.inspect.stacks import NoStack, Stack, Thread

Stacks = Mapping[int, Stack | NoStack]
Take = Callable[[Mapping[int, int]], Stacks]  # stacks by pid, from the ticks of their starts

_TITLES = ("VLLM::", "sglang::")  # as engines call their processes
_AGAIN = 1.0  # seconds between two looks at processes without a queue
_BUSY = 0.03  # of a core: a process that uses more computes
# Functions of the kernel in which a thread waits for a socket, a pipe or a child. A lock and a
# queue of Python are both a futex, so that says nothing.
_FOR_INPUT = ("poll", "pipe_read", "select", "unix_stream", "skb_wait", "sk_wait", "accept")

# Where else a process around an engine may wait: for a child, a signal, a moment, a terminal.
_FOR_MORE = (*_FOR_INPUT, "pause", "sigsuspend", "nanosleep", "tty_read")
_FOR_A_CHILD = "do_wait"  # the whole name: that of a lock is futex_do_wait


@dataclass(frozen=True)
class Member:
    """A process of a silent engine.

    Attributes:
        pid: of it.
        title: of it.
        condition: what /proc says of it, in words.
        sleeps_in: the function of the kernel in which its main thread sleeps.
        stack: of it, or why there is none.
        is_at_rest: every thread waits for work; None if only its stack could tell.
        active: its threads that do not.
    """

    pid: int
    title: str
    condition: str
    sleeps_in: str
    stack: Stack | NoStack
    is_at_rest: bool | None
    active: tuple[Thread, ...] = ()


@dataclass(frozen=True)
class Silence:
    """An engine in which nothing moves, and not all rest.

    Attributes:
        queues: the names of its segments and rings; empty if it has none.
        seconds: for which none of them has moved, or else no stack has changed.
        members: its processes, those that are not at rest first.
    """

    queues: tuple[str, ...]
    seconds: float
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Family:
    """The processes that an engine's queues join, before they are looked at."""

    queues: tuple[str, ...]
    seconds: float
    members: frozenset[int]
    waiting: frozenset[int] = frozenset()  # those whose slots say so
    kin: frozenset[int] = frozenset()  # the members, and the processes around them


# Pure ---------------------------------------------------------------------------------------------


def engines_in(segments: Iterable[Segment], now: float) -> list[Family]:
    """The engines on memlane's queues: two processes write to each other, or one of two queues has
    the answers to the other, and all others share a queue with them. A queue that only carries data
    one way is none: its writer may take as long as it likes."""
    queues = [each for each in segments if each.kind == "queue" and each.participants]
    sides = [tuple(map(process_of, each.participants)) for each in queues]
    ways = {(side[0], reader) for side in sides for reader in side[1:] if side[0] and reader}
    asked = {each.answers_to for each in queues if each.answers_to}
    core = {one for one, other in ways if one != other and (other, one) in ways}
    core |= {
        side[0] for each, side in zip(queues, sides, strict=True) if side[0] and each.id in asked
    }
    joined = [
        (queue, set(filter(None, side)))
        for queue, side in zip(queues, sides, strict=True)
        if core & set(filter(None, side))
    ]
    found = []
    for group in _grouped(joined):
        people = [who for queue, _ in group for who in queue.participants]
        moved = max((who.last_progress or 0.0 for who in people), default=now)
        waiting = {who.pid for who in people if who.activity == "waiting" and who.pid is not None}
        found.append(
            Family(
                tuple(queue.name for queue, _ in group),
                now - moved,
                frozenset(each.pid for _, members in group for each in members),
                frozenset(waiting),
            )
        )
    return found


def _grouped(
    joined: Iterable[tuple[Segment, set[Process]]],
) -> list[list[tuple[Segment, set[Process]]]]:
    """Queues that have a process in common, directly or through others."""
    groups: list[list[tuple[Segment, set[Process]]]] = []
    for queue, members in joined:
        touching = [group for group in groups if any(members & others for _, others in group)]
        groups = [group for group in groups if group not in touching]
        groups.append([*chain.from_iterable(touching), (queue, members)])
    return groups


def kin(
    members: Iterable[int],
    parents: Mapping[int, int],
    programs: Callable[[int], str | None],
    titled: Container[int],
) -> set[int]:
    """The processes, and of those that run the same program: what they have started, such as a
    worker that has no queue yet, and what has started an engine's process, `titled`: its server.
    Who has started others may be any launcher."""
    found = set(members)
    above = {
        parents[pid]
        for pid in found
        if pid in titled and parents.get(pid) and _same(parents[pid], pid, programs)
    }
    return found | above | below(found, parents, programs)


def below(
    members: Iterable[int], parents: Mapping[int, int], programs: Callable[[int], str | None]
) -> set[int]:
    """The processes, and those that they have started that run the same program."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found = set(members)
    left = list(found)
    while left:
        parent = left.pop()
        for pid in children.get(parent, ()):
            if pid not in found and _same(parent, pid, programs):
                found.add(pid)
                left.append(pid)
    return found


def _same(one: int, other: int, programs: Callable[[int], str | None]) -> bool:
    program = programs(one)
    return program is not None and program == programs(other)


def seen_as(
    pid: int,
    title: str,
    condition: processes.Condition,
    stack: Stack | NoStack,
    *,
    waits: bool,
    sleeping: frozenset[int] = frozenset(),
) -> Member:
    """A process, with what its stack and /proc say.

    Args:
        waits: its slot in a queue says that it waits there.
        sleeping: its threads that are in a sleep; one beside the main thread does so between two
            rounds of what it does now and then.
    """
    made = partial(Member, pid, title, condition.words, condition.sleeps_in, stack)
    if condition.state != "running":
        return made(is_at_rest=False)
    if isinstance(stack, Stack):
        active = tuple(
            thread
            for thread in stack.threads
            if thread.frames
            and not thread.is_at_rest
            and (thread.is_main or thread.id not in sleeping)
        )
        return made(is_at_rest=not active, active=active)
    for_input = any(each in condition.sleeps_in for each in _FOR_INPUT)
    return made(is_at_rest=True if waits or for_input else None)


# Looking ------------------------------------------------------------------------------------------


class Processes:
    """All processes at one moment: parents, programs, and the titles that engines give."""

    def __init__(self) -> None:
        self.parents = processes.parents()
        self._programs: dict[int, str | None] = {}

    def program(self, pid: int) -> str | None:
        if pid not in self._programs:
            self._programs[pid] = processes.program_of(pid)
        return self._programs[pid]

    def kin(self, members: Iterable[int]) -> set[int]:
        return kin(members, self.parents, self.program, self.titled)

    def below(self, pid: int) -> set[int]:
        """It, and what it has started."""
        return below([pid], self.parents, self.program)

    @cached_property
    def titled(self) -> set[int]:
        """This user's, of those that see the same /dev/shm."""
        return {
            pid
            for pid in self.parents
            if _is_of_this_user(pid) and processes.name_of(pid).startswith(_TITLES)
        }


def _is_of_this_user(pid: int) -> bool:
    with suppress(OSError):
        is_own = os.stat(f"/proc/{pid}").st_uid == os.geteuid()
        return is_own and os.stat(f"/proc/{pid}/root{FOLDER}").st_dev == device()
    return False


def silences(
    own: Sequence[Family],
    quiet: Sequence[Quiet],
    explained: set[int],
    pid: int | None,
    after: float,
    take: Take,
) -> list[Silence]:
    """The engines in which nothing has moved for `after` seconds and not all are at rest.

    Args:
        own: those on memlane's queues.
        quiet: those on rings of their own, with the stacks that were taken of them.
        explained: processes of which is known what they wait for, or that something moves.
        pid: only the engine of this process, whether it has queues or not; None for all.
        after: seconds.
        take: takes stacks.
    """
    seen = Processes()
    families = [each for each in own if each.seconds >= after]
    explained = explained | {who for each in own if each.seconds < after for who in each.members}
    families += [
        Family(each.rings, after, frozenset(who.pid for who in each.processes)) for each in quiet
    ]
    known = {who.pid: who.stack for each in quiet for who in each.processes}
    covered = seen.kin(explained.union(*(each.members for each in families)))
    families += [
        Family((), min(after, _AGAIN), frozenset(group))
        for group in _without_queues(seen, pid, covered)
    ]
    families = [
        replace(each, kin=frozenset(seen.kin(each.members)))
        for each in families
        if not explained & each.members
    ]
    looks = [_Look(each, known, take) for each in families if pid is None or pid in each.kin]
    restless = [each for each in looks if each.restless]
    if not all(each.is_sure for each in restless):
        pause = min(after, _AGAIN)
        time.sleep(pause)
        restless = [each for each in restless if each.is_sure or each.stands_still(pause, take)]
    return [each.silence() for each in restless]


def _without_queues(seen: Processes, pid: int | None, covered: set[int]) -> list[set[int]]:
    """The engines whose processes share no queue."""
    wanted = seen.titled if pid is None else {pid}
    groups: list[set[int]] = []
    for each in sorted(wanted - covered):
        around = seen.kin([each])
        near = next((group for group in groups if group & around), None)
        if near is None:
            groups.append({each})
        else:
            near.add(each)
    return groups


class _Look:
    """The processes of an engine, looked at once.

    Attributes:
        restless: those that may be what hangs.
    """

    def __init__(self, family: Family, known: Stacks, take: Take) -> None:
        found = {pid: processes.status(pid) for pid in sorted(family.kin - {os.getpid()})}
        self._family = family
        self._started = {
            pid: ticks
            for pid, (state, ticks) in found.items()
            if ticks is not None and state != "dead"
        }
        self._used = {pid: processes.cpu_seconds(pid) for pid in self._started}
        missing = {pid: ticks for pid, ticks in self._started.items() if pid not in known}
        self._members = _members(family, self._started, {**known, **take(missing)})
        self.restless = [who for who in self._members if _counts(who, family)]

    @property
    def is_sure(self) -> bool:
        """One of them takes part in queues that do not move; others may have moved just now."""
        family = self._family
        return bool(family.queues) and any(who.pid in family.members for who in self.restless)

    def stands_still(self, pause: float, take: Take) -> bool:
        """Returns whether none of them has moved in that time, up to now."""
        for who in self.restless:
            if processes.cpu_seconds(who.pid) - self._used[who.pid] > pause * _BUSY:
                return False
        again = {who.pid: who for who in _members(self._family, self._started, take(self._started))}
        return all(
            who.pid in again and again[who.pid].active == who.active for who in self.restless
        )

    def silence(self) -> Silence:
        family = self._family
        restless = {who.pid for who in self.restless}
        shown = [
            who
            for who in self._members
            if who.pid in family.members | restless or who.is_at_rest is None
        ]
        shown.sort(key=lambda who: (who.pid not in restless, who.is_at_rest is None, who.pid))
        return Silence(family.queues, family.seconds, tuple(shown))


def _counts(who: Member, family: Family) -> bool:
    """Returns whether it may be what hangs. A process around the engine may be a launcher: it does
    if it is stopped, or its stack says so and the kernel does not say that it waits for something.
    """
    if who.pid in family.members:
        return who.is_at_rest is not True
    if not who.active:
        return who.is_at_rest is False
    is_launcher = who.sleeps_in == _FOR_A_CHILD or any(each in who.sleeps_in for each in _FOR_MORE)
    return not is_launcher


def _members(family: Family, started: Mapping[int, int], stacks: Stacks) -> list[Member]:
    members = []
    for pid, ticks in started.items():
        condition = processes.condition(pid, ticks)
        if condition is None:  # it has ended
            continue
        stack = stacks.get(pid, NoStack("it has ended"))
        sleeping = frozenset[int]()
        if isinstance(stack, Stack):
            beside = [thread.id for thread in stack.threads if not thread.is_main and thread.id]
            sleeping = frozenset(
                each for each in beside if processes.sleeps_until_a_time(pid, each)
            )
        title = processes.name_of(pid)
        waits = pid in family.waiting
        members.append(seen_as(pid, title, condition, stack, waits=waits, sleeping=sleeping))
    return members
