"""Decides which callers of a door get which place, and the replies to them. Pure: packets and the
time in, packets out.

A caller asks for a rank, or any. It gets the handle of a place that nobody has, attaches, and
leaves; meanwhile the place is kept for it. It waits while a place may become free: one whose
process has died until the server has released it, one that has ended until it is open again, one
that another caller was given until that one has left.

Handles decide nothing: of two processes that have the same, the ring lets one attach.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from memlane._base.msgspec import msgspec
from memlane._base.naming import names_of

VERSION = 1
MOST_BYTES = 64 * 1024  # of what a caller asks
SILENCE = 5.0  # seconds that a caller has to ask
ATTACHING = 10.0  # seconds for which a place is kept for one who was given it
MOST_WAITING = 256  # and one for each place
_AVOIDING = 0.1  # seconds in which one that attaches has joined
_PER_PLACE = 2e-4  # seconds of pause for each place looked at: twenty times what it costs
_SHORTEST, _LONGEST = 0.001, 0.1  # seconds between looks at places, while somebody waits for one


class Ask(msgspec.Struct, frozen=True):
    """The question of a caller: for a `kind` of object, in the place of `rank`, or in any.
    Places in `but_not` have refused the caller just now: they are avoided for a moment."""

    version: int
    kind: str
    rank: int | None = None
    but_not: tuple[int, ...] = ()


class Handed(msgspec.Struct, frozen=True, tag=True):
    """A handle, as text, and the rank that it is for."""

    rank: int
    handle: str


class Waits(msgspec.Struct, frozen=True, tag=True):
    """There is no place yet, and why."""

    reason: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """There will be none; `error` is the name of an error of memlane's."""

    error: str
    reason: str


Answer = Handed | Waits | Refused
_asks = msgspec.json.Decoder(Ask)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
_encoder = msgspec.json.Encoder()


def packet_of(message: Ask | Answer) -> bytes:
    """Returns it as one packet."""
    return _encoder.encode(message)


def answer_in(packet: bytes) -> Answer:
    """Returns the answer in a packet; raises MsgspecError if there is none."""
    return _answers.decode(packet)


class Place(NamedTuple):
    """A place of what is served; `state` is as in statistics."""

    rank: int
    state: str
    pid: int


class Host(Protocol):
    """The served queue, as a door sees it."""

    @property
    def kind(self) -> str: ...
    @property
    def role(self) -> str:
        """Its places are for those: "reader" or "writer"."""

    @property
    def ranks(self) -> list[int]: ...
    def places(self, ranks: Set[int | None]) -> list[Place]:
        """Those of `ranks`; all, if None is among them."""

    def open_place(self, rank: int) -> bool:
        """Opens the place of one that has ended; False: not now, but as soon as that can be."""

    def handle_text(self, rank: int) -> str: ...


class Reply(NamedTuple):
    """A packet for a caller, and whether its connection then ends; None: it only ends."""

    caller: int
    packet: bytes | None
    is_last: bool


@dataclass
class _Caller:
    """`since`: it came, has asked, or was given a place."""

    since: float
    ask: Ask | None = None
    given: int | None = None
    refusal: Refused | None = None
    reason: str = ""

    @property
    def is_waiting(self) -> bool:
        return self.ask is not None and self.given is None


