"""Deaths of processes that create or attach to a ring used alone, and of one that sweeps."""

from collections.abc import Callable
from typing import Any

from memlane import ShmRingBuffer
from tests.crash.survivors import leaving_nothing
from tests.support import Doomed, Hooks, Link, Passage, Spot
from tests.support.queues import SHM, name_in, segments, start_writer, sweep

Begin = Callable[..., Any]


def creating(_link: Link, begin: Begin) -> None:
    """Role: creates a ring, and closes it."""
    begin("create")
    ring = ShmRingBuffer(1, 64, 2)
    begin("close", ring.handle())
    ring.close()


def attaching(_link: Link, begin: Begin, handle: tuple[int, int, int, str]) -> None:
    """Role: attaches to a ring, and closes its end."""
    begin("attach")
    ring = ShmRingBuffer(*handle)
    begin("close")
    ring.close()


def is_usable(one: ShmRingBuffer, other: ShmRingBuffer) -> bool:
    """Each end sees what the other writes."""
    with one.get_data(1) as theirs, other.get_data(1) as ours:
        theirs[:4] = b"seen"
        return bytes(ours[:4]) == b"seen"


def creator_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """A half-made ring leaves nothing; a complete one lives as long as a process holds it."""
    seen = "nothing is left of it"
    with leaving_nothing():
        doomed = Doomed(hooks, spot, creating)
        user = None
        for stage, handle in doomed.stages():
            if stage == "close":
                user = ShmRingBuffer(*handle)
            doomed.go()
        if user is not None:
            named = (SHM / user.handle()[3]).exists()
            assert named == (spot is not None and spot.point == "unlink")
            sweep()
            assert (SHM / user.handle()[3]).exists() == named
            assert is_usable(user, user)
            user.close()
            seen = "the attached one works on, and goes with its last user"
        del user
    return doomed.passages, seen


def attacher_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """The creator and later processes do not notice."""
    with leaving_nothing(), ShmRingBuffer(1, 64, 2) as ring:
        doomed = Doomed(hooks, spot, attaching, ring.handle())
        for _ in doomed.stages():
            doomed.go()
        sweep()
        with ShmRingBuffer(*ring.handle()) as next_one:
            assert is_usable(ring, next_one)
        del next_one
    del ring
    return doomed.passages, "the ring works on, for its creator and for the next to come"


def sweeper_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """A dead queue is swept later, and a live one is not."""
    with leaving_nothing(), ShmRingBuffer(1, 64, 2) as living:
        dead = start_writer()
        name = name_in(dead.greeting)
        dead.peer.kill()
        doomed = Doomed(hooks, spot, creating)
        for _ in doomed.stages():
            doomed.go()
        assert (name in segments()) == (spot is not None and spot.point == "sweep")
        sweep()
        assert segments() == {living.handle()[3]}
    del living
    return doomed.passages, "the next creation sweeps all that is dead, and nothing else"
