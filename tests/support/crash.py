"""Kills a role at every point that it passes, and at each of its first passages there.

A *point* is a named place in native code; a *stage* is the role's name for what it is about to do.
A doomed role is a callable ``role(link, begin, *args)``: ``begin(stage)`` announces the next stage,
waits for the test's cue and returns it. Without a spot the role runs to its end and reports the
points it has passed; with one, the process kills itself there.
"""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from tests.support.link import Link
from tests.support.processes import PeerGone, dismiss, start
from tests.support.waiting import PATIENCE, until_at_rest

Passage = tuple[str, str, int]
"""Stage, point, and how often the point was passed in that stage."""


class Hooks(Protocol):
    """The interface of a build with sync hooks, whichever system is under test."""

    def begin(self, stage: str) -> None:
        """Count passages for this stage from now on."""

    def die_at(self, stage: str, point: str, passage: int, report: int) -> None:
        """Die there; just before, write the time (8 bytes, ns) to the descriptor `report`."""

    def passages(self) -> list[Passage]:
        """The points passed, in the order of their first passages."""


@dataclass(frozen=True)
class Spot:
    """One passage of one point in one stage."""

    stage: str
    point: str
    passage: int


@dataclass(frozen=True)
class Crash:
    """A death, and what the other processes saw of it."""

    spot: Spot
    seen: str


class NeverCame(AssertionError):
    """The role ended without reaching the spot."""


class Doomed:
    """A role in its own process that dies at ``spot``, or runs to its end without one."""

    def __init__(
        self, hooks: Hooks, spot: Spot | None, role: Callable[..., Any], *args: Any
    ) -> None:
        self.spot = spot
        self.passages: list[Passage] = []
        self.died = float("nan")
        self._report, theirs = os.pipe()
        self.peer = start(_play, hooks, spot, theirs, role, args)
        self.pid = self.peer.pid
        os.close(theirs)

    def stages(self) -> Iterator[tuple[str, Any]]:
        """Yields each stage before it begins, with the role's word on it; then checks its end."""
        try:
            while True:
                stage, word = self.peer.hear()
                if stage is None:
                    self.passages = word
                    break
                yield stage, word
        except PeerGone:
            if self.spot is None:
                raise
        self._end()

    def go(self, cue: object = None) -> None:
        """Let the stage begin."""
        self.peer.tell(cue)

    def until_at_rest(self) -> None:
        """Return when the role is blocked, or dead."""
        until_at_rest(self.pid)

    def _end(self) -> None:
        status = self.peer.join(PATIENCE)
        report = os.read(self._report, 8)
        os.close(self._report)
        if self.spot is None:
            assert status == 0, status
            return
        if not report:
            raise NeverCame(f"the role never came to {self.spot}")
        assert status == -signal.SIGKILL, status
        self.died = int.from_bytes(report, "little") / 1e9


def crash_everywhere(
    scenario: Callable[[Spot | None], tuple[list[Passage], str]], most: int
) -> list[Crash]:
    """Runs the scenario once to its end, and then once for each spot that its role passed.

    Only the first ``most`` passages of a point in a stage are used: a role that waits passes its
    points as often as it happens to poll. Periodic steps, which depend on the clock, may not happen
    again; but the role must have died at least once at every point that it has passed.
    """
    passages, _ = scenario(None)
    crashes: list[Crash] = []
    for stage, point, count in passages:
        for passage in range(1, min(count, most) + 1):
            spot = Spot(stage, point, passage)
            try:
                crashes.append(Crash(spot, scenario(spot)[1]))
            except NeverCame:
                dismiss()
            except BaseException as error:
                error.add_note(f"with a death at {spot}")
                raise
    spared = {point for _, point, _ in passages} - {crash.spot.point for crash in crashes}
    assert not spared, f"nobody died at {spared}"
    return crashes


def _play(
    link: Link,
    hooks: Hooks,
    spot: Spot | None,
    report: int,
    role: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    def begin(stage: str, word: object = None) -> Any:
        link.tell((stage, word))
        cue = link.hear()
        hooks.begin(stage)
        return cue

    if spot is not None:
        hooks.die_at(spot.stage, spot.point, spot.passage, report)
    role(link, begin, *args)
    link.tell((None, hooks.passages()))
