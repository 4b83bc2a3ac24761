"""Named examples, and the rules of the sessions that they test.

A rule is a piece of a method, with what would be there without it.
"""

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from memlane.broadcast.protocol.outbox import Outbox
from memlane.broadcast.protocol.peer import Peer
from memlane.broadcast.protocol.reader_session import ReaderSession
from memlane.broadcast.protocol.writer_session import WriterSession
from tests.sessions.world import BOUND, WINDOW, Reader, World

EXAMPLES: dict[str, Callable[[], None]] = {}


def example(play: Callable[[], None]) -> Callable[[], None]:
    EXAMPLES[play.__name__] = play
    return play


def world(*hosts: int, relay: bool = False, pieces: int = 1) -> World:
    """Everybody has attached."""
    made = World(list(hosts), relay=relay, pieces=pieces)
    for _ in range(15):
        made.advance(0.1)
    assert not made.writer.absent()
    return made


def one_of_two_is_here() -> World:
    """And has taken the only message."""
    made = World([0, 1], relay=False)
    made.cut(1, "up")
    for _ in range(3):
        made.advance(0.05)
    made.send()
    made.dequeue(made.readers[0])
    made.advance()
    return made


def relay_of(made: World) -> Reader:
    return next(reader for reader in made.readers if reader.is_relay)


def end(made: World, *, missed: int = 0) -> None:
    made.check()
    made.settle()
    if made.missed is not None:
        assert len([peer for peer in made.missed if peer.state != "dead"]) == missed, made.story()


@example
def a_full_window() -> None:
    made = world(0)
    for _ in range(8):
        made.send(5)
    made.check()
    end(made)


@example
def a_full_window_of_bytes() -> None:
    made = world(0)
    for _ in range(4):
        made.send(25)
    made.check()
    end(made)


@example
def a_slow_reader_and_a_fast_one() -> None:
    made = world(0, 1)
    made.send()
    made.dequeue(made.readers[0])
    made.advance()
    made.check()
    end(made)


@example
def a_reader_that_comes_late() -> None:
    made = one_of_two_is_here()
    made.check()
    end(made)
    assert made.readers[1].log == [0]


@example
def an_interrupted_message_that_the_ring_has() -> None:
    made = world(0)
    made.send(fate="after")
    made.check()
    end(made)


@example
def an_interrupted_message_that_the_ring_has_not() -> None:
    made = world(0)
    made.send(fate="before")
    made.check()
    end(made)


@example
def a_silent_reader_that_was_released() -> None:
    """The writer closes without a word about it: its application has gone on without that one."""
    made = world(0)
    made.send()
    made.cut(0, "up")
    for _ in range(8):
        made.advance()
    assert made.writer.has_dead()
    made.writer.release(0)
    made.close_writer()
    made.advance()
    assert made.missed == []


@example
def a_frame_that_is_sent_twice() -> None:
    made = world(0)
    made.interrupt = "flush"
    made.send()
    end(made)


@example
def a_frame_that_a_reader_has_lost() -> None:
    made = world(0, pieces=3)
    made.delay = 0.1
    made.interrupt = "receive"
    made.send()
    made.send()
    for _ in range(4):
        made.advance(0.05)
    made.send()
    made.dequeue(made.readers[0])
    end(made)


@example
def a_hello_that_the_writer_has_lost() -> None:
    made = World([0], relay=False)
    made.interrupt = "hear"
    for _ in range(10):
        made.advance(0.1)
    assert not made.writer.absent()
    end(made)


@example
def an_acknowledgement_that_the_writer_has_lost() -> None:
    made = world(0)
    made.send()
    made.interrupt = "hear"
    made.dequeue(made.readers[0])
    for _ in range(6):
        made.advance()
    assert made.writer.peers[0].taken == 1
    end(made)


@example
def an_acknowledgement_that_a_connection_has_lost() -> None:
    made = world(0)
    made.send()
    made.dequeue(made.readers[0])
    made.reset(made.readers[0])
    for _ in range(6):
        made.advance()
    assert made.writer.peers[0].taken == 1
    end(made)


@example
def a_connection_that_is_lost_within_a_message() -> None:
    made = world(0, pieces=3)
    made.delay = 0.1
    made.send()
    made.reset(made.readers[0], 2)
    end(made)


