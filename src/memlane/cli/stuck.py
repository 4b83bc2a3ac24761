"""`memlane stuck`: who waits for whom, for how long, and what the awaited process is doing."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from memlane._base.blame import listed, sentence
from memlane.cli import writing
from memlane.inspect import Participant, Wait, segments
from memlane.inspect.decisions import judged, process_of
from memlane.inspect.foreign import rings
from memlane.inspect.foreign.rings import ForeignWait, Geometry
from memlane.inspect.silence import Family, Member, Processes, Silence, engines_in, silences
from memlane.inspect.stacks import NoStack, Stack, Thread, stacks_of
from memlane.inspect.waits import headline, looked, title_of

STUCK, UNDECIDED = 1, 3  # exit codes; 0: nobody is stuck
_ONE_OF = "  undecided: one of these"
_SHOWN = 6  # frames of a stack; JSON has them all
_OTHERS = 4  # threads beside the main one

Key = tuple[object, ...]
Dump = Literal["none", "suspects", "all"]
Stacks = dict[int, Stack | NoStack]


@dataclass(frozen=True)
class Asked:
    """The options of the command line.

    Attributes:
        pid: only waits in which this process takes part; None for all.
        after: seconds that a wait must have lasted; so long are rings of other engines watched.
        dump: whose stacks to take.
        geometry: of rings of other engines, instead of a guess.
        prints_json: one object instead of text.
        is_native: stacks have the frames of C and C++.
    """

    pid: int | None
    after: float
    dump: Dump
    geometry: Geometry | None
    prints_json: bool
    is_native: bool = False

    def stacks(self, started: Mapping[int, int]) -> Stacks:
        """The stacks of processes, given with the ticks of their starts."""
        if self.dump == "none":
            return dict.fromkeys(started, NoStack("--dump none was asked for"))
        return stacks_of(started, native=self.is_native)


class Look:
    """The findings of one look: the waits, the stacks of suspects, and engines in which nothing
    moves."""

    def __init__(self, asked: Asked) -> None:
        seen, waits = looked(asked.after)
        explained = _explained(waits)
        engines = engines_in(seen, time.monotonic())
        if any(_is_silent(each, explained, asked.after) for each in engines):
            # A caller with a timeout may have been between two calls.
            seen, waits = looked(asked.after)
            explained = _explained(waits)
            engines = engines_in(seen, time.monotonic())
        asked_for = None if asked.pid is None else Processes().below(asked.pid)
        waits = [wait for wait in waits if _concerns(asked_for, _pids(wait))]
        self.stacks = _stacks_of(waits, asked)
        self.own = [judged(wait, self.stacks) for wait in waits]
        found, quiet, moving = rings.stuck(asked.after, asked.stacks, asked.geometry)
        explained |= moving
        explained |= {pid for each in found for pid in _foreign_pids(each) if pid}
        self.foreign = [wait for wait in found if _concerns(asked_for, _foreign_pids(wait))]
        self.silences = silences(engines, quiet, explained, asked.pid, asked.after, asked.stacks)
        self.now = time.monotonic()

    @property
    def code(self) -> int:
        """The exit code: 1 if somebody is stuck, 3 if that cannot be decided."""
        decided = [wait.is_decided for wait in self.own if not wait.is_start]
        decided += [wait.is_decided for wait in self.foreign]
        if any(decided):
            return STUCK
        is_open = self.silences or decided
        return UNDECIDED if is_open else 0

    def found(self) -> Iterator[tuple[Key, dict[str, Any], list[str]]]:
        """Returns each wait but starts: what tells it from others, its JSON, and its lines."""
        # A writer's own wait comes before those of the readers that wait for it in turn.
        for wait in sorted(self.own, key=lambda wait: (wait.segment, wait.waiter.rank is not None)):
            if not wait.is_start:
                key = (wait.segment, wait.waiter.pid, wait.reason, wait.waiter.activity_since)
                yield key, self._json(wait), self._lines(wait)
        for other in self.foreign:
            pids = tuple(who.pid for who in other.awaited)
            yield (other.segment, other.reason, pids), _foreign_json(other), _foreign_lines(other)
        for silence in self.silences:
            pids = tuple(sorted(who.pid for who in silence.members))
            yield (silence.queues, pids), _silence_json(silence), _silence_lines(silence)

    def starts(self) -> list[Wait]:
        """Waits in `wait_until_ready`: somebody starts, which may take long and is no stall."""
        return [wait for wait in self.own if wait.is_start]

    def start_lines(self) -> list[str]:
        """A line for each start."""
        return [
            f"starting: {headline(wait, writing.title(wait.segment, wait.label))}; waiting for "
            + (listed(wait.facts) or f"{wait.absent_elsewhere} readers on other hosts")
            for wait in self.starts()
        ]

    def start_json(self) -> list[dict[str, Any]]:
        """The same for programs."""
        return [self._json(wait) for wait in self.starts()]

    def _json(self, wait: Wait) -> dict[str, Any]:
        """Seconds instead of times; a stack as a list of lines, the innermost first."""
        return {
            "segment": wait.segment,
            "label": wait.label,
            "waiter": self._participant(wait.waiter),
            "seconds": wait.seconds,
            "reason": wait.reason,
            "awaited": [self._participant(who) for who in wait.awaited],
            "absent_elsewhere": wait.absent_elsewhere,
            "advice": wait.advice,
            "decided": wait.is_decided,
            "deadlock": wait.is_deadlock,
        }

    def _participant(self, who: Participant) -> dict[str, Any]:
        made: dict[str, Any] = {
            "role": who.role,
            "rank": who.rank,
            "pid": who.pid,
            "address": who.address,
            "name": title_of(who),
            "state": who.state,
            "activity": who.activity,
            "behind": who.behind,
            "waiting_since": None if who.activity_since is None else self.now - who.activity_since,
            "last_progress": None if who.last_progress is None else self.now - who.last_progress,
            "views": who.views,
        }
        seen = self._stack(who)
        if isinstance(seen, Stack):
            made["stack"] = _threads_json(seen)
        elif seen is not None:
            made["no_stack"] = seen.reason
        return made

    def _stack(self, who: Participant) -> Stack | NoStack | None:
        return None if who.pid is None or who.is_remote else self.stacks.get(who.pid)

    def _lines(self, wait: Wait) -> list[str]:
        """The wait, those that are waited for with their stacks, and the advice."""
        who = wait.waiter
        name = who.role if who.rank is None else f"{who.role} {who.rank}"
        if wait.is_in_turn:
            title = title_of(who)
            process = f"pid {who.pid} {title}".rstrip()
            return [f"{name} ({process}) waits for that writer in turn"]
        made = [headline(wait, writing.title(wait.segment, wait.label))]
        if not wait.is_decided:
            made.append(_ONE_OF)
        for awaited, facts in zip(wait.awaited, wait.facts, strict=True):
            made.append(f"  waits for {sentence(facts)}")
            seen = self._stack(awaited)
            if isinstance(seen, NoStack):
                made.append(f"    no stack: {seen.reason}")
            elif seen is not None:
                made += _threads(seen)
        if wait.absent_elsewhere:
            made.append(f"  waits for {wait.absent_elsewhere} readers on other hosts")
        return [*made, f"  {wait.advice}"]


def _explained(waits: Iterable[Wait]) -> set[int]:
    """The processes of which a wait says what they do."""
    return {pid for wait in waits if not wait.is_start for pid in _pids(wait)}


def _is_silent(engine: Family, explained: set[int], after: float) -> bool:
    return engine.seconds >= after and not explained & engine.members


def _concerns(asked_for: set[int] | None, pids: Iterable[int | None]) -> bool:
    return asked_for is None or bool(asked_for.intersection(pids))


def _pids(wait: Wait) -> Iterator[int]:
    """Those that are known to take part: in a slot any number may stand."""
    for who in (wait.waiter, *wait.awaited):
        if (process := process_of(who)) is not None:
            yield process.pid


def _foreign_pids(wait: ForeignWait) -> Iterator[int | None]:
    if wait.waiter is not None:
        yield wait.waiter[0]
    for who in wait.awaited:
        yield who.pid


def _stacks_of(waits: Iterable[Wait], asked: Asked) -> Stacks:
    """By pid. Of the suspects: those that live, but not those that wait for somebody else, unless
    it is for each other. Only processes that are known to take part, all at once."""
    if asked.dump == "none":
        return {}
    suspects = [who for wait in waits for who in wait.awaited if _is_suspect(who)]
    suspects += [
        who for wait in waits if wait.is_deadlock for who in (wait.waiter, wait.awaited[0])
    ]
    if asked.dump == "all":
        names = {wait.segment for wait in waits}
        for segment in segments():
            if segment.name in names:
                suspects += segment.participants
    return asked.stacks(
        {each.pid: each.start_ticks for each in filter(None, map(process_of, suspects))}
    )


def _is_suspect(who: Participant) -> bool:
    is_waiting = who.activity in ("waiting", "attaching") and who.state != "stopped"
    return not is_waiting


def _frames(frames: Sequence[str]) -> list[str]:
    made = [f"    {frame}" for frame in frames[:_SHOWN]]
    if len(frames) > _SHOWN:
        made.append(f"    and {len(frames) - _SHOWN} callers")
    return made


def _threads_json(stack: Stack) -> list[dict[str, Any]]:
    return [
        {"thread": thread.name, "frames": [str(frame) for frame in thread.frames]}
        for thread in stack.threads
    ]


def _threads(stack: Stack) -> list[str]:
    """The main thread's calls, and those of the others that do not wait for work."""
    main, *others = stack.threads or (None,)
    made = [] if main is None else _thread(main)
    active = [thread for thread in others if thread.frames and not thread.is_at_rest]
    for thread in active[:_OTHERS]:
        made += _thread(thread)
    if len(active) > _OTHERS:
        made.append(f"    and {len(active) - _OTHERS} threads more that do not wait for work")
    return made


