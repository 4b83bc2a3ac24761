"""Named examples: each is one thing that can happen to a writer and its readers, and goes well."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from memlane.broadcast.protocol.frames import (
    VERSION,
    Header,
    Hello,
    Report,
    ReportRow,
    What,
    control,
)
from memlane.broadcast.protocol.peer import MAX_IDLE_FRAMES
from memlane.broadcast.protocol.reader_session import ReaderSession
from memlane.broadcast.protocol.states import Life, Link, Stream
from memlane.errors import CorruptMessage, InvalidArgument, LayoutMismatch
from tests.sessions.world import BOUND, EPOCH, HANDSHAKE, OTHER_VERSION, WINDOW, Line, Reader, World


def world(*hosts: int, relay: bool = False, pieces: int = 1) -> World:
    """Everybody has attached."""
    made = World(list(hosts), relay=relay, pieces=pieces)
    made.run(15, 0.1)
    assert not made.writer.count_absent()
    return made


def one_of_two_is_here() -> World:
    """And has taken the only message."""
    made = World([0, 1], relay=False)
    made.cut(1, "up")
    made.run(3, 0.05)
    made.send()
    made.dequeue(made.readers[0])
    made.advance()
    return made


def relayed(*others: int) -> tuple[World, Reader, Reader]:
    """A relay and the reader behind it, on host 0; `others` are the hosts of more readers."""
    made = world(0, 0, *others, relay=True)
    relay = next(reader for reader in made.readers if reader.is_relay)
    return made, relay, next(r for r in made.readers if r is not relay and r.host == relay.host)


def end(made: World, *, missed: int = 0) -> None:
    made.check()
    made.settle()
    if made.missed is not None:
        assert len([peer for peer in made.missed if peer.state != "dead"]) == missed, made.story()


def a_full_window() -> None:
    made = world(0)
    for _ in range(8):
        made.send(5)
    end(made)


def a_full_window_of_bytes() -> None:
    made = world(0)
    for _ in range(4):
        made.send(25)
    end(made)


def a_slow_reader_and_a_fast_one() -> None:
    made = world(0, 1)
    made.send()
    made.dequeue(made.readers[0])
    made.advance()
    end(made)


def a_reader_that_comes_late() -> None:
    made = one_of_two_is_here()
    end(made)
    assert made.readers[1].log == [0]


def an_interrupted_message_that_the_ring_has() -> None:
    made = world(0)
    made.send(fate="after")
    end(made)


def an_interrupted_message_that_the_ring_has_not() -> None:
    made = world(0)
    made.send(fate="before")
    end(made)


def a_silent_reader_that_was_released() -> None:
    """The writer closes without a word about it: its application has gone on without that one."""
    made = world(0)
    made.send()
    made.cut(0, "up")
    made.run(8)
    assert made.writer.has_dead()
    made.writer.release(0, made.now)
    assert not made.writer.has_dead()
    made.close_writer()
    made.advance()
    assert made.missed == []


def a_frame_that_is_sent_twice() -> None:
    made = world(0)
    made.interrupt = "flush"
    made.send()
    end(made)


def a_frame_that_a_reader_has_lost() -> None:
    made = world(0, pieces=3)
    made.delay = 0.1
    made.interrupt = "receive"
    made.send()
    made.send()
    made.run(4, 0.05)
    made.send()
    made.dequeue(made.readers[0])
    end(made)


def a_hello_that_the_writer_has_lost() -> None:
    made = World([0], relay=False)
    made.interrupt = "hear"
    made.run(10, 0.1)
    assert not made.writer.count_absent()
    end(made)


def an_acknowledgement_that_the_writer_has_lost() -> None:
    made = world(0)
    made.send()
    made.interrupt = "hear"
    made.dequeue(made.readers[0])
    made.run(6)
    assert made.peers[0].taken == 1
    end(made)


def an_acknowledgement_that_a_connection_has_lost() -> None:
    made = world(0)
    made.send()
    made.dequeue(made.readers[0])
    made.reset(made.readers[0])
    made.run(6)
    assert made.peers[0].taken == 1
    end(made)


def a_connection_that_is_lost_within_a_message() -> None:
    made = world(0, pieces=3)
    made.delay = 0.1
    made.send()
    made.reset(made.readers[0], 2)
    end(made)


def a_hello_of_an_older_connection() -> None:
    made = world(0)
    made.is_writer_stopped = True
    made.reset(made.readers[0])
    made.delay = 0.3
    made.is_writer_stopped = False
    made.run(2, 0.05)
    made.reset(made.readers[0], 1)
    made.delay = 0.0
    made.run(8, 0.1)
    made.send()
    assert made.peers[0].is_connected
    assert len(made.lines) == 3, "it was sent away once more"
    end(made)


def a_hello_that_is_slow() -> None:
    made = world(0)
    made.cut(0, "up")
    made.reset(made.readers[0])
    made.run(3, 0.4)
    made.heal(0)
    made.delay = 0.3
    made.advance(0.05)
    made.advance(0.2)
    assert made.peers[0].state == "running"
    made.delay = 0.0
    made.advance(0.2)
    assert made.peers[0].state == "running"
    end(made)


def a_reader_that_dies() -> None:
    made = world(0, 1)
    made.kill(made.readers[0])
    made.run(8)
    assert made.peers[0].state == "dead"
    assert made.peers[0].link is Link.NONE
    end(made)


def a_reader_that_was_declared_dead_comes_back() -> None:
    made = world(0)
    made.cut(0, "up")
    made.run(8)
    made.heal(0)
    for _ in range(8):
        made.advance()
        made.dequeue(made.readers[0])
    assert made.readers[0].outcome in ("ReaderGivenUp", "WriterDied")
    end(made)


def a_bye_that_the_writer_has_lost() -> None:
    made = world(0, 1)
    made.interrupt = "hear"
    made.close(made.readers[0])
    made.run(8)
    assert made.peers[0].state == "closed"
    assert made.readers[0].session.has_left
    end(made)


def an_answer_to_a_bye_that_was_lost() -> None:
    made = world(0, 1)
    made.delay = 0.1
    made.close(made.readers[0])
    made.advance(0.15)
    made.interrupt = "receive"
    made.run(8)
    assert made.readers[0].session.has_left
    end(made)


def a_bye_without_a_connection() -> None:
    made = world(0, 1)
    made.reset(made.readers[0])
    made.close(made.readers[0])
    made.run(4)
    assert made.peers[0].state == "closed"
    end(made)


def an_end_that_a_reader_has_lost() -> None:
    made = world(0)
    made.delay = 0.1
    made.send()
    made.close_writer()
    made.write()
    made.reset(made.readers[0])
    made.run(8, 0.1, drains=True)
    end(made)


def an_answer_to_the_end_that_was_lost() -> None:
    made = world(0)
    made.close_writer()
    made.write()
    made.read(made.readers[0])
    made.interrupt = "hear"
    made.run(10, 0.1, drains=True)
    end(made)


def a_writer_that_closes_while_its_readers_are_slow() -> None:
    made = world(0)
    for number in range(4):
        made.delay = 0.7 * (number + 1)
        made.send()
    made.close_writer()
    made.delay = 0.0
    made.run(8, 0.4, drains=True)
    assert not made.missed
    assert len(made.readers[0].log) == 4
    end(made)


def a_reader_that_comes_while_its_writer_closes() -> None:
    made = one_of_two_is_here()
    made.close_writer()
    made.run(3, BOUND / 4)
    made.heal(1)
    made.run(8, drains=True)
    assert made.missed == []
    assert made.readers[1].log == [0]
    end(made)


def a_reader_that_does_not_come_while_its_writer_closes() -> None:
    made = one_of_two_is_here()
    made.close_writer()
    made.run(12, drains=True)
    assert made.missed == [made.peers[1]]


def a_reader_that_dies_while_its_writer_closes() -> None:
    made = world(0)
    made.send()
    made.drain()
    made.delay = 2.0  # it never hears of the end
    made.close_writer()
    made.advance(0.4)
    made.kill(made.readers[0])
    made.run(8)
    assert made.missed == []
    end(made)


def a_relay_that_dies() -> None:
    made, relay, _ = relayed(1)
    made.send()
    made.advance()
    made.kill(relay)
    made.send()
    made.run(10, drains=True)
    end(made)


def a_host_that_dies() -> None:
    made = world(0, 0, 1, relay=True)
    for reader in made.readers[:2]:
        made.kill(reader)
    made.run(12)
    assert [peer.state for peer in made.peers] == ["dead", "dead", "running"]
    end(made)


def a_relay_that_dies_while_another_attaches() -> None:
    made = World([0, 0], relay=True)
    made.advance(0.02)
    relay = next(peer for peer in made.peers if peer.state == "running")
    made.kill(made.readers[relay.place])
    made.run(12)
    end(made)


def a_relay_whose_reader_closes() -> None:
    made, relay, _ = relayed(1)
    made.close(relay)
    made.advance()
    assert made.peers[relay.rank].life is Life.RELAYING
    made.send()
    end(made)


def a_relay_that_dies_with_the_end_in_its_hands() -> None:
    made, relay, _ = relayed()
    relay.is_slow = True
    made.send()
    made.close_writer()
    made.run(2, 0.1)
    made.kill(relay)
    made.run(12, drains=True)
    end(made)


def a_relay_that_cannot_pass_on_a_message() -> None:
    made, relay, _ = relayed(0)
    made.send()
    made.advance()
    relay.is_slow = True
    made.send()
    made.advance(0.01)
    made.fail_relay(relay)
    made.send()
    end(made)


def a_relay_that_cannot_pass_on_the_last_message() -> None:
    made, relay, neighbour = relayed()
    made.close(neighbour)
    made.advance()
    relay.is_slow = True
    made.send()
    made.close_writer()
    made.run(2, 0.1)
    relay.session.take(made.now)
    made.advance(0.1)
    made.fail_relay(relay)
    made.run(12, drains=True)
    end(made)


def a_writer_that_closes_while_a_relay_passes_nothing_on() -> None:
    made, relay, _ = relayed()
    relay.is_slow = True
    made.send()
    made.close_writer()
    made.run(8)
    assert made.missed is not None
    assert len(made.missed) == 2
    end(made, missed=2)


def a_neighbour_that_computes_while_its_relay_ends() -> None:
    made, relay, _ = relayed()
    made.send()
    made.kill(relay)
    made.run(10)
    made.close_writer()
    made.run(4)
    assert made.missed == []
    end(made)


def a_neighbour_without_a_connection_while_its_relay_ends() -> None:
    made, relay, neighbour = relayed()
    made.send()
    made.reset(neighbour)
    made.fail_relay(relay)
    made.run(4)
    made.close_writer()
    for _ in range(4):
        made.advance()
        made.dequeue(relay)
    assert made.missed == []
    end(made)


def a_neighbour_that_reads_on_in_the_ring_of_a_dead_relay() -> None:
    made, relay, neighbour = relayed()
    for _ in range(WINDOW):
        made.send()
    made.run(3)
    made.kill(relay)
    made.run(10)
    for _ in range(WINDOW):
        made.dequeue(neighbour)
    made.run(3)
    assert made.outbox.has_room(5)
    end(made)


def a_neighbour_whose_connection_is_lost() -> None:
    made, _, neighbour = relayed()
    made.send()
    made.dequeue(neighbour)
    made.reset(neighbour)
    made.run(4)
    assert made.peers[neighbour.rank].link is Link.IDLE
    end(made)


def a_neighbour_that_stops_without_a_connection() -> None:
    made, _, neighbour = relayed()
    neighbour.is_stopped = True
    made.reset(neighbour)
    made.run(10)
    assert made.peers[neighbour.rank].state == "running"
    assert made.peers[neighbour.rank].link is Link.PARKED
    end(made)


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
    made.run(8)
    assert made.peers[neighbour.rank].state == "absent"


def a_word_that_is_older_than_the_latest_hello() -> None:
    """On a slow network, where HELLO is sent again before its answer arrives."""
    made = World([0])
    made.delay = 0.3
    made.dequeue(made.readers[0])
    made.send(25)
    made.advance(0.3)
    end(made)


def a_writer_that_is_stopped_while_a_connection_is_reset() -> None:
    made = world(0)
    made.is_writer_stopped = True
    made.reset(made.readers[0])
    for _ in range(20):
        made.advance()
        made.dequeue(made.readers[0])
    assert not made.readers[0].outcome
    end(made)


def a_writer_that_is_stopped_after_its_connection_was_lost() -> None:
    """For longer than a reader waits for a handshake, so that it begins several."""
    made = world(0)
    made.cut(0, "up")
    made.reset(made.readers[0])
    made.advance(BOUND / 2)
    made.is_writer_stopped = True
    made.heal(0)
    for _ in range(20):
        made.advance(0.4)
        made.dequeue(made.readers[0])
    assert not made.readers[0].outcome
    end(made)


def a_writer_whose_connections_are_all_cut_in_the_handshake() -> None:
    made = world(0)
    made.is_writer_stopped = True
    for _ in range(10):
        made.reset(made.readers[0])
        made.advance(0.3)
        made.dequeue(made.readers[0])
    assert made.readers[0].outcome == "WriterDied"


def handshakes_that_are_cut_before_the_first_is_complete() -> None:
    made = World([0], relay=False)
    made.is_writer_stopped = True
    for _ in range(10):
        made.reset(made.readers[0])
        made.advance(0.3)
        made.dequeue(made.readers[0])
    assert made.readers[0].outcome == "AccessRefused"


def a_connection_that_is_refused_for_a_moment() -> None:
    made = world(0)
    made.reset(made.readers[0])
    session = made.readers[0].session
    session.lose(made.now)
    session.connection.accept(made.now)
    session.lose(made.now)
    for moment in (0.0, 0.2, 0.4, 0.6):
        session.connection.note_probe(True, made.now + moment)
    assert session.connection.death(made.now + 0.6) is None
    session.connection.note_probe(True, made.now + 0.81)
    assert session.connection.death(made.now + 0.81) is not None


def a_handshake_whose_begin_is_seen_late() -> None:
    """Together with its end: it may have lasted as long as this end waits for an answer."""
    session, now = world(0).readers[0].session, 2000.0
    session.lose(now)
    for _ in range(3):
        looked_at, now = now, now + HANDSHAKE
        session.connection.accept(now, looked_at)
        session.lose(now)
    assert session.connection.death(now) is None


def a_host_that_vanishes_before_the_first_handshake_is_complete() -> None:
    made = World([0], relay=False)
    made.is_writer_stopped = True
    made.reset(made.readers[0])
    made.advance(0.1)
    made.cut(0, "up")
    made.reset(made.readers[0])
    for _ in range(8):
        made.advance()
        made.dequeue(made.readers[0])
    assert made.readers[0].outcome == "WriterDied"


def a_writer_that_dies_before_the_first_handshake_is_complete() -> None:
    """Nobody listens there any more, whichever side ended that handshake."""
    made = World([0], relay=False)
    made.is_writer_stopped = True
    made.reset(made.readers[0])
    made.advance(0.1)
    made.kill_writer()
    for _ in range(8):
        made.advance()
        made.dequeue(made.readers[0])
    assert "no process listens" in str(made.readers[0].session.connection.failure)


def a_machine_that_is_suspended() -> None:
    """Writer and reader; their connection was lost before."""
    made = world(0)
    reader = made.readers[0]
    made.cut(0, "up")
    made.reset(reader)
    made.advance(0.1)
    reader.is_stopped = made.is_writer_stopped = True
    made.run(10)
    reader.is_stopped = made.is_writer_stopped = False
    made.write()
    assert made.peers[0].state == "running"
    made.heal(0)
    end(made)


def a_reader_that_dies_while_its_writer_is_stopped() -> None:
    """From then on the bound runs, no longer."""
    made = world(0, 1)
    made.is_writer_stopped = True
    made.kill(made.readers[0])
    made.run(20)
    made.is_writer_stopped = False
    made.run(8)
    assert made.peers[0].state == "dead"
    end(made)


def a_reader_that_is_stopped_without_a_connection() -> None:
    """It has had no time to connect."""
    made = world(0)
    reader = made.readers[0]
    made.cut(0, "up")
    made.reset(reader)
    made.advance(0.1)
    reader.is_stopped = True
    made.run(10)
    reader.is_stopped = False
    made.read(reader)
    assert reader.session.connection.death(made.now) is None


def a_reader_that_is_stopped_between_two_refusals() -> None:
    """They may be those of two proxies that restarted."""
    made = world(0)
    session = made.readers[0].session
    session.lose(made.now)
    session.connection.note_probe(True, made.now)
    session.connection.delay_clock(2.0, made.now + 2.0)
    session.connection.note_probe(True, made.now + 2.0)
    assert session.connection.death(made.now + 2.0) is None


def a_reader_that_is_stopped_before_its_first_connection() -> None:
    """It does not know yet what has happened meanwhile."""
    session = ReaderSession("q", 0, 1, b"s", "", "", "w", BOUND, 0.0)
    session.connection.delay_clock(10.0, 10.0)
    assert session.connection.death(10.0) is None
    assert session.connection.death(20.0) == "no connection was accepted"


def a_writer_that_is_stopped_while_it_closes() -> None:
    """It has yet to hear what its readers have said since."""
    made = world(0)
    made.send()
    made.close_writer()
    made.writer.delay_clocks(4.0, made.now + 4.0)
    assert not made.writer.ending.is_stuck(made.now + 4.0)


def a_relay_that_greets_and_does_not_report() -> None:
    """On the connection that it has, again and again: its neighbour goes on alone."""
    made, relay, neighbour = relayed(1)
    relay.is_stopped = True
    made.send()
    assert relay.line is not None
    for number in range(50, 60):
        relay.line.to_writer.append((made.now, hello_of(relay, number=number, sequence=1)))
        made.advance()
        made.drain()
    assert neighbour.log == [0]
    end(made)


def a_relay_that_has_closed_is_silent_while_its_writer_closes() -> None:
    """The reader behind it may lack something, and is named; the relay itself lacks nothing."""
    made, relay, behind = relayed()
    made.send()
    made.run(4, drains=True)
    made.close(relay)
    made.run(4, drains=True)
    made.send()
    made.advance()
    assert made.peers[relay.rank].life is Life.RELAYING
    made.delay = 1000.0
    made.close_writer()
    made.run(12)
    assert made.missed == [made.peers[behind.rank]]


def a_member_that_only_reconnects_while_its_writer_closes() -> None:
    """Each time before it is found to be gone."""
    made = world(0, 1)
    made.send()
    reader, _ = liar(made)
    reader.lies = True
    made.close_writer()
    for number in range(50, 150):
        line = made.dial(reader)
        line.to_writer.append((made.now, hello_of(reader, number=number)))
        made.cut_line(line, 1)
        made.advance()
        made.drain()
    assert made.missed == [made.peers[0]]


def a_member_that_reads_again_and_again_while_its_writer_closes() -> None:
    """The same message; and acknowledges it never."""
    made = world(0, 1)
    made.send(60)
    reader, _ = liar(made)
    reader.lies = True
    made.close_writer()
    for number in range(50, 150):
        made.claim(reader, made.dial(reader), hello_of(reader, number=number))
        made.writer.moved(made.lines[b"0-%d" % (number - 49)].route, 1 << 16, made.now)
        made.advance()
        made.drain()
    assert made.missed == [made.peers[0]]


def a_member_that_attaches_for_ever_while_its_writer_closes() -> None:
    """Behind a relay that passes nothing on."""
    made = World([0, 0], relay=True)
    relay, reader = made.readers
    reader.is_stopped = relay.is_slow = True
    made.send()
    made.advance()
    reader.lies = True
    made.close_writer()
    line = made.dial(reader)
    for number in range(50, 100):
        made.claim(reader, line, hello_of(reader, number=number))
        made.advance()
    assert made.missed == made.peers


def one_of_two_is_of_another_version() -> tuple[World, Reader, Line]:
    """It has said so, and was answered."""
    made = one_of_two_is_here()
    made.heal(1)
    reader, line = liar(made, 1)
    line.to_writer.clear()
    made.claim(reader, line, OTHER_VERSION + bytes(44))
    return made, reader, line


def a_reader_of_another_version() -> None:
    """It says so, and learns it; the writer goes on once one of this version has its place."""
    made, reader, line = one_of_two_is_of_another_version()
    (answer,) = line.to_reader.popleft()[1]
    assert made.writer.has_dead()
    with pytest.raises(LayoutMismatch, match=f"speaks version {VERSION + 1} of the protocol"):
        made.writer.places.raise_death()
    session = ReaderSession("q", 1, 1, b"1", "", "h1", "there", BOUND, made.now)
    session.receive(OTHER_VERSION + answer[4:], None, made.now)
    assert isinstance(session.connection.failure, LayoutMismatch)
    made.claim(reader, line, hello_of(reader))
    assert not made.writer.has_dead()
    end(made, missed=1)


def a_reader_of_another_version_that_is_released() -> None:
    made, _, _ = one_of_two_is_of_another_version()
    made.writer.release(1, made.now)
    assert not made.writer.has_dead()
    end(made)


def a_member_that_pretends_to_be_of_another_version() -> None:
    """On its own connection and on a new one, with its own key and with a former one."""
    made = world(0, 1)
    reader, line = liar(made)
    for each in (line, made.dial(reader)):
        made.claim(reader, each, OTHER_VERSION + bytes(44))
    assert not made.writer.has_dead()
    made.kill(made.readers[1])
    made.run(8)
    made.writer.release(1, made.now)
    made.writer.readmit(1, made.now, lambda _: None)
    made.writer.heard(b"stranger", OTHER_VERSION + bytes(44), made.now, 1, "somewhere")
    assert not made.writer.has_dead()
    end(made, missed=1)


def a_member_that_is_refused_and_does_not_read() -> None:
    """On a second connection, while it reads all on the first."""
    made = world(0, 1)
    reader, first = liar(made)
    second = made.dial(reader)
    for number in range(50):
        first.to_reader.clear()
        made.claim(reader, first, control(Header(What.ASK, EPOCH)))
        other = hello_of(reader, session=b"other", number=number)
        made.claim(reader, second, other, MAX_IDLE_FRAMES // 10)
    end(made, missed=1)


def successors_of_a_reader() -> None:
    """However many have been refused, the next one is told so."""
    made = world(0, 1)
    reader, _ = liar(made)
    made.kill(reader)
    made.run(8)
    for number in range(1, MAX_IDLE_FRAMES + 10):
        line = made.dial(reader)
        made.claim(reader, line, hello_of(reader, session=b"%d" % (7 + number), number=1))
        assert line.to_reader, f"successor {number} got no answer"
        made.cut_line(line, 1)
        del made.lines[line.route]
    end(made)


def a_member_that_speaks_on_the_connection_of_another() -> None:
    """A peer can give its connection the name that a lost one had."""
    made = world(0, 1)
    made.send()
    made.dequeue(made.readers[0])
    _, line = liar(made, 1)
    frame = control(Header(What.ACK, EPOCH, 1))
    with contextlib.suppress(CorruptMessage):
        made.writer.heard(line.route, frame, made.now, 0, "somewhere")
    end(made)


def a_member_without_a_session() -> None:
    """It has its rank all the same, and nobody else gets that."""
    made = World([0, 1], relay=False)
    for peer in made.peers:
        peer.keep_for(None)
    for place, session in enumerate((b"", b"s")):
        hello = hello_of(made.readers[place], rank=0, session=session, number=1)
        with contextlib.suppress(CorruptMessage):
            made.writer.heard(b"%d" % place, hello, made.now, place, "somewhere")
    assert [peer.rank for peer in made.peers if peer.is_here] == [0]


def a_host_that_is_silent() -> None:
    """Its connection is shut, or it would stay until the kernel gives it up."""
    made = world(0, 1)
    reader, line = made.readers[0], made.readers[0].line
    reader.is_stopped = True
    made.cut(0, "up")
    made.run(8)
    assert made.peers[0].state == "dead"
    assert line is not None
    assert not line.is_up
    end(made)
    assert reader.outcome == "ReaderGivenUp"


def a_neighbour_that_vanishes_while_it_attaches() -> None:
    """Its place is free again, for another process of that rank."""
    made = World([0, 0], relay=True)
    made.readers[1].is_stopped = True
    made.advance(0.1)
    made.readers[0].is_slow = made.readers[0].is_stopped = True  # it makes no ring
    made.readers[1].is_stopped = False
    made.run(2, 0.1)
    assert made.peers[1].life is Life.ATTACHING
    made.kill(made.readers[1])
    made.peers[0].report(made.now + 100)  # as a relay that goes on reporting
    made.run(8)
    assert made.peers[1].life is Life.FREE
    assert not made.peers[1].session


def a_relay_that_is_stopped() -> None:
    made, relay, neighbour = relayed(1)
    relay.is_stopped = True
    made.send()
    made.run(10, drains=True)
    assert neighbour.log == [0]
    assert made.peers[relay.rank].life is Life.RUNNING
    end(made)
    assert relay.log == [0]


def a_relay_that_was_stopped_and_has_lost_its_connection() -> None:
    """Its own reader has not read all that it has taken, and gets it all the same."""
    made, relay, _ = relayed()
    made.send()
    made.advance(0.1)
    relay.is_stopped = True
    made.run(8)
    relay.is_stopped = False
    made.reset(relay)
    made.run(3)
    made.fail_relay(relay)
    end(made)
    assert relay.log == [0]


def attaching() -> tuple[World, Reader, Reader]:
    """A relay that makes no ring yet, and who was sent to it."""
    made = World([0, 0], relay=True)
    relay, neighbour = made.readers
    neighbour.is_stopped = True
    made.advance(0.1)
    relay.is_stopped, neighbour.is_stopped = True, False
    made.run(2, 0.1)
    assert [peer.life for peer in made.peers] == [Life.RUNNING, Life.ATTACHING]
    return made, relay, neighbour


def asking() -> tuple[World, Reader, Reader]:
    """A neighbour knows its relay's ring, but has not been seen there."""
    made, relay, neighbour = attaching()
    relay.is_stopped = False
    made.delay = 0.1
    for _ in range(100):
        if neighbour.session.stream is Stream.ASKING:
            return made, relay, neighbour
        made.advance(0.02)
    raise AssertionError("nobody asks")