class Admission:
    """The callers of one door, by numbers that the caller of these methods chooses."""

    def __init__(self, name: str, host: Host) -> None:
        self._name = name
        self._host = host
        self._callers: dict[int, _Caller] = {}  # in the order of their coming
        self._pause = _SHORTEST
        self._look_at = inf

    @property
    def arriving(self) -> int:
        """The number of callers that have not asked yet, or are about to attach; their time is
        limited."""
        return sum(not one.is_waiting for one in self._callers.values())

    def comes(self, caller: int, now: float) -> None:
        """A connection was accepted."""
        self._callers[caller] = _Caller(now)

    def leaves(self, caller: int) -> None:
        """Its connection has ended."""
        self._callers.pop(caller, None)
        self._pause = _SHORTEST

    def asks(self, caller: int, packet: bytes, now: float) -> None:
        """It has sent a packet; what it was given before is free again."""
        one = self._callers[caller]
        one.ask = one.given = None
        one.since, one.reason = now, ""
        self._pause = _SHORTEST
        try:
            ask = _asks.decode(packet)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            one.refusal = Refused("InvalidArgument", f"this is no question: {error}")
            return
        one.refusal = self._refusal_of(ask)
        one.ask = ask

    def _refusal_of(self, ask: Ask) -> Refused | None:
        if ask.version != VERSION:
            return Refused(
                "LayoutMismatch",
                f"{self._name!r} is served by a memlane that speaks version {VERSION} of names, "
                f"not {ask.version}; use the same version of memlane on both sides",
            )
        if ask.kind != self._host.kind:
            kind = self._host.kind
            return Refused("InvalidArgument", f"{self._name!r} is a {kind}: use {kind}.open()")
        return None

    def due(self) -> float:
        """Returns the time at which `turn` has something to do although nothing was received."""
        times = [self._look_at]
        for one in self._callers.values():
            if not one.is_waiting:
                times.append(one.since + (SILENCE if one.given is None else ATTACHING))
        return min(times)

    def turn(self, now: float) -> Iterator[Reply]:
        """Returns what is to be sent now. Raises what the host raises."""
        places: list[Place] | None = None
        for number, one in [*self._callers.items()]:
            if one.refusal is not None:
                yield Reply(number, packet_of(one.refusal), True)
                continue
            if one.ask is None or one.given is not None:
                if now >= one.since + (SILENCE if one.given is None else ATTACHING):
                    yield Reply(number, None, True)
                continue
            if places is None:
                places = self._host.places(self._wanted())
            answer = self._answer(one, one.ask, places, now)
            if isinstance(answer, Handed):
                one.given, one.since, one.reason = answer.rank, now, ""
            elif isinstance(answer, Waits):
                if answer.reason == one.reason:
                    continue
                if not one.reason and self._waiting > MOST_WAITING + len(self._host.ranks):
                    answer = Refused("RankTaken", f"too many wait already: {answer.reason}")
                    yield Reply(number, packet_of(answer), True)
                    continue
                one.reason = answer.reason
            yield Reply(number, packet_of(answer), isinstance(answer, Refused))
        if self._waiting:
            self._look_at = now + max(self._pause, _PER_PLACE * len(places or ()))
            self._pause = min(2 * self._pause, _LONGEST)
        else:
            self._look_at, self._pause = inf, _SHORTEST

    @property
    def _waiting(self) -> int:
        return len(self._callers) - self.arriving

    def _wanted(self) -> set[int | None]:
        return {one.ask.rank for one in self._callers.values() if one.ask and one.is_waiting}

    def _answer(self, one: _Caller, ask: Ask, places: list[Place], now: float) -> Answer:
        role = self._host.role
        given = {one.given for one in self._callers.values()}
        wanted = [place for place in places if ask.rank in (None, place.rank)]
        if not wanted:
            ranks = self._host.ranks
            return Refused(
                "InvalidArgument", f"{self._name!r} has no {role} {ask.rank}: its ranks are {ranks}"
            )
        # One that is opened again is another place, and refuses nobody.
        avoided = {*ask.but_not} if now < one.since + _AVOIDING else set()
        free = [
            place
            for place in wanted
            if place.rank not in given and (place.state == "closed" or place.rank not in avoided)
        ]
        for place in free:
            if place.state == "absent":
                return Handed(place.rank, self._host.handle_text(place.rank))
        for place in free:
            if place.state == "closed" and self._host.open_place(place.rank):
                return Handed(place.rank, self._host.handle_text(place.rank))
        reasons = [reason for place in wanted if (reason := self._reason(place, given))]
        if reasons:
            return Waits(names_of(reasons))
        holders = [f"{role} {place.rank} (pid {place.pid})" for place in wanted]
        return Refused("RankTaken", f"{self._name!r} has no free place: {names_of(holders)}")

    def _reason(self, place: Place, given: set[int | None]) -> str:
        """Returns why the place may become free, or an empty text if it is not known to."""
        who = f"{self._host.role} {place.rank}"
        if place.state == "dead":
            release = f"release_{self._host.role}({place.rank})"
            return f"{who} (pid {place.pid}) has died, and its server has not called {release}"
        if place.rank in given:
            return f"another process is about to attach as {who}"
        if place.state == "closed":
            return f"the place of {who}, which has ended, opens when its server's call returns"
        if place.state == "absent":
            return f"another process takes the place of {who}"
        return ""
