"""Decides who waits for whom, from what was read of all segments. Pure: no file and no clock.

Three kinds of wait are findings:

* a ring is full, and the readers that keep its next chunk make no progress, whether the writer
  blocks or asks again and again with a timeout;
* a reader waits for a writer that cannot run, is dead, or has begun a message and does not end it;
* a reader waits for an answer. An idle writer looks the same, so the request must be known: the
  queue says which one it answers, or the reader has sent its writer more than it got back.

Where several may be the cause of a wait for an answer, stacks tell them apart (`judged`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from memlane._base.blame import REMOTE_WINDOW, Facts, advice, suspicion
from memlane.inspect.segment import Participant, Segment
from memlane.inspect.stacks import NoStack, Stack

Reason = Literal[
    "no free chunk",
    "no space for a large message",
    "the window of a remote reader is full",
    "no new message",
    "not all attached",
]
_BEGUN = ("in_block", "copying")  # a writer has begun a message
_ALIVE = ("running", "stopped", "unknown")


@dataclass(frozen=True)
class Wait:
    """A writer or reader of a queue that has waited for long.

    Attributes:
        segment: its name.
        waiter: who waits.
        seconds: for how long.
        reason: what for.
        awaited: for whom; the likeliest cause first.
        absent_elsewhere: awaited readers on other hosts, which have no slot here.
        advice: what to do, in one sentence.
        facts: what is said of each of the awaited.
        is_decided: the first of the awaited is the cause; else it is one of them, and only their
            stacks can tell which.
        is_deadlock: the first of the awaited waits for the waiter, directly or not.
        label: of the segment.
    """

    segment: str
    waiter: Participant
    seconds: float
    reason: Reason
    awaited: tuple[Participant, ...]
    absent_elsewhere: int
    advice: str
    facts: tuple[Facts, ...] = ()
    is_decided: bool = True
    is_deadlock: bool = False
    label: str = ""

    @property
    def is_in_turn(self) -> bool:
        """A reader that waits for its writer, which waits itself: another wait names the cause."""
        return (
            self.reason == "no new message"
            and self.awaited[0].activity == "waiting"
            and not self.is_deadlock
        )

    @property
    def is_start(self) -> bool:
        """It waits in `wait_until_ready`, which takes as long as a model takes to load."""
        return self.reason == "not all attached"


class Process(NamedTuple):
    """The identity of a process, which a later one with the same pid does not share."""

    pid: int
    start_ticks: int


class Remote(NamedTuple):
    """The identity of a process on another host, as far as its peers know it."""

    pid: int
    host: str


def party_of(who: Participant) -> Process | Remote | None:
    """The slot's process, wherever it lives; None if nobody does."""
    if not who.is_remote or who.pid is None:
        return process_of(who)
    host = (who.address or "").removeprefix("tcp://").rpartition(":")[0]
    return Remote(who.pid, host) if who.state == "running" and host else None


def process_of(who: Participant) -> Process | None:
    """The slot's process, if it lives and is of this pid namespace."""
    if (
        who.is_remote
        or who.state not in ("running", "stopped")
        or who.pid is None
        or who.start_ticks is None
    ):
        return None
    return Process(who.pid, who.start_ticks)


class _Found(NamedTuple):
    """A wait before it is put into words."""

    segment: Segment
    waiter: Participant
    seconds: float
    reason: Reason
    awaited: list[Participant]
    is_decided: bool = True


def waits_in(
    segments: Iterable[Segment],
    after: float,
    now: float,
    describe: Callable[[Participant, float], Facts],
) -> list[Wait]:
    """The waits in queues that have lasted for at least `after` seconds, the longest first.

    Args:
        describe: what is said of a participant at that moment.
    """
    queues = [each for each in segments if each.kind == "queue" and each.participants]
    crowd = _Crowd(queues)
    found = [
        each
        for queue in queues
        for each in (*_writers(queue, crowd, now), *_readers(queue, crowd, now))
        if each.seconds >= after
    ]
    found = list({_same(each): each for each in reversed(found)}.values())
    reached = crowd.reached(found)
    made = [_worded(each, now, describe, reached) for each in found]
    return sorted(made, key=lambda wait: -wait.seconds)


def _same(each: _Found) -> object:
    """One reader of several queues that awaits the same processes in each waits once."""
    if each.reason != "no new message" or each.is_decided:
        return each.segment.name, each.waiter.rank, each.waiter.role
    return each.waiter.pid, frozenset(who.pid for who in each.awaited)


# One queue ----------------------------------------------------------------------------------------


def _waited(who: Participant, now: float) -> float:
    return 0.0 if who.activity_since is None else now - who.activity_since