def a_neighbour_that_cannot_attach_to_its_relays_ring() -> None:
    made, _, neighbour = asking()
    assert neighbour.line is not None
    neighbour.line.to_writer.clear()  # its REPORT
    made.rings.clear()
    neighbour.ring = None
    made.send()
    end(made)


def a_neighbour_that_closes_while_it_attaches() -> None:
    made, _, neighbour = asking()
    assert neighbour.line is not None
    neighbour.line.to_writer.clear()  # its REPORT
    made.delay = 0.0
    made.close(neighbour)
    made.write()
    assert made.peers[1].life is Life.FREE
    assert not made.peers[1].session


def a_neighbour_that_is_stopped_while_it_attaches_to_a_relay_that_dies() -> None:
    made, relay, neighbour = attaching()
    neighbour.is_stopped = True
    made.kill(relay)
    made.run(8)
    assert made.peers[1].life is Life.FREE
    assert not made.peers[1].session


def a_relay_that_dies_while_a_neighbour_asks() -> None:
    made, relay, _ = asking()
    made.kill(relay)
    end(made)


def a_neighbour_that_loses_its_connection_before_it_knows_that_it_was_seen() -> None:
    made, _, neighbour = asking()
    for _ in range(100):
        if made.peers[1].life is Life.RUNNING:
            break
        made.advance(0.02)
    assert neighbour.session.stream is Stream.ASKING
    made.reset(neighbour)
    made.send()
    end(made)


