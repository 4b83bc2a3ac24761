"""The states of the protocol between hosts, and every event that changes one.

Everything that changes a state must stand in this file as a row of a table. What does not belong
here: how an event shows itself (that is a frame, a timer or a look at a connection: the sessions'
business), and what is no state: ranks, windows, positions, texts.

Theory. Each side has a *life* or a *stream*, which frames change, and a *link*, which connections
change. A writer keeps both for every reader it expects:

    Life   FREE: nobody has this place. ATTACHING: a reader was sent to the relay of its host, and
           has not been seen in its ring. RUNNING. RELAYING: it has closed as a reader, but passes
           messages on to others. DEAD. CLOSED, or released: nobody waits for it, and nobody may
           attach there until it is readmitted.
    Link   NONE: no connection, and none is needed. IDLE: connected, no stream. STREAMING: messages
           are sent to it. LOST: without the connection that it needs, so a clock runs. PARKED:
           without a connection, but its relay reports on it, so none runs.

A reader keeps a link to its writer, and what it reads there:

    WriterLink  UNTRIED. ACCEPTED: there is a TCP connection, and no answer yet. UP: the handshake
           is complete. CUT: there was a connection.
    Stream  GREETING: HELLO is repeated until it is answered. OWN: messages come for this reader.
           RELAY: they come for the ring of its host, which it fills. ASKING: it was sent to the
           ring of a relay, and repeats REPORT until the writer has seen it there. BEHIND: it reads
           from that ring. PARTED: its relay has ended; it goes on from where it is in the ring.

Two couplings join life and link, and are rows, too. A life that is over needs no link: `OVER` ends
it. And when a relay ends, each reader behind it goes on alone or is free again: `RELAY_ENDED`.

An event that a table does not list for a state leaves that state as it is. Whether an event may
happen at all (a refused HELLO is none) is decided before: see `admission`.
"""

from __future__ import annotations

from enum import Enum, auto


class Life(Enum):
    """The life of a peer, as its writer knows it."""

    FREE = auto()
    ATTACHING = auto()
    RUNNING = auto()
    RELAYING = auto()
    DEAD = auto()
    CLOSED = auto()


class Link(Enum):
    """The writer's link to a peer."""

    NONE = auto()
    IDLE = auto()
    STREAMING = auto()
    LOST = auto()
    PARKED = auto()


class Event(Enum):
    """Something that happens to a peer."""

    ATTACHED = auto()  # its HELLO was accepted, and it reads over its own connection
    SENT_TO_RELAY = auto()  # its HELLO was accepted, and names the relay of its host
    SEEN_BEHIND = auto()  # its own REPORT: it reads from its relay's ring
    STOPPED_READING = auto()  # a relay's REPORT: its own reader has closed
    REPORTED_DEAD = auto()  # by its relay
    REPORTED_CLOSED = auto()
    LEFT = auto()  # BYE
    RELEASED = auto()  # the application goes on without it
    READMITTED = auto()  # another process may take the place of one that has ended
    TIMED_OUT = auto()  # its bound has passed without a connection, or its host is silent
    RELAY_ENDED = auto()  # that it was behind
    CONNECTED = auto()  # HELLO, and it gets no stream
    STREAM_BEGAN = auto()  # HELLO, and it gets one
    DISCONNECTED = auto()  # its connection is gone, and it needs one
    DISCONNECTED_BEHIND = auto()  # its connection is gone, and its relay reports on it
    DISCONNECTED_AFTER = auto()  # its connection is gone, and nobody needs it


LIFE: dict[Event, dict[Life, Life]] = {
    Event.ATTACHED: {Life.FREE: Life.RUNNING, Life.ATTACHING: Life.RUNNING},
    Event.SENT_TO_RELAY: {Life.FREE: Life.ATTACHING},
    Event.SEEN_BEHIND: {Life.ATTACHING: Life.RUNNING},
    Event.STOPPED_READING: {Life.RUNNING: Life.RELAYING},
    Event.REPORTED_DEAD: {Life.RUNNING: Life.DEAD},
    Event.REPORTED_CLOSED: {Life.RUNNING: Life.CLOSED},
    Event.LEFT: {
        Life.ATTACHING: Life.FREE,
        Life.RUNNING: Life.CLOSED,
        Life.RELAYING: Life.CLOSED,
    },
    Event.RELEASED: {
        Life.FREE: Life.CLOSED,
        Life.ATTACHING: Life.CLOSED,
        Life.DEAD: Life.CLOSED,
    },
    Event.READMITTED: {Life.CLOSED: Life.FREE},
    Event.TIMED_OUT: {
        Life.ATTACHING: Life.FREE,
        Life.RUNNING: Life.DEAD,
        Life.RELAYING: Life.CLOSED,
    },
    Event.RELAY_ENDED: {Life.ATTACHING: Life.FREE},
}