def _writers(queue: Segment, crowd: _Crowd, now: float) -> list[_Found]:
    """Finds what the writer waits for, and the starts of all."""
    writer, *readers = queue.participants
    found = []
    absent = [who for who in queue.participants if who.state == "absent"]
    if absent or queue.absent_elsewhere:
        for who in queue.participants:
            if who.state in _ALIVE and who.activity == "attaching":
                found.append(_Found(queue, who, _waited(who, now), "not all attached", absent))
    if writer.state not in _ALIVE or writer.activity == "attaching":
        return found
    blocking = [readers[place] for place in queue.unread if readers[place].state != "closed"]
    waits = _waited(writer, now) if writer.activity == "waiting" else 0.0
    if blocking:
        # Callers with timeouts begin anew: what counts is since when nothing has moved.
        moved = [who.last_progress for who in (writer, *blocking) if who.last_progress is not None]
        stands = now - max(moved, default=now)
        if writer.activity != "waiting" and crowd.waits_beside(queue, now) > stands / 2:
            return found  # it has not come back to this queue: it waits for something else
        waits = max(waits, stands)
        if remote := [who for who in blocking if who.is_remote]:  # these come before the ring
            found.append(_Found(queue, writer, waits, REMOTE_WINDOW, remote))
        else:
            found.append(_Found(queue, writer, waits, "no free chunk", blocking))
    elif writer.activity == "waiting":
        holding = [reader for reader in readers if reader.behind or reader.views]
        if holding:
            found.append(_Found(queue, writer, waits, "no space for a large message", holding))
    return found


def _readers(queue: Segment, crowd: _Crowd, now: float) -> list[_Found]:
    """Decides what the readers wait for."""
    writer, *readers = queue.participants
    found = []
    for reader in readers:
        # One whose message is there is about to take it.
        if reader.state not in _ALIVE or reader.activity != "waiting" or reader.behind:
            continue
        waits = _waited(reader, now)
        if reader.last_progress is not None:
            waits = max(waits, now - reader.last_progress)
        if writer.state != "running" or writer.activity == "waiting":
            found.append(_Found(queue, reader, waits, "no new message", [writer]))
        elif writer.activity in _BEGUN:
            waits = min(waits, _waited(writer, now))
            found.append(_Found(queue, reader, waits, "no new message", [writer]))
        elif (request := crowd.request(queue, reader)) is not None:
            owing, since, is_decided = request
            waits = min(waits, now - since)
            found.append(_Found(queue, reader, waits, "no new message", owing, is_decided))
    return found


# All queues ---------------------------------------------------------------------------------------


class _Crowd:
    """All queues, and what each process does in them."""

    def __init__(self, queues: Sequence[Segment]) -> None:
        self._written: dict[Process, list[Segment]] = {}
        self._waits_for: dict[Process, set[Process]] = {}
        self._waits_in: dict[Process, list[tuple[Segment, Participant]]] = {}
        for queue in queues:
            writer, *readers = queue.participants
            if (process := process_of(writer)) is not None:
                self._written.setdefault(process, []).append(queue)
            for who in queue.participants:
                process = process_of(who)
                if process is None or who.activity != "waiting" or who.behind:
                    continue
                self._waits_in.setdefault(process, []).append((queue, who))
                others = [writer] if who is not writer else [readers[n] for n in queue.unread]
                found = filter(None, map(process_of, others))
                self._waits_for.setdefault(process, set()).update(found)

    def waits_beside(self, queue: Segment, now: float) -> float:
        """Returns how long the queue's writer has waited in others."""
        process = process_of(queue.participants[0])
        others = self._waits_in.get(process, ()) if process is not None else ()
        return max((_waited(who, now) for other, who in others if other is not queue), default=0.0)

    def request(
        self, answers: Segment, reader: Participant
    ) -> tuple[list[Participant], float, bool] | None:
        """The process that owes a waiting reader its answer, since when, and whether that is
        certain; None if nothing was asked.

        The writer itself comes first; beside it those others that have the same request and do not
        wait for the next one: it may be one of them for which it waits.
        """
        writer = answers.participants[0]
        asker, answerer = process_of(reader), party_of(writer)
        if asker is None or answerer is None or asker == answerer:
            return None
        for work in self._written.get(asker, ()):
            mine = next((w for w in work.participants[1:] if party_of(w) == answerer), None)
            if mine is None or work is answers or work.mode != "all":
                continue
            is_known = answers.answers_to is not None
            if is_known and answers.answers_to != work.id:
                continue
            if isinstance(answerer, Process):
                if not is_known and not _asks_first(work, asker, writer, answerer):
                    continue
            elif not mine.behind:  # one on another host confirms a message once it waits again
                continue
            if self._is_idle(mine) and not _took_later(mine, writer):
                continue
            since = work.participants[0].last_progress
            others = [
                who
                for who in work.participants[1:]
                if who is not mine
                and who.state not in ("absent", "closed")
                and not self._is_idle(who)
            ]
            is_certain = is_known or isinstance(answerer, Remote)
            is_decided = is_certain and (not others or writer.state == "stopped")
            return [writer, *others], -float("inf") if since is None else since, is_decided
        return None

    def _is_idle(self, who: Participant) -> bool:
        """A reader of requests that waits for the next one."""
        return who.activity == "waiting" and not who.behind

    def reached(self, found: Sequence[_Found]) -> Mapping[Process, set[Process]]:
        """Returns for each process all those that it waits for, directly and through others."""
        edges = {process: set(others) for process, others in self._waits_for.items()}
        for each in found:
            waiter = process_of(each.waiter)
            if waiter is not None:
                edges.setdefault(waiter, set()).update(filter(None, map(process_of, each.awaited)))
        reached: dict[Process, set[Process]] = {}
        for start in edges:
            seen: set[Process] = set()
            left = [start]
            while left:
                for other in edges.get(left.pop(), set()) - seen:
                    seen.add(other)
                    left.append(other)
            reached[start] = seen
        return reached