def a_neighbour_that_dies() -> None:
    """Its relay tells the writer, also if its connection was lost before."""
    made, _, neighbour = relayed()
    neighbour.is_stopped = True
    made.reset(neighbour)
    made.advance()
    assert made.peers[neighbour.rank].link is Link.PARKED
    neighbour.is_stopped = False
    made.kill(neighbour)
    made.advance()
    peer = made.peers[neighbour.rank]
    assert (peer.life, peer.link) == (Life.DEAD, Link.NONE)
    end(made)


def a_neighbour_that_closes_without_a_connection() -> None:
    made, _, neighbour = relayed()
    made.reset(neighbour)
    neighbour.has_closed = neighbour.is_stopped = True
    assert neighbour.ring is not None
    neighbour.ring.gone.add(neighbour.rank)
    made.advance()
    assert made.peers[neighbour.rank].life is Life.CLOSED


def a_reader_that_has_closed() -> None:
    made = world(0, 1)
    made.close(made.readers[0])
    made.write()
    peer = made.peers[0]
    assert (peer.life, peer.link) == (Life.CLOSED, Link.IDLE)
    made.advance()
    made.reset(made.readers[0])
    made.write()
    assert made.peers[0].link is Link.NONE
    end(made)


def a_host_whose_readers_close() -> None:
    """The relay's first: it leaves with the last of the others."""
    made, relay, neighbour = relayed(1)
    made.close(relay)
    made.advance()
    made.close(neighbour)
    made.run(4)
    assert made.peers[relay.rank].life is Life.CLOSED
    end(made)