@example
def a_hello_of_an_older_connection() -> None:
    made = world(0)
    made.is_writer_stopped = True
    made.reset(made.readers[0])
    made.delay = 0.3
    made.is_writer_stopped = False
    made.advance(0.05)
    made.advance(0.05)
    made.reset(made.readers[0], 1)
    made.delay = 0.0
    for _ in range(8):
        made.advance(0.1)
    made.send()
    assert made.writer.peers[0].is_connected
    made.check()
    end(made)


@example
def a_hello_that_is_slow() -> None:
    made = world(0)
    made.cut(0, "up")
    made.reset(made.readers[0])
    for _ in range(3):
        made.advance(0.4)
    made.heal(0)
    made.delay = 0.3
    made.advance(0.05)
    made.advance(0.2)
    assert made.writer.peers[0].state == "running"
    made.delay = 0.0
    made.advance(0.2)
    assert made.writer.peers[0].state == "running"
    end(made)


@example
def a_reader_that_dies() -> None:
    made = world(0, 1)
    made.kill(made.readers[0])
    for _ in range(8):
        made.advance()
    assert made.writer.peers[0].state == "dead"
    end(made)


@example
def a_reader_that_was_given_up_comes_back() -> None:
    made = world(0)
    made.cut(0, "up")
    for _ in range(8):
        made.advance()
    made.heal(0)
    for _ in range(8):
        made.advance()
        made.dequeue(made.readers[0])
    assert made.readers[0].outcome in ("ReaderGivenUp", "WriterDied")
    end(made)


@example
def a_goodbye_that_the_writer_has_lost() -> None:
    made = world(0, 1)
    made.interrupt = "hear"
    made.close(made.readers[0])
    for _ in range(8):
        made.advance()
    assert made.writer.peers[0].state == "closed"
    assert made.readers[0].session.has_left
    end(made)


@example
def an_answer_to_a_goodbye_that_was_lost() -> None:
    made = world(0, 1)
    made.delay = 0.1
    made.close(made.readers[0])
    made.advance(0.15)
    made.interrupt = "receive"
    for _ in range(8):
        made.advance()
    assert made.readers[0].session.has_left
    end(made)


@example
def a_goodbye_without_a_connection() -> None:
    made = world(0, 1)
    made.reset(made.readers[0])
    made.close(made.readers[0])
    for _ in range(4):
        made.advance()
    assert made.writer.peers[0].state == "closed"
    end(made)


@example
def an_end_that_a_reader_has_lost() -> None:
    made = world(0)
    made.delay = 0.1
    made.send()
    made.close_writer()
    made.write()
    made.reset(made.readers[0])
    for _ in range(8):
        made.advance(0.1)
        made.drain()
    end(made)


@example
def an_answer_to_the_end_that_was_lost() -> None:
    made = world(0)
    made.close_writer()
    made.write()
    made.read(made.readers[0])
    made.interrupt = "hear"
    for _ in range(10):
        made.advance(0.1)
        made.drain()
    end(made)


@example
def a_writer_that_closes_while_its_readers_are_slow() -> None:
    made = world(0)
    for number in range(4):
        made.delay = 0.7 * (number + 1)
        made.send()
    made.close_writer()
    made.delay = 0.0
    for _ in range(8):
        made.advance(0.4)
        made.drain()
    assert not made.missed
    assert len(made.readers[0].log) == 4
    end(made)


@example
def a_reader_that_comes_while_its_writer_closes() -> None:
    made = one_of_two_is_here()
    made.close_writer()
    for _ in range(3):
        made.advance(BOUND / 4)
    made.heal(1)
    for _ in range(8):
        made.advance()
        made.drain()
    assert made.missed == []
    assert made.readers[1].log == [0]
    end(made)


@example
def a_reader_that_does_not_come_while_its_writer_closes() -> None:
    made = one_of_two_is_here()
    made.close_writer()
    for _ in range(12):
        made.advance()
        made.drain()
    assert made.missed == [made.writer.peers[1]]


@example
def a_reader_that_dies_while_its_writer_closes() -> None:
    made = world(0)
    made.send()
    made.drain()
    made.delay = 2.0  # it never hears of the end
    made.close_writer()
    made.advance(0.4)
    made.kill(made.readers[0])
    for _ in range(8):
        made.advance()
    assert made.missed == []
    end(made)


