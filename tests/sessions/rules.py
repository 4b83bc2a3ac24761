"""The rules of the sessions: where each stands, what happens there without it, and the example that
fails then."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any, NamedTuple

import pytest

from memlane.broadcast.protocol.connection_state import REFUSED_SECONDS, ConnectionState
from memlane.broadcast.protocol.ending import Ending
from memlane.broadcast.protocol.frames import Header, Hello, Report, Welcome, What, parsed
from memlane.broadcast.protocol.outbox import Outbox
from memlane.broadcast.protocol.peer import Peer
from memlane.broadcast.protocol.places import Places
from memlane.broadcast.protocol.reader_session import ReaderSession
from memlane.broadcast.protocol.replies import Replies
from memlane.broadcast.protocol.states import (
    LIFE,
    LINK,
    OVER,
    STREAM,
    WRITER_LINK,
    Event,
    Life,
    Link,
    Stream,
    WriterLink,
)
from memlane.broadcast.protocol.writer_session import WriterSession
from memlane.errors import CorruptMessage

TABLES: dict[str, dict[Any, dict[Any, Any]]] = {
    "life": LIFE,
    "link": LINK,
    "link of who has ended": {Link: OVER},
    "link to the writer": WRITER_LINK,
    "stream": STREAM,
}
Method = Callable[..., Any]


class Rule(NamedTuple):
    """Attributes:
    name: what it says.
    example: the one that fails without it.
    owner, method: where it stands.
    without: what is called in place of the method, with the method and its arguments.
    """

    name: str
    example: str
    owner: type
    method: str
    without: Method

    def remove(self, patch: pytest.MonkeyPatch) -> None:
        found: Any = getattr_static(self.owner, self.method)
        is_property = isinstance(found, property)
        method = found.fget if is_property else found

        def weakened(*args: Any, **options: Any) -> Any:
            return self.without(method, *args, **options)

        patch.setattr(self.owner, self.method, property(weakened) if is_property else weakened)


@contextmanager
def _with(owner: Any, **fields: Any) -> Iterator[None]:
    """Those fields have these values; afterwards what they had before."""
    before = {name: getattr(owner, name) for name in fields}
    try:
        for name, value in fields.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _assuming(**fields: Any) -> Method:
    """The method runs as if its object had these fields, and does not change them."""

    def without(method: Method, owner: Any, *args: Any) -> Any:
        with _with(owner, **fields):
            return method(owner, *args)

    return without


def _keeping(*names: str) -> Method:
    """The method does not change these fields."""

    def without(method: Method, owner: Any, *args: Any) -> Any:
        with _with(owner, **{name: getattr(owner, name) for name in names}):
            return method(owner, *args)

    return without


def _ending_with(**fields: Any) -> Method:
    """The method leaves these fields as given."""

    def without(method: Method, owner: Any, *args: Any) -> None:
        method(owner, *args)
        for name, value in fields.items():
            setattr(owner, name, value)

    return without


def _gives(value: Any) -> Method:
    return lambda _method, *_args: value


_nothing = _gives(None)


def _shut_nobody(method: Method, writer: WriterSession, *args: Any) -> None:
    with _with(writer.replies, unwanted=deque[bytes]()):
        method(writer, *args)


def _current(writer: WriterSession, ticket: int) -> int:
    """The ticket of the key that the same place has now."""
    return writer._ticket_of(writer._peers[ticket % len(writer._peers)])


def _drop_what_one_has_taken(method: Method, box: Outbox) -> None:
    fastest = max((p for p in box._peers if p.is_waited_for), key=lambda p: p.taken, default=None)
    with _with(box, _peers=[fastest] if fastest else []):
        method(box)


def _take_it_again(method: Method, session: ReaderSession, header: Header, *rest: Any) -> None:
    session.wanted = min(session.wanted, (header.sequence, header.piece))
    method(session, header, *rest)


def _say_bye_once(method: Method, session: ReaderSession, now: float) -> float | None:
    before = session._say_at
    due: float | None = method(session, now)
    if session._say_at != before:
        session._say_at = None
    return due


def _forget_what_a_relay_took(
    method: Method, session: ReaderSession, taken: int, *rest: Any
) -> None:
    session.taken = min(session.taken, taken)
    method(session, taken, *rest)


def _part_silently(_method: Method, writer: WriterSession, now: float) -> None:
    for peer in writer.places.parted():
        peer.part(now)


def _follow_if_parted(method: Method, session: ReaderSession, *args: Any) -> None:
    if session.stream is Stream.PARTED:
        method(session, *args)


def _attach_those_of_a_report(
    method: Method, writer: WriterSession, teller: Peer, report: Report, now: float
) -> Any:
    for peer, _ in writer.places.rows_of(teller, report, writer.outbox.next):
        if peer.is_absent and peer.via is not None:
            peer.attach(Event.SEEN_BEHIND, now)
    return method(writer, teller, report, now)


def _believe_it_of_anyone(
    _method: Method, writer: WriterSession, _route: bytes, _error: object, ticket: int, *_: object
) -> None:
    writer._peers[ticket % len(writer._peers)].refuse_version("it speaks another version")


def _take_any_welcome(
    method: Method, session: ReaderSession, header: Header, welcome: Welcome
) -> None:
    with _with(session, _greeting=welcome.number):
        method(session, header, welcome)


def _begin_at_the_first(
    method: Method, session: ReaderSession, header: Header, welcome: Welcome
) -> None:
    if session.epoch == 0 and (header.sequence, header.piece) != session.wanted:
        raise CorruptMessage("the stream begins elsewhere")
    method(session, header, welcome)


def _call_it_early(method: Method, connection: ConnectionState, now: float) -> None:
    with _with(connection, _earliest=now):
        method(connection, now)


def _begin_the_clock_now(method: Method, connection: ConnectionState, now: float) -> None:
    connection._paused_since = now
    method(connection, now)


def _believe_a_short_refusal(
    method: Method, connection: ConnectionState, is_refused: bool, now: float
) -> None:
    is_second = connection._refused_since is not None
    method(connection, is_refused, now + (REFUSED_SECONDS - 0.2 if is_second else 0.0))


def _wait_for_handshakes(method: Method, connection: ConnectionState, now: float) -> Any:
    is_tried = connection.link is not WriterLink.UNTRIED
    with _with(connection, _ended_at=now if is_tried else connection._ended_at):
        return method(connection, now)


def _check_handshakes_early(method: Method, session: ReaderSession, now: float) -> Any:
    session.connection.check_handshakes(now)
    return method(session, now)


def _take_what_its_hello_says(
    method: Method, writer: WriterSession, route: bytes, hello: Hello, now: float, *rest: Any
) -> Any:
    answer = method(writer, route, hello, now, *rest)
    peer = writer.places.at(route)
    if peer is not None and peer.link is Link.STREAMING:
        writer._take(peer, peer.wants(hello)[0], now)
    return answer


def _take_any_number(
    method: Method, writer: WriterSession, peer: Peer, sequence: int, now: float
) -> Any:
    with _with(writer.outbox, next=max(writer.outbox.next, sequence)):
        return method(writer, peer, sequence, now)


def _name_the_ring(method: Method, places: Places, teller: Peer, report: Report, sent: int) -> Any:
    named = Report(report.name or "a ring", report.ring_id, report.rows)
    return method(places, teller, named, sent)


def _return_all_rows(
    method: Method, places: Places, teller: Peer, report: Report, sent: int
) -> Any:
    method(places, teller, report, sent)
    return [(places.peers[row.place], row) for row in report.rows]


def _call_it_progress(method: Method, peer: Peer, event: Event, now: float) -> None:
    method(peer, event, now)
    if event is Event.SENT_TO_RELAY:
        peer.last_progress = peer.reported_at = now


def _call_it_a_report(method: Method, peer: Peer, *args: Any) -> None:
    method(peer, *args)
    peer.reported_at = args[-1]


def _take_any_key(
    method: Method, writer: WriterSession, route: bytes, hello: Hello, now: float,
    ticket: int | None, *rest: Any,
) -> Any:  # fmt: skip
    ticket = ticket if ticket is None else _current(writer, ticket)
    return method(writer, route, hello, now, ticket, *rest)


def _keep_a_place_that_missed_messages(
    method: Method, writer: WriterSession, rank: int, *rest: Any, **options: Any
) -> Any:
    spare = writer.places.spare_for(rank)
    if spare is not None:
        spare.begin_at(writer.outbox.next, writer.outbox.bytes)
    return method(writer, rank, *rest, **options)


def _check_no_key(
    method: Method, writer: WriterSession, route: bytes, frame: bytes, now: float,
    ticket: int | None = None, address: str = "",
) -> Any:  # fmt: skip
    is_hello = parsed(frame)[0].what == What.HELLO
    return method(writer, route, frame, now, ticket if is_hello else None, address)


def _count_for_the_place(
    method: Method, writer: WriterSession, route: bytes, frame: bytes, now: float,
    ticket: int | None = None, address: str = "",
) -> Any:  # fmt: skip
    line = method(writer, route, frame, now, ticket, address)
    if writer._peers[ticket or 0].note_idle_frame():
        writer.replies.reject(route)
    return line


W, R, C = WriterSession, ReaderSession, ConnectionState
RULES = [
    Rule("a window limits messages", "a_full_window", Outbox, "_is_in_the_way",
         lambda is_full, box, peer, size:
         is_full(box, peer, size) and box.next - peer.taken < box._window),
    Rule("a window limits bytes", "a_full_window_of_bytes", Outbox, "_is_in_the_way",
         lambda is_full, box, peer, _size: is_full(box, peer, -box._window_bytes)),
    Rule("a message is kept until every reader has taken it", "a_slow_reader_and_a_fast_one",
         Outbox, "drop_taken", _drop_what_one_has_taken),
    Rule("messages are kept for absent readers, too", "a_reader_that_comes_late", Peer,
         "is_waited_for", lambda _, peer: peer.life is Life.RUNNING),
    Rule("a message that reached the ring is committed", "an_interrupted_message_that_the_ring_has",
         Outbox, "settle", lambda settle, box, mark: settle(box, box.staged and box.staged[1])),
    Rule("a message that did not reach the ring is dropped",
         "an_interrupted_message_that_the_ring_has_not", Outbox, "settle",
         lambda settle, box, _mark: settle(box, -1)),
    Rule("a duplicate frame is ignored", "a_frame_that_is_sent_twice", R, "_take_piece",
         _take_it_again),
    Rule("messages before the welcome are ignored", "a_frame_that_a_reader_has_lost", R,
         "_take_piece", _assuming(stream=Stream.OWN)),
    Rule("a frame that may be lost is requested", "the_last_frame_that_a_reader_has_lost", R,
         "tick", _assuming(_doubt_at=None)),
    Rule("the next frame shows that none was lost", "a_frame_that_no_reader_has_lost", R,
         "receive_whole", _keeping("_doubt_at")),
    Rule("the next piece shows that none was lost", "a_frame_that_no_reader_has_lost", R,
         "_take_piece", _keeping("_doubt_at")),
    Rule("a frame that may be lost is requested once",
         "a_reader_that_has_left_and_may_have_lost_a_frame", R, "greet", _keeping("_doubt_at")),
    Rule("a gap after a frame that may be lost is no fault of the writer",
         "a_frame_that_a_reader_has_lost", R, "receive", _assuming(_doubt_at=None)),
    Rule("a stream resumes where the reader asks", "a_connection_that_is_lost_within_a_message",
         Peer, "begin_stream",
         lambda begin, peer, cursor, *rest: begin(peer, (cursor[0] + 1, 0), *rest)),
    Rule("a hello is repeated", "a_hello_that_the_writer_has_lost", R, "tick",
         _assuming(_greet_at=None)),
    Rule("lost acknowledgements are requested again", "an_acknowledgement_that_the_writer_has_lost",
         W, "say_again", _nothing),
    Rule("a hello is also an acknowledgement", "an_acknowledgement_that_a_connection_has_lost",
         Peer, "wants", lambda wants, peer, hello: (peer.taken, wants(peer, hello)[1])),
    Rule("an outdated hello is ignored", "a_hello_of_an_older_connection", Peer, "has_heard",
         _gives(False)),
    Rule("a reader that has proven its key gets more time", "a_hello_that_is_slow", Peer,
         "authenticate", _nothing),
    Rule("a BYE is repeated", "a_bye_that_the_writer_has_lost", R, "tick", _say_bye_once),
    Rule("a BYE is sent again over a new connection", "a_bye_without_a_connection", R, "connect",
         _ending_with(_say_at=None)),
    Rule("the end is sent again over a new connection", "an_end_that_a_reader_has_lost", Peer,
         "begin_stream", _ending_with(end_due=1e9)),
    Rule("a closing writer waits while readers make progress",
         "a_writer_that_closes_while_its_readers_are_slow", Ending, "_progressed_at",
         lambda _, ending, _waiting, now: now if ending._since is None else ending._since),
    Rule("an absent reader is owed what was sent", "a_reader_that_comes_while_its_writer_closes",
         Ending, "unfinished",
         lambda unfinished, ending: [p for p in unfinished(ending) if not p.is_missing]),
    Rule("a reader without a connection has its own deadline",
         "a_reader_that_dies_while_its_writer_closes", Ending, "_bounds", _gives(1)),
    Rule("readers behind a relay that ended continue alone", "a_host_that_dies", Places, "parted",
         _gives(())),
    Rule("a relay confirms the end once all is passed on",
         "a_relay_that_dies_with_the_end_in_its_hands", R, "_hear_end", _assuming(ring=None)),
    Rule("taking the last message does not confirm the end",
         "a_relay_that_cannot_pass_on_the_last_message", R, "acknowledge",
         lambda acknowledge, reader: (acknowledge(reader), reader._confirm_end())),
    Rule("a message that a relay could not pass on is requested again",
         "a_relay_that_cannot_pass_on_a_message", R, "read_alone", _forget_what_a_relay_took),
    Rule("a writer names the readers behind a relay that is stuck",
         "a_writer_that_closes_while_a_relay_passes_nothing_on", Ending, "missed",
         lambda missed, ending: [p for p in missed(ending) if p.via not in ending.unfinished()]),
    Rule("readers behind a relay are told when it ends",
         "a_neighbour_that_computes_while_its_relay_ends", W, "_part_readers", _part_silently),
    Rule("a reader that reconnects is told that its relay ended",
         "a_neighbour_without_a_connection_while_its_relay_ends", Replies, "seen",
         lambda _, replies, _peer: replies.frame(What.SEEN)),
    Rule("a reader that reads on behind a dead relay acknowledges",
         "a_neighbour_that_reads_on_in_the_ring_of_a_dead_relay", R, "follow", _follow_if_parted),
    Rule("a neighbour that reconnects stays behind its relay",
         "a_neighbour_whose_connection_is_lost", Peer, "is_behind", _gives(False)),
    Rule("a relay speaks for neighbours without a connection",
         "a_neighbour_that_stops_without_a_connection", Peer, "lose", _assuming(via=None)),
    Rule("only its own key attaches a reader", "a_neighbour_that_dies_before_the_writer_knows_it",
         W, "_hear_report", _attach_those_of_a_report),
    Rule("only the welcome for the latest hello counts",
         "a_word_that_is_older_than_the_latest_hello", R, "_be_welcome", _take_any_welcome),
    Rule("a clock stands while a connection is accepted",
         "a_writer_that_is_stopped_while_a_connection_is_reset", C, "accept",
         _keeping("_doubted_since", "_paused_since")),
    Rule("a handshake that this end gives up is no fault of the writer",
         "a_writer_that_is_stopped_after_its_connection_was_lost", C, "lose", _call_it_early),
    Rule("a clock goes on where it was if a handshake is ended early",
         "a_writer_whose_connections_are_all_cut_in_the_handshake", C, "lose",
         _begin_the_clock_now),
    Rule("handshakes that are ended early are no writer's",
         "handshakes_that_are_cut_before_the_first_is_complete", C, "check_handshakes", _nothing),
    Rule("a refusal has to last", "a_connection_that_is_refused_for_a_moment", C, "note_probe",
         _believe_a_short_refusal),
    Rule("a relay that does not report is none", "a_relay_that_is_stopped", Places,
         "silent_relays", _gives(())),
    Rule("a relay's HELLO says nothing about its reader",
         "a_relay_that_was_stopped_and_has_lost_its_connection", W, "_greet",
         _take_what_its_hello_says),
    Rule("a connection that only asks is shut", "a_member_that_asks_and_does_not_read", Peer,
         "note_idle_frame", _gives(False)),
    Rule("a new connection ends the former one", "a_member_with_many_connections", Places, "move",
         lambda move, *args: move(*args) and None),
    Rule("a connection carries a window again, and no more",
         "a_member_that_wants_everything_again_and_again", W, "_may_resend", _gives(True)),
    Rule("what a connection has carried counts also after its stream",
         "a_member_that_wants_everything_again_and_pretends_to_read_elsewhere", W, "_may_resend",
         lambda may_resend, writer, peer, *rest:
         peer.link is not Link.STREAMING or may_resend(writer, peer, *rest)),
    Rule("a stream resumes at a frame that is here", "a_member_that_resumes_where_no_frame_is",
         Outbox, "can_resume_at", lambda can_resume, box, sequence, piece:
         sequence == box.next or can_resume(box, sequence, piece)),
    Rule("a ring has a name", "a_relay_whose_ring_has_no_name", Places, "rows_of", _name_the_ring),
    Rule("nobody acknowledges what was not sent", "a_member_that_acknowledges_what_was_not_sent", W,
         "_take", _take_any_number),
    Rule("a relay speaks for readers behind it only",
         "a_relay_that_lies_about_readers_of_other_hosts", Places, "rows_of", _return_all_rows),
    Rule("a handshake is early only if it provably was", "a_handshake_whose_begin_is_seen_late",
         C, "accept", lambda accept, connection, now, _earliest=None: accept(connection, now)),
    Rule("a handshake is waited for only while there are any",
         "a_host_that_vanishes_before_the_first_handshake_is_complete", C, "death",
         _wait_for_handshakes),
    Rule("a writer may die before the first handshake is complete",
         "a_writer_that_dies_before_the_first_handshake_is_complete", C, "was_cut",
         lambda was_cut, connection: connection._was_up and was_cut(connection)),
    Rule("only the end of a handshake tells that it was ended early",
         "a_host_that_vanishes_before_the_first_handshake_is_complete", R, "tick",
         _check_handshakes_early),
    Rule("a reader's clock stands while its writer is stopped", "a_machine_that_is_suspended", Peer,
         "delay_clock", _nothing),
    Rule("a clock that begins after a stop is not delayed by it",
         "a_reader_that_dies_while_its_writer_is_stopped", Peer, "delay_clock",
         lambda delay, peer, seconds, now: delay(peer, seconds, now + seconds)),
    Rule("a writer's clock stands while its reader is stopped",
         "a_reader_that_is_stopped_without_a_connection", C, "delay_clock",
         _keeping("_doubted_since")),
    Rule("a stop may have hidden that a connection was accepted",
         "a_reader_that_is_stopped_between_two_refusals", C, "delay_clock",
         _keeping("_refused_since")),
    Rule("a stop is no time to wait for a first connection",
         "a_reader_that_is_stopped_before_its_first_connection", C, "delay_clock",
         _keeping("_ended_at")),
    Rule("a writer that was stopped listens before it gives up",
         "a_writer_that_is_stopped_while_it_closes", Ending, "delay", _nothing),
    Rule("a reader that only reconnects is not waited for",
         "a_member_that_only_reconnects_while_its_writer_closes", Ending, "_bounds",
         lambda bounds, *args: 1e9 if bounds(*args) > 1 else 1),
    Rule("a reader that only attaches is not waited for",
         "a_member_that_attaches_for_ever_while_its_writer_closes", Peer, "apply",
         _call_it_progress),
    Rule("what is received again and again is no progress",
         "a_member_that_reads_again_and_again_while_its_writer_closes", Peer, "note_moved",
         _gives(0)),
    Rule("a relay's HELLO is no report", "a_relay_that_greets_and_does_not_report", Peer, "connect",
         _call_it_a_report),
    Rule("a silent reader's connection is shut", "a_host_that_is_silent", W, "silent",
         _shut_nobody),
    Rule("a place that was readmitted has another key", "a_place_that_another_process_takes", W,
         "_greet", _take_any_key),
    Rule("a place whose reader has read is no other rank's",
         "a_released_place_that_another_rank_is_given", Peer, "was_released",
         lambda _, peer: peer.life is Life.CLOSED),
    Rule("a place whose messages are gone is no other rank's",
         "a_released_place_that_another_rank_is_given", W, "keep_place",
         _keep_a_place_that_missed_messages),
    Rule("a released rank has no handle again", "a_released_place_that_another_rank_is_given",
         Places, "spare_for", lambda spare_for, places, _rank: spare_for(places, -1)),
    Rule("an old key gives nobody more time", "a_place_that_another_process_takes", W,
         "authenticated", lambda authenticated, writer, ticket, now:
         authenticated(writer, _current(writer, ticket), now)),
    Rule("a new reader begins where its writer says", "a_replacement_whose_welcome_is_lost", R,
         "_be_welcome", _begin_at_the_first),
    Rule("a new reader may ask again where it begins", "a_replacement_whose_welcome_is_lost", Peer,
         "wants", lambda _, _peer, hello: (hello.taken, (hello.sequence, hello.piece))),
    Rule("a late reader begins with the next message", "readers_that_come_late", Peer, "begin_at",
         _nothing),
    Rule("nobody waits for a late reader", "readers_that_come_late", Peer, "is_missing",
         lambda _, peer: peer.is_absent),
    Rule("a key speaks for its own place", "a_member_that_speaks_on_the_connection_of_another", W,
         "heard", _check_no_key),
    Rule("a reader that is refused is told so", "successors_of_a_reader", W, "heard",
         _count_for_the_place),
    Rule("nobody waits for a reader of another version", "a_reader_of_another_version", Peer,
         "refuse_version", _nothing),
    Rule("one of this version may take its place", "a_reader_of_another_version", Peer, "attach",
         _keeping("other_version")),
    Rule("a reader knows a writer of another version", "a_reader_of_another_version", R, "_fail",
         _nothing),
    Rule("a release ends the wait for another version",
         "a_reader_of_another_version_that_is_released", Peer, "release",
         _keeping("other_version")),
    Rule("who has attached is of this version", "a_member_that_pretends_to_be_of_another_version",
         W, "_refuse_version", _believe_it_of_anyone),
    Rule("a former key says nothing of a version",
         "a_member_that_pretends_to_be_of_another_version", W, "_refuse_version",
         lambda refuse, writer, route, error, ticket, *rest:
         refuse(writer, route, error, _current(writer, ticket), *rest)),
]  # fmt: skip