def a_relay_that_dies_when_its_reader_has_closed() -> None:
    """Nothing of it is missed, so it is not dead."""
    made, relay, _ = relayed(1)
    made.close(relay)
    made.advance()
    made.kill(relay)
    made.run(8)
    assert made.peers[relay.rank].life is Life.CLOSED
    end(made)


def an_absent_reader_that_is_released() -> None:
    made, _, _ = attaching()
    made.writer.release(1, made.now)
    assert made.peers[1].life is Life.CLOSED
    made = World([0, 1], relay=False)
    made.cut(1, "up")
    made.advance(0.1)
    made.writer.release(1, made.now)
    assert not made.writer.count_absent()


def a_released_place_is_closed() -> None:
    """To its own rank, which comes too late, and to others."""
    made = World([0, 1], relay=False)
    made.cut(1, "up")
    made.advance(0.1)
    made.writer.release(1, made.now)
    assert not made.writer.count_absent()
    for rank in (1, 7):
        hello = hello_of(made.readers[1], rank=rank, session=b"another")
        made.writer.heard(b"7", hello, made.now, 1, "somewhere")
        assert made.peers[1].life is Life.CLOSED
        assert made.peers[1].rank == 1


def a_released_place_that_another_rank_is_given() -> None:
    """With a new key, and only if no message is gone and its reader never attached."""
    tickets: list[int] = []
    made = World([0, 1], relay=False)
    made.cut(1, "up")
    made.advance(0.1)
    made.writer.release(1, made.now)
    assert made.writer.keep_place(1, made.now, tickets.append) == 1
    assert made.peers[1].life is Life.CLOSED
    assert made.writer.keep_place(7, made.now, tickets.append) == 1
    assert tickets == [3]
    made.send()
    for ticket, life in ((1, Life.FREE), (3, Life.RUNNING)):
        hello = hello_of(made.readers[1], rank=7, session=b"another")
        made.writer.heard(b"7", hello, made.now, ticket, "somewhere")
        assert made.peers[1].life is life
    assert made.peers[1].rank == 7
    assert made.peers[1].cursor == (0, 0)

    for has_attached in (False, True):
        made = world(0, 1) if has_attached else World([0, 1], relay=False)
        if has_attached:
            made.kill(made.readers[1])
            while not made.writer.has_dead():
                made.advance()
        made.writer.release(1, made.now)
        if not has_attached:
            made.send()
        with contextlib.suppress(InvalidArgument):
            made.writer.keep_place(7, made.now, tickets.append)
        assert (made.peers[1].rank, made.peers[1].life) == (1, Life.CLOSED)