@example
def a_relay_that_dies() -> None:
    made = world(0, 0, 1, relay=True)
    made.send()
    made.advance()
    relay = next(reader for reader in made.readers if reader.is_relay and reader.host == 0)
    made.kill(relay)
    made.send()
    for _ in range(10):
        made.advance()
        made.drain()
    end(made)


@example
def a_host_that_dies() -> None:
    made = world(0, 0, 1, relay=True)
    for reader in made.readers[:2]:
        made.kill(reader)
    for _ in range(12):
        made.advance()
    assert [peer.state for peer in made.writer.peers] == ["dead", "dead", "running"]
    end(made)


@example
def a_relay_that_dies_while_another_attaches() -> None:
    made = World([0, 0], relay=True)
    made.advance(0.02)
    relay = next(peer for peer in made.writer.peers if peer.state == "running")
    made.kill(made.readers[relay.place])
    for _ in range(12):
        made.advance()
    end(made)


@example
def a_relay_whose_reader_closes() -> None:
    made = world(0, 0, 1, relay=True)
    relay = next(reader for reader in made.readers if reader.is_relay and reader.host == 0)
    made.close(relay)
    made.advance()
    assert made.writer.peers[relay.rank].has_left
    made.send()
    end(made)


@example
def a_relay_that_dies_with_the_end_in_its_hands() -> None:
    made = world(0, 0, relay=True)
    relay = relay_of(made)
    relay.is_slow = True
    made.send()
    made.close_writer()
    made.advance(0.1)
    made.advance(0.1)
    made.kill(relay)
    for _ in range(12):
        made.advance()
        made.drain()
    end(made)


@example
def a_relay_that_cannot_pass_on_a_message() -> None:
    made = world(0, 0, 0, relay=True)
    relay = relay_of(made)
    made.send()
    made.advance()
    relay.is_slow = True
    made.send()
    made.advance(0.01)
    made.fail_relay(relay)
    made.send()
    end(made)


@example
def a_relay_that_cannot_pass_on_the_last_message() -> None:
    made = world(0, 0, relay=True)
    relay = relay_of(made)
    made.close(next(reader for reader in made.readers if reader is not relay))
    made.advance()
    relay.is_slow = True
    made.send()
    made.close_writer()
    made.advance(0.1)
    made.advance(0.1)
    relay.session.take(made.now)
    made.advance(0.1)
    made.fail_relay(relay)
    for _ in range(12):
        made.advance()
        made.drain()
    end(made)


@example
def a_writer_that_closes_while_a_relay_is_lost() -> None:
    made = world(0, 0, relay=True)
    relay = relay_of(made)
    relay.is_stopped = True
    made.send()
    made.close_writer()
    for _ in range(8):
        made.advance()
    assert made.missed is not None
    assert len(made.missed) == 2
    end(made, missed=2)


@example
def a_neighbour_that_computes_while_its_relay_ends() -> None:
    made = world(0, 0, relay=True)
    made.send()
    made.kill(relay_of(made))
    for _ in range(10):
        made.advance()
    made.close_writer()
    for _ in range(4):
        made.advance()
    assert made.missed == []
    end(made)


@example
def a_neighbour_without_a_connection_while_its_relay_ends() -> None:
    made = world(0, 0, relay=True)
    made.send()
    relay = relay_of(made)
    made.reset(next(reader for reader in made.readers if reader is not relay))
    made.fail_relay(relay)
    for _ in range(4):
        made.advance()
    made.close_writer()
    for _ in range(4):
        made.advance()
        made.dequeue(relay)
    assert made.missed == []
    end(made)


@example
def a_neighbour_that_reads_on_in_the_ring_of_a_dead_relay() -> None:
    made = world(0, 0, relay=True)
    relay = relay_of(made)
    other = next(reader for reader in made.readers if reader is not relay)
    for _ in range(WINDOW):
        made.send()
    for _ in range(3):
        made.advance()
    made.kill(relay)
    for _ in range(10):
        made.advance()
    for _ in range(WINDOW):
        made.dequeue(other)
    for _ in range(3):
        made.advance()
    assert made.writer.outbox.has_room(5)
    end(made)


