"""The blame for a wait: the facts of a participant, their order, and their sentence.

Errors, log lines, `memlane stuck`, the metrics and the live page take all words about a process
that is waited for from here, so they agree. Pure: callers bring the facts, and the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from memlane._base.naming import names_of

State = Literal[
    "absent", "running", "stopped", "traced", "frozen", "dead", "closed", "unknown", "lost"
]
"""The state of a participant. `traced` and `frozen` are ways of being stopped; `unknown`: alive
where /proc does not show it; `lost`: on another host, and its connection is gone."""
Activity = Literal[
    "elsewhere", "waiting", "attaching", "in_block", "copying", "decoding", "unknown"
]
"""The activity of a participant in memlane, as its slot says."""

REMOTE_WINDOW: Final = "the window of a remote reader is full"
VLLM_WORDS = " [No available shared memory broadcast block]"  # users of vLLM search for them

_WORDS: dict[State, str] = {
    "absent": "never attached",
    "lost": "without a connection",
    "traced": "stopped by a tracer",
    "frozen": "frozen by its cgroup",
    "unknown": "alive but not visible from here",
}
_ORDER: dict[State, int] = {"dead": 0, "closed": 0, "stopped": 1, "traced": 1, "frozen": 1}
_ORDER |= {"absent": 2, "lost": 3}


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one participant. Durations are in seconds, up to the moment of the look.

    Attributes:
        name: `the writer`, or `reader` and its rank.
        state: what it can do.
        pid: of its process; None if there is none.
        title: of that process.
        address: of its host, if that is another.
        doing: words for what it does, instead of those for its state.
        behind: messages that it has yet to take.
        views: messages that it keeps for views; `views_for`: since it took the oldest.
        silent_for: since it last sent or took a message, or attached; None if that is unknown.
        activity: what it does in memlane.
        more: further facts in words.
        origin: whose messages a relay passes on, in words.
    """

    name: str
    state: State
    pid: int | None = None
    title: str = ""
    address: str = ""
    doing: str = ""
    behind: int = 0
    views: int = 0
    views_for: float = 0.0
    silent_for: float | None = None
    activity: Activity = "elsewhere"
    more: tuple[str, ...] = ()
    origin: str = ""

    @property
    def waits(self) -> bool:
        """It waits in a call of memlane, so somebody else may be the cause."""
        return self.activity in ("waiting", "attaching") and self.state not in _ORDER


def suspicion(who: Facts) -> tuple[int, float]:
    """The key that sorts the likeliest cause first.

    Dead processes, then those that cannot run, never attached, lost their connection, keep views,
    do something else, and last those that wait themselves; among equals the longest silent.
    """
    rank = _ORDER.get(who.state, 6 if who.waits else 4 if who.views else 5)
    return rank, float("-inf") if who.silent_for is None else -who.silent_for


def in_order(awaited: Iterable[Facts]) -> list[Facts]:
    """The same, the likeliest cause first."""
    return sorted(awaited, key=suspicion)


def role_name(role: str, rank: int | None) -> str:
    """`the writer`, `reader 2`."""
    return f"the {role}" if rank is None else f"{role} {rank}"


def identity(who: Facts) -> str:
    """The part that stays while the wait lasts: `reader 2 (pid 9 serve.py, stopped)`."""
    return _sentence(who, _state(who), [])


def sentence(who: Facts) -> str:
    """One participant in words: `reader 2 (pid 9 serve.py, stopped, 10 behind, last progress 5.0 s
    ago)`."""
    return _sentence(who, doing(who), _moving(who))


def _sentence(who: Facts, state: str, moving: list[str]) -> str:
    pid = "" if who.pid is None else f"pid {who.pid}"
    place = f"at {who.address}" if who.address else ""
    process = " ".join(filter(None, (pid, who.title, place)))
    return f"{who.name} ({', '.join(filter(None, (process, state, *moving)))}){who.origin}"


def doing(who: Facts) -> str:
    """The activity of its process, or else its state, in words."""
    return who.doing if who.doing and not who.waits else _state(who)


def _state(who: Facts) -> str:
    if who.waits:
        return "itself waiting for others"
    if who.address and who.state == "running":  # only its own host knows that
        return who.doing or who.state
    return _WORDS.get(who.state, who.state)


def _moving(who: Facts) -> list[str]:
    """The facts that change from one look to the next."""
    words = list(who.more)
    if who.views:
        chunks = "1 chunk" if who.views == 1 else f"{who.views} chunks"
        words.append(f"holds views of {chunks} for {who.views_for:.1f} s")
    if who.behind:
        words.append(f"{who.behind} behind")
    if who.silent_for is not None and who.state not in ("absent", "closed"):
        words.append(f"last progress {who.silent_for:.1f} s ago")
    return words


def listed(awaited: Iterable[Facts]) -> str:
    """All of them in one text, in order: the first in words, the others counted."""
    return names_of([sentence(who) for who in in_order(awaited)])


def headline(
    who: str, pid: int | None, title: str, waited: float, reason: str, where: str = ""
) -> str:
    """Names who waits, for how long, and for what; `where` is ` of` a segment."""
    return f"{who} (pid {f'{pid} {title}'.rstrip()}){where} blocked for {waited:.1f} s: {reason}"


def blocked(head: str, awaited: object) -> str:
    """The line about a wait: its headline, and for whom it is. VLLM_WORDS stay the last."""
    words = VLLM_WORDS if head.endswith(VLLM_WORDS) else ""
    return f"{head.removesuffix(words)}; waiting for {awaited}{words}"


def advice(awaited: Iterable[Facts]) -> str:
    """Advice about a wait for them, in one sentence about the likeliest cause."""
    who = next(iter(in_order(awaited)), None)
    if who is None:
        return "Look at the hosts of the readers that have not attached."
    match who.state:
        case "dead":
            return f"Process {who.pid} has died; its peers will name it within a second."
        case "stopped":
            return f"Process {who.pid} is stopped: `kill -CONT {who.pid}` resumes it."
        case "traced":
            return f"Process {who.pid} is held by a tracer, which must detach from it or end."
        case "frozen":
            return f"Process {who.pid} is frozen: thaw its cgroup (`docker unpause`)."
        case "lost":
            return f"Is the host of {who.address} up, and the network to it?"
        case "absent":
            return "Was its process started, and did it call create_from_handle with this rank?"
        case "unknown":
            return f"Process {who.pid} is in another container: look at it from there."
    if who.address:
        return f"Process {who.pid} is at {who.address}: run `memlane stuck` on that host."
    if who.waits:
        return f"Process {who.pid} waits itself: its own line names the cause."
    if who.activity == "in_block":
        return f"Process {who.pid} is inside acquire_read or acquire_write and must leave it."
    if who.views:
        return f"Process {who.pid} keeps views of {who.views} chunks: it must drop or copy them."
    return f"Process {who.pid} computes, or is blocked elsewhere: its stack says where."