def _thread(thread: Thread) -> list[str]:
    head = [] if thread.is_main else [f"    thread {thread.name}:"]
    return [*head, *_frames([str(frame) for frame in thread.frames])]


def _foreign_json(wait: ForeignWait) -> dict[str, Any]:
    made = asdict(wait)
    if wait.waiter is not None:
        made["waiter"] = dict(zip(("pid", "name"), wait.waiter, strict=True))
    return made


def _foreign_lines(wait: ForeignWait) -> list[str]:
    who = "somebody" if wait.waiter is None else f"pid {wait.waiter[0]} {wait.waiter[1]}"
    made = [
        f"{who} waits in {wait.segment}, an engine's own ring: {wait.reason}, unchanged while "
        f"watched, {wait.watched:g} s"
    ]
    if not wait.is_decided:
        made.append(_ONE_OF)
    for suspect in wait.awaited:
        if suspect.pid is None:
            made.append(
                f"  waits for reader {suspect.reader} (gone, {suspect.unread} chunks unread)"
            )
            continue
        reader = "" if suspect.reader is None else f"probably reader {suspect.reader}: "
        unread = f", {suspect.unread} chunks unread" if suspect.unread else ""
        made.append(
            f"  waits for {reader}pid {suspect.pid} {suspect.title} ({suspect.state}{unread})"
        )
        if suspect.no_stack is not None:
            made.append(f"    no stack: {suspect.no_stack}")
        made += _frames(suspect.frames)
    return [*made, f"  {wait.advice}"]