@example
def a_neighbour_whose_connection_is_lost() -> None:
    made = world(0, 0, relay=True)
    neighbour = next(reader for reader in made.readers if reader.is_behind)
    made.send()
    made.dequeue(neighbour)
    made.reset(neighbour)
    for _ in range(4):
        made.advance()
    assert not made.writer.peers[neighbour.rank].is_streaming
    end(made)


@example
def a_neighbour_that_stops_without_a_connection() -> None:
    made = world(0, 0, relay=True)
    neighbour = next(reader for reader in made.readers if reader.is_behind)
    neighbour.is_stopped = True
    made.reset(neighbour)
    for _ in range(10):
        made.advance()
    assert made.writer.peers[neighbour.rank].state == "running"
    end(made)


@example
def a_neighbour_that_dies_before_the_writer_knows_it() -> None:
    made = World([0, 0], relay=True)
    made.delay = 0.1
    for _ in range(60):
        made.advance(0.02)
        found = [r for r in made.readers if r.ring is not None and not r.is_relay]
        if found:
            break
    (neighbour,) = found
    assert neighbour.line is not None
    neighbour.line.to_writer.clear()
    neighbour.session.out.clear()
    made.kill(neighbour)
    for _ in range(8):
        made.advance()
    assert made.writer.peers[neighbour.rank].state == "absent"


@example
def a_word_that_is_older_than_the_latest_hello() -> None:
    made = World([0, 0], relay=True)
    made.advance(0.02)
    made.close(made.readers[0])
    made.cut(0, "down")
    for _ in range(4):
        made.advance(0.1)
    made.heal(0)
    made.advance(0.02)
    made.send()
    made.reset(made.readers[1])
    for _ in range(4):
        made.advance()
        made.drain()
    end(made)


@dataclass(frozen=True)
class Rule:
    """Attributes:
    name: what it says.
    example: the one that fails without it.
    owner, method: where it stands, and
    text: how,
    without: what stands there if it is removed.
    """

    name: str
    example: str
    owner: type
    method: str
    text: str
    without: str

    def remove(self, patch: pytest.MonkeyPatch) -> None:
        found: Any = inspect.getattr_static(self.owner, self.method)
        function = found.fget if isinstance(found, property) else found
        source = textwrap.dedent(inspect.getsource(function))
        assert self.text in source, f"{self.owner.__name__}.{self.method} has no {self.text!r}"
        names: dict[str, Any] = {}
        source = source.replace("super()", f"super({self.owner.__name__}, self)")
        code = "from __future__ import annotations\n" + source.replace(self.text, self.without)
        exec(code, vars(sys.modules[self.owner.__module__]) | {}, names)
        made = names[self.method]
        patch.setattr(self.owner, self.method, made)


