"""Any sequence of what networks, processes and signal handlers do to a writer and its readers.

`MEMLANE_EXAMPLES` is the number of sequences (`make soak`: a million); a failure is minimised.
`rules.py` has the table of the rules.
"""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memlane.broadcast.protocol.frames import What, header_of, whole_header
from memlane.broadcast.protocol.peer import Peer
from memlane.broadcast.protocol.reader_session import ReaderSession
from memlane.broadcast.protocol.states import Event, Life
from tests.sessions.examples import EXAMPLES, hello_of
from tests.sessions.rules import RULES, TABLES, Rule
from tests.sessions.steps import COUNT, LONG, step
from tests.sessions.world import EPOCH, World


def play(hosts: list[int], is_relayed: bool, pieces: int, steps: bytes) -> None:
    """Two bytes are a step: what happens, and to whom."""
    world, dice = World(hosts, relay=is_relayed, pieces=pieces), random.Random(steps)
    world.check()
    for what, whom in zip(steps[::2], steps[1::2], strict=False):
        step(world, what % 24, world.readers[whom % len(hosts)], whom // 8, dice)
        world.check()
    world.settle()


@LONG
@settings(
    max_examples=COUNT // 8, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([1, 3]),
    st.binary(max_size=80),
)
def test_any_sequence_of_events_loses_nothing(
    hosts: list[int], is_relayed: bool, pieces: int, steps: bytes
) -> None:
    """Everybody gets everything once and in order, knows who lives, and goes on once it can."""
    play(hosts, is_relayed, pieces, steps)


@LONG
def test_many_random_sequences_lose_nothing() -> None:
    """The same without the price of hypothesis; what fails is one step shorter at a time."""
    for seed in range(COUNT - COUNT // 8):
        dice = random.Random(seed)
        hosts = [dice.randrange(3) for _ in range(dice.randint(1, 6))]
        how = hosts, dice.random() < 0.6, dice.choice([1, 1, 3])
        steps = dice.randbytes(2 * dice.randint(1, 40))
        if not fails(*how, steps):
            continue
        at = 0
        while at < len(steps):
            shorter = steps[:at] + steps[at + 2 :]
            steps, at = (shorter, at) if fails(*how, shorter) else (steps, at + 2)
        print(f"seed {seed}: play(*{how}, {steps!r})")
        play(*how, steps)


def fails(*how: Any) -> bool:
    try:
        play(*how)
    except Exception:
        return True
    return False


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_goes_well(name: str) -> None:
    """Each is one thing that can happen, and goes well."""
    EXAMPLES[name]()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_is_needed(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the example that it is there for fails."""
    rule.remove(monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        EXAMPLES[rule.example]()


def test_who_attaches_behind_a_relay_is_of_this_version() -> None:
    """Also if another process has had its key, while it was on its way to the relay's ring."""
    peer = Peer(0, 0)
    peer.apply(Event.CONNECTED, 0.0)
    peer.apply(Event.SENT_TO_RELAY, 0.0)
    peer.refuse_version("it speaks another version")
    peer.attach(Event.SEEN_BEHIND, 0.0)
    assert (peer.life, peer.other_version) == (Life.RUNNING, "")


def test_a_welcome_that_was_lost_is_asked_for_whatever_else_comes() -> None:
    """A stream follows it, and never pauses."""
    now = 0.0
    session = ReaderSession("q", 0, 1, b"0", "", "h0", "there", 4.0, now)
    session.connection.accept(now)
    session.connect(now)
    session.out.clear()
    session.doubt(now)  # the WELCOME was lost
    for number in range(30):
        now += 0.09
        session.receive(whole_header(EPOCH, number, 0, 0), None, now)
        session.tick(now)
    assert [header_of(frame).what for frame in list(session.out)[:1]] == [What.HELLO]


def test_a_lost_connection_ends_the_sending_whoever_had_the_route() -> None:
    """A connection that is gone ends the sending, whoever had it before."""
    world = World([0, 1], relay=False)
    session, fresh = world.writer, {"session": b"x", "number": 1}
    for place, route in ((0, b"X"), (1, b"X"), (0, b"Y")):
        hello = hello_of(world.readers[place], **{**fresh, "number": 1 + (route == b"Y")})
        session.heard(route, hello, world.now, place, "somewhere")
    session.lost(b"X", world.now)
    session.outbox.stage(7, [(b"message",)])
    session.outbox.commit()
    for count, (route, _, peer, cursor) in enumerate(session.frames_due()):
        assert count < 100, "it is due for ever"
        if peer is not None and route == b"X":
            session.unsent(peer, world.now)
        else:
            session.sent(peer, cursor)


ROWS = [
    (name, table, event, state)
    for name, table in TABLES.items()
    for event, row in table.items()
    for state in row
]


@pytest.mark.parametrize(
    ("table", "event", "state"),
    [row[1:] for row in ROWS],
    ids=[f"{name}, {getattr(event, 'name', '')}, {state.name}" for name, _, event, state in ROWS],
)
def test_every_row_is_needed(
    table: dict[Any, dict[Any, Any]], event: Any, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it some example fails."""
    monkeypatch.delitem(table[event], state)
    for play_it in EXAMPLES.values():
        try:
            play_it()
        except (AssertionError, IndexError, KeyError):
            return
    pytest.fail("every example goes well without it")