def a_place_that_many_processes_take() -> None:
    """Each before the connection of the one before has ended; the writer forgets those."""
    made = world(0)
    for _ in range(5):
        reader = made.readers[0]
        made.close(reader)
        made.write()
        made.replace(0)
        made.reset(reader, 1000)
        made.run(10, 0.1)
        made.send()
        made.drain()
    assert len(made.writer.places._by_route) == 1
    end(made)


def a_place_that_another_process_takes() -> None:
    """From the next message on; whoever has the old key, on whichever connection, is told so, and
    changes nothing."""
    for number in (0, 2):
        made = world(0, 1)
        for _ in range(number):
            made.send()
        made.kill(made.readers[1])
        while not made.writer.has_dead():
            made.advance()
        with pytest.raises(InvalidArgument, match="reader 1 is dead"):
            made.writer.readmit(1, made.now, print)
        made.writer.release(1, made.now)
        made.send()
        new = made.replace(1)
        assert new is not None
        assert made.writer.count_absent() == 1
        made.send()
        for route in (made.peers[1].route or b"x", b"1-old", b"1-older"):
            for session in (b"1", b"another"):
                hello = hello_of(made.readers[1], session=session)
                made.writer.heard(route, hello, made.now, 1, "somewhere")
                assert made.peers[1].life is Life.FREE
        proven_at = made.peers[1].authenticated_at
        made.writer.authenticated(1, made.now + 1.0)
        assert made.peers[1].authenticated_at == proven_at
        made.run(5, 0.1)
        assert made.peers[1].life is Life.RUNNING
        made.drain()
        made.advance(0.1)
        made.send()
        end(made)
        assert new.log == list(range(number + 1, number + 3))