W, R = WriterSession, ReaderSession
RULES = [
    Rule("a window limits messages", "a_full_window", Outbox, "_is_in_the_way",
         "or self.next - peer.taken >= self._window", ""),
    Rule("a window limits bytes", "a_full_window_of_bytes", Outbox, "_is_in_the_way",
         "is_too_much or", ""),
    Rule("a message is kept until every reader has taken it", "a_slow_reader_and_a_fast_one",
         Outbox, "drop_taken", "min((", "max(("),
    Rule("messages are kept for absent readers, too", "a_reader_that_comes_late", Peer,
         "is_waited_for", '("absent", "running")', '("running",)'),
    Rule("a message that reached the ring is committed", "an_interrupted_message_that_the_ring_has",
         Outbox, "settle", "!= mark", "is None"),
    Rule("a message that did not reach the ring is dropped",
         "an_interrupted_message_that_the_ring_has_not", Outbox, "settle", "!= mark",
         "is not None"),
    Rule("a duplicate frame is ignored", "a_frame_that_is_sent_twice", R, "_take_piece",
         "if place < self.wanted:", "if False:"),
    Rule("messages before the welcome are ignored", "a_frame_that_a_reader_has_lost", R,
         "_take_piece", "if not self.is_welcome:", "if False:"),
    Rule("a stream resumes where the reader asks", "a_connection_that_is_lost_within_a_message", W,
         "_greet", "(hello.sequence, hello.piece), self", "(hello.sequence + 1, 0), self"),
    Rule("a hello is repeated", "a_hello_that_the_writer_has_lost", R, "tick",
         "if self._greet_at is not None and now >= self._greet_at:", "if False:"),
    Rule("lost acknowledgements are requested again", "an_acknowledgement_that_the_writer_has_lost",
         W, "say_again", "if peer.is_streaming:", "if False:"),
    Rule("a hello is also an acknowledgement", "an_acknowledgement_that_a_connection_has_lost", W,
         "_greet", "if not peer.host:", "if False:"),
    Rule("an outdated hello is ignored", "a_hello_of_an_older_connection", W, "_greet",
         "if peer.session == hello.session and hello.number <= peer.greeting:", "if False:"),
    Rule("a reader that has proven its key gets more time", "a_hello_that_is_slow", W, "tick",
         "max(peer.lost_since, peer.knocked_at)", "peer.lost_since"),
    Rule("a reader that does not come back is dead", "a_reader_that_dies", W, "tick",
         "now >= dead_at", "False"),
    Rule("a goodbye is repeated", "a_goodbye_that_the_writer_has_lost", R, "tick",
         "self._say_at = now + self._repeat", "self._say_at = None"),
    Rule("a goodbye is sent again over a new connection", "a_goodbye_without_a_connection", R,
         "connect", "if self._is_leaving:", "self._say_at = None\n    if False:"),
    Rule("the end is sent again over a new connection", "an_end_that_a_reader_has_lost", Peer,
         "stream_from", "True, 0.0", "True, 1e9"),
    Rule("a closing writer waits while readers make progress",
         "a_writer_that_closes_while_its_readers_are_slow", W, "stuck", "max(since, latest)",
         "since"),
    Rule("an absent reader is owed what was sent", "a_reader_that_comes_while_its_writer_closes", W,
         "unfinished", 'peer.state == "absent"', "False"),
    Rule("a reader without a connection has its own deadline",
         "a_reader_that_dies_while_its_writer_closes", W, "stuck", "peer.lost_since is not None",
         "False"),
    Rule("readers behind a relay that ended continue alone", "a_host_that_dies", W, "_part_orphans",
         "if peer.via is None or places.is_relay(peer.via):", "if True:"),
    Rule("a relay outlives its own reader", "a_relay_whose_reader_closes", W, "_hear_report",
         "peer.stop_reading()", "peer.leave()"),
    Rule("a relay confirms the end once all is passed on",
         "a_relay_that_dies_with_the_end_in_its_hands", R, "_hear_end",
         "if self.ring is None:", "if True:"),
    Rule("taking the last message does not confirm the end",
         "a_relay_that_cannot_pass_on_the_last_message", R, "acknowledge",
         "self._acked = self.taken", "self._confirm_end(); self._acked = self.taken"),
    Rule("a message that a relay could not pass on is requested again",
         "a_relay_that_cannot_pass_on_a_message", R, "read_alone", "if taken < self.taken or ",
         "if "),
    Rule("a writer names the readers behind a lost relay",
         "a_writer_that_closes_while_a_relay_is_lost", W, "missed",
         'or (peer.via in owing and peer.state != "closed")', ""),
    Rule("readers behind a relay are told when it ends",
         "a_neighbour_that_computes_while_its_relay_ends", W, "_part_orphans", "peer.say(", "("),
    Rule("a reader that reconnects is told that its relay ended",
         "a_neighbour_without_a_connection_while_its_relay_ends", W, "_greet",
         "What.SEEN if has_relay else What.REFUSED", "What.SEEN"),
    Rule("a reader that reads on behind a dead relay acknowledges",
         "a_neighbour_that_reads_on_in_the_ring_of_a_dead_relay", R, "follow",
         "position > self.taken", "False"),
    Rule("a neighbour that reconnects stays behind its relay",
         "a_neighbour_whose_connection_is_lost", W, "_greet",
         "if hello.is_behind or peer.via is not None:", "if False:"),
    Rule("a relay speaks for neighbours without a connection",
         "a_neighbour_that_stops_without_a_connection", Peer, "note_loss", "and self.via is None",
         ""),
    Rule("only its own key attaches a reader", "a_neighbour_that_dies_before_the_writer_knows_it",
         W, "_hear_report", "peer is teller and ", ""),
    Rule("only the welcome for the latest hello counts",
         "a_word_that_is_older_than_the_latest_hello", R, "_be_welcome",
         "if welcome.number != self._greeting:", "if False:"),
]  # fmt: skip