LINK: dict[Event, dict[Link, Link]] = {
    Event.CONNECTED: {
        Link.NONE: Link.IDLE,
        Link.STREAMING: Link.IDLE,
        Link.LOST: Link.IDLE,
        Link.PARKED: Link.IDLE,
    },
    Event.STREAM_BEGAN: {Link.IDLE: Link.STREAMING},
    Event.DISCONNECTED: {Link.IDLE: Link.LOST, Link.STREAMING: Link.LOST},
    Event.DISCONNECTED_BEHIND: {Link.IDLE: Link.PARKED},
    Event.DISCONNECTED_AFTER: {Link.IDLE: Link.NONE},
    Event.RELAY_ENDED: {Link.PARKED: Link.LOST},
}

OVER: dict[Link, Link] = {
    Link.STREAMING: Link.IDLE,  # so that it can still be told
    Link.LOST: Link.NONE,
    Link.PARKED: Link.NONE,
}
"""The next state of the link of a peer that is free, dead or closed from now on."""

NEEDS_NO_LINK = frozenset((Life.FREE, Life.DEAD, Life.CLOSED))


def after(event: Event, life: Life, link: Link) -> tuple[Life, Link]:
    """Both states of a peer after an event."""
    life = LIFE.get(event, {}).get(life, life)
    link = LINK.get(event, {}).get(link, link)
    return life, OVER.get(link, link) if life in NEEDS_NO_LINK else link


class WriterLink(Enum):
    """A reader's link to its writer."""

    UNTRIED = auto()
    ACCEPTED = auto()
    UP = auto()
    CUT = auto()


class LinkEvent(Enum):
    """Something that happens to a reader's connection."""

    ACCEPTED = auto()
    UP = auto()  # the handshake is complete
    LOST = auto()


WRITER_LINK: dict[LinkEvent, dict[WriterLink, WriterLink]] = {
    LinkEvent.ACCEPTED: {
        WriterLink.UNTRIED: WriterLink.ACCEPTED,
        WriterLink.CUT: WriterLink.ACCEPTED,
    },
    LinkEvent.UP: {WriterLink.ACCEPTED: WriterLink.UP},
    LinkEvent.LOST: {WriterLink.ACCEPTED: WriterLink.CUT, WriterLink.UP: WriterLink.CUT},
}


class Stream(Enum):
    """The stream that a reader gets over its connection."""

    GREETING = auto()
    OWN = auto()
    RELAY = auto()
    ASKING = auto()
    BEHIND = auto()
    PARTED = auto()


class StreamEvent(Enum):
    """Something that changes the stream."""

    GREETS = auto()  # it sends HELLO, or has lost its connection
    WELCOME = auto()  # the answer to its latest HELLO: messages follow
    WELCOME_AS_RELAY = auto()  # and are for its host
    WELCOME_TO_RING = auto()  # none follow: there is a ring to read from
    SEEN = auto()
    NO_RELAY = auto()
    GOES_ALONE = auto()  # it asks for a stream of its own


STREAM: dict[StreamEvent, dict[Stream, Stream]] = {
    StreamEvent.GREETS: {
        Stream.OWN: Stream.GREETING,
        Stream.RELAY: Stream.GREETING,
        Stream.ASKING: Stream.GREETING,
    },
    StreamEvent.WELCOME: {Stream.GREETING: Stream.OWN},
    StreamEvent.WELCOME_AS_RELAY: {Stream.GREETING: Stream.RELAY},
    StreamEvent.WELCOME_TO_RING: {Stream.GREETING: Stream.ASKING},
    StreamEvent.SEEN: {Stream.ASKING: Stream.BEHIND, Stream.GREETING: Stream.BEHIND},
    StreamEvent.NO_RELAY: {Stream.BEHIND: Stream.PARTED},
    StreamEvent.GOES_ALONE: {Stream.BEHIND: Stream.GREETING, Stream.PARTED: Stream.GREETING},
}