def a_replacement_whose_welcome_is_lost() -> None:
    """It asks again, and gets the same."""
    made = world(0, 1)
    made.send()
    made.close(made.readers[1])
    made.advance()
    new = made.replace(1)
    assert new is not None
    made.send()
    for _ in range(3):
        made.reset(new)
        made.advance(0.1)
    made.send()
    end(made)
    assert new.log == [1, 2]


def readers_that_come_late() -> None:
    """Nobody waits for them, and they get what is sent from then on."""
    made = World([0, 1], late=True)
    for _ in range(2 * WINDOW):
        made.send()
    assert made.sent == 2 * WINDOW
    assert not made.outbox._messages
    assert not made.writer.count_absent()
    made.advance()
    for _ in range(2 * WINDOW):
        made.send()
    assert made.sent == 3 * WINDOW
    end(made)
    assert all(reader.log == list(range(2 * WINDOW, 3 * WINDOW)) for reader in made.readers)


def the_last_frame_that_a_reader_has_lost() -> None:
    """No other one shows that it came."""
    made = world(0)
    made.interrupt = "receive"
    made.send()
    made.advance()
    assert not made.interrupt
    end(made)


def a_frame_that_no_reader_has_lost() -> None:
    """The next one shows it: nothing is sent again."""
    made = world(0, pieces=3)
    session = made.readers[0].session
    for _ in range(2):
        greeting = session._greeting
        session.doubt(made.now)
        made.send()
        made.advance()
        assert session._greeting == greeting
        made.pieces = 1
    end(made)