def _asks_first(work: Segment, asker: Process, writer: Participant, answerer: Process) -> bool:
    """Returns whether, of two queues that name no other, this one has the requests: its writer
    started the other process, or at least earlier, and it has sent more than it got back."""
    is_older = (asker.start_ticks, asker.pid) < (answerer.start_ticks, answerer.pid)
    return is_older and work.participants[0].position > writer.position


def _took_later(taken: Participant, answered: Participant) -> bool:
    """Returns whether it has taken a request since it last answered."""
    if taken.last_progress is None or not taken.position:
        return False
    return answered.last_progress is None or taken.last_progress > answered.last_progress


def _worded(
    each: _Found,
    now: float,
    describe: Callable[[Participant, float], Facts],
    reached: Mapping[Process, set[Process]],
) -> Wait:
    seen = [(other, describe(other, now)) for other in each.awaited]
    seen.sort(key=lambda pair: suspicion(pair[1]))
    facts = tuple(fact for _, fact in seen)
    waiter = process_of(each.waiter)
    first = process_of(seen[0][0]) if seen else None
    # Both ends of one process are no deadlock: they are threads, of which nothing is known here.
    is_deadlock = (
        waiter is not None
        and first is not None
        and first != waiter
        and waiter in reached.get(first, ())
    )
    cannot_run = bool(facts) and suspicion(facts[0])[0] <= _CANNOT_RUN
    wait = Wait(
        each.segment.name,
        each.waiter,
        each.seconds,
        each.reason,
        tuple(other for other, _ in seen),
        _absent_elsewhere(each),
        advice(facts),
        facts,
        each.is_decided or is_deadlock or cannot_run,
        is_deadlock and not cannot_run,
        each.segment.label,
    )
    if wait.is_deadlock:
        return replace(wait, advice=_deadlock(wait))
    return wait if wait.is_decided else replace(wait, advice=UNDECIDED)


def _absent_elsewhere(each: _Found) -> int:
    """The awaited readers on other hosts, unless they are named."""
    if each.reason != "not all attached" or any(who.is_remote for who in each.awaited):
        return 0
    return each.segment.absent_elsewhere


def _deadlock(wait: Wait) -> str:
    pids = f"{wait.waiter.pid} and {wait.awaited[0].pid}"
    return f"Processes {pids} wait for each other: a deadlock; their stacks say in which calls."


# By stacks ----------------------------------------------------------------------------------------

UNDECIDED = "Undecided: it is one of these, and only their stacks can tell which."
ALL_INSIDE = "Undecided: all of them are inside a collective or a synchronization."
_CANNOT_RUN = 1  # the suspicion of those that are dead or stopped


def judged(wait: Wait, stacks: Mapping[int, Stack | NoStack]) -> Wait:
    """The same wait, decided by the stacks of those that are awaited, as far as they tell.

    Inside a collective a worker waits for its peers: the cause is the one that is not in it.
    """
    seen = [(who, stacks.get(who.pid or 0)) for who in wait.awaited]
    if wait.is_deadlock:
        found = seen[0][1]
        if isinstance(found, Stack) and _is_busy_with_more(found):
            return replace(wait, is_deadlock=False, advice=advice(wait.facts))
        return wait
    if wait.is_decided or any(not isinstance(found, Stack) for _, found in seen):
        return wait
    inside = [isinstance(found, Stack) and found.waits_for_peers for _, found in seen]
    order = sorted(range(len(seen)), key=lambda n: inside[n])
    outside = inside.count(False)
    facts = tuple(wait.facts[n] for n in order)
    told = UNDECIDED
    if outside == 1:
        told = advice(facts[:1])
    elif not outside:
        told = ALL_INSIDE
    return replace(
        wait,
        awaited=tuple(wait.awaited[n] for n in order),
        facts=facts,
        is_decided=outside == 1,
        advice=told,
    )


def _is_busy_with_more(stack: Stack) -> bool:
    """Returns whether another thread than the main one must be the one that waits in a queue."""
    return len(stack.threads) > 1 and not any("memlane/" in frame.file for frame in stack.main)