def _silence_json(silence: Silence) -> dict[str, Any]:
    return {
        "reason": "no queue has moved",
        "queues": list(silence.queues),
        "seconds": silence.seconds,
        "decided": False,
        "processes": [_member_json(who) for who in silence.members],
    }


def _member_json(who: Member) -> dict[str, Any]:
    made: dict[str, Any] = {
        "pid": who.pid,
        "name": who.title,
        "condition": who.condition,
        "at_rest": who.is_at_rest,
    }
    if isinstance(who.stack, Stack):
        return made | {"stack": _threads_json(who.stack)}
    return made | {"no_stack": who.stack.reason}


def _silence_lines(silence: Silence) -> list[str]:
    """Each process: where it rests, or its state and the stacks of its threads that do not."""
    what = "queue" if silence.queues else "stack"
    made = [
        f"no {what} of these processes has moved for {silence.seconds:.1f} s; nobody waits in one",
        "  undecided: an idle engine looks the same, but for those that are not at rest",
    ]
    for who in silence.members:
        name = f"  pid {who.pid} {who.title}".rstrip()
        if who.is_at_rest:
            made.append(f"{name}: at rest{_place(who)}")
            continue
        made.append(f"{name} ({who.condition})")
        if isinstance(who.stack, NoStack):
            made.append(f"    no stack: {who.stack.reason}")
        for thread in who.active:
            made += _thread(thread)
    return made


def _place(who: Member) -> str:
    place = who.stack.threads[0].resting_in if isinstance(who.stack, Stack) else None
    return "" if place is None else f" in {place}"


def look(asked: Asked) -> int:
    """One look, printed; returns the exit code."""
    seen = Look(asked)
    found = list(seen.found())
    if asked.prints_json:
        answer = {
            "stuck": [made for _, made, _ in found if "processes" not in made],
            "starting": seen.start_json(),
            "silent": [_silence_json(silence) for silence in seen.silences],
        }
        writing.print_json(answer)
        return seen.code
    console = writing.console()
    writing.print_lines(console, [line for _, _, lines in found for line in lines])
    writing.print_lines(console, seen.start_lines())
    if not found:
        console.print(f"nobody has waited for longer than {asked.after:g} s")
    return seen.code


def watch(asked: Asked, every: float, command: str | None) -> None:
    """Looks again every so many seconds until it is interrupted. `command`, in a shell, runs once
    for each new wait, its JSON on standard input."""
    known: set[Key] = set()
    console = writing.console()
    while True:
        found = {key: (made, lines) for key, made, lines in Look(asked).found()}
        for key in found.keys() - known:
            made, lines = found[key]
            text = writing.json_text(made)
            lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')} {lines[0]}", *lines[1:]]
            writing.print_lines(console, [text] if asked.prints_json else lines)
            if command is not None:
                subprocess.run(command, shell=True, input=text.encode())
        known = set(found)
        time.sleep(every)