def a_reader_that_has_left_and_may_have_lost_a_frame() -> None:
    """It asks for none any more."""
    made = world(0, 1)
    made.close(made.readers[0])
    made.run(8)
    made.readers[0].session.doubt(made.now)
    made.run(2)
    end(made)


def a_frame_that_a_relay_has_lost() -> None:
    made = world(0, 0, relay=True, pieces=3)
    made.delay = 0.1
    made.interrupt = "receive"
    made.send()
    made.send()
    made.run(4, 0.05)
    made.send()
    end(made)


def a_member_that_pretends_to_read_behind_a_relay() -> None:
    """It gets no more messages on its connection."""
    made = world(0, 1)
    made.claim(*liar(made), hello_of(made.readers[0], is_behind=True))
    assert made.peers[0].link is Link.IDLE
    end(made, missed=1)


def liar(made: World, rank: int = 0) -> tuple[Reader, Line]:
    reader = made.readers[rank]
    assert reader.line is not None
    return reader, reader.line


def hello_of(reader: Reader, **changed: object) -> bytes:
    """As that reader would send it, but for some fields."""
    fields: dict[str, Any] = {
        "queue_id": "q", "rank": reader.rank, "pid": 1, "session": b"%d" % reader.rank,
        "token": "", "taken": 0, "sequence": 0, "piece": 0, "host": f"h{reader.host}",
        "is_behind": False, "number": 50,
    }  # fmt: skip
    return control(Header(What.HELLO, 0), Hello(**{**fields, **changed}))


def a_member_that_asks_and_does_not_read() -> None:
    made = world(0, 1)
    reader, line = liar(made)
    for _ in range(3):
        made.claim(reader, line, control(Header(What.ASK, EPOCH)), MAX_IDLE_FRAMES)
    assert not line.is_up
    end(made)


def a_member_with_many_connections() -> None:
    made = world(0, 1)
    reader, first = liar(made)
    made.claim(reader, first, b"")
    for number in range(50, 80):
        made.claim(reader, made.dial(reader), hello_of(reader, number=number))
    assert sum(line.is_up for line in made._lines_of(reader)) == 1
    end(made, missed=1)


def a_member_that_wants_everything_again_and_again() -> None:
    made = world(0, 1)
    for _ in range(4):
        made.send()
    reader, line = liar(made)
    for number in range(50, 80):
        made.claim(reader, line, hello_of(reader, number=number))
    assert not line.is_up
    end(made)


def a_member_that_wants_everything_again_and_pretends_to_read_elsewhere() -> None:
    """In turn, so that its connection has no stream when it asks for one."""
    made = world(0, 1)
    for _ in range(4):
        made.send()
    reader, line = liar(made)
    for number in range(50, 110):
        hello = hello_of(reader, number=number, is_behind=number % 2 == 0)
        made.claim(reader, line, hello)
    assert not line.is_up
    end(made)


def a_member_that_resumes_where_no_frame_is() -> None:
    made = world(0, 1)
    made.send()
    for number, (sequence, piece) in enumerate([(0, 1), (1, 1), (2, 0)], start=50):
        made.claim(*liar(made), hello_of(made.readers[0], number=number, sequence=sequence,
                                         piece=piece))  # fmt: skip
    made.send()
    end(made, missed=1)


def a_relay_whose_ring_has_no_name() -> None:
    """Its neighbour would take itself for the relay."""
    made = World([0, 0], relay=True)
    made.readers[1].is_stopped = True
    made.advance(0.1)
    made.claim(*liar(made), control(Header(What.REPORT, EPOCH), Report("", "id", [])))
    made.readers[1].is_stopped = False
    made.run(3, 0.1)
    assert not made.readers[1].is_relay
    end(made, missed=1)


def a_member_that_acknowledges_what_was_not_sent() -> None:
    made = world(0, 1)
    made.claim(*liar(made), control(Header(What.ACK, EPOCH, 7)))
    made.send()
    end(made, missed=1)


def a_member_that_acknowledges_what_its_connection_was_not_sent() -> None:
    made = world(0, 1)
    for _ in range(WINDOW):
        made.send()
    while made.dequeue(made.readers[1]):
        pass
    made.advance()
    reader, line = liar(made)
    line.to_writer.append((made.now, hello_of(reader)))
    made.claim(reader, line, control(Header(What.ACK, EPOCH, WINDOW)))
    made.send()
    made.claim(reader, line, hello_of(reader, taken=WINDOW, sequence=WINDOW + 1, number=51))
    made.send()
    end(made, missed=1)


def a_relay_that_lies_about_readers_of_other_hosts() -> None:
    made = world(0, 1, relay=True)
    row = ReportRow(1, 5, "dead", 0)
    made.claim(*liar(made), control(Header(What.REPORT, EPOCH), Report("ring0", "id", [row])))
    end(made, missed=1)


EXAMPLES: dict[str, Callable[[], None]] = {
    name: play
    for name, play in list(globals().items())
    if getattr(play, "__annotations__", None) == {"return": None}
}
"""All functions above that take and return nothing, by name."""
