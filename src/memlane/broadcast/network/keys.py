"""The keys of a queue: one place and one key pair for each expected reader, and no others.

The writer and each place have a key pair made for this queue. A handle carries the secret of its
reader's place, or of all places. libzmq checks keys against the list of places (ZAP, RFC 27) before
passing on any byte of the connection, and labels each frame with the ticket of its sender's key.
"""

from __future__ import annotations

import os

import zmq
from zmq.utils import z85


class Keys:
    """The secrets of a queue; with `insecure` only tokens, which anyone on the network can read.

    A key proves a ticket, `generation * places + place`. When another reader takes a place, the
    place has a new key, of the next generation; a reader that comes with the old one is told so.

    Attributes:
        reader_secrets: the present one of each place.
    """

    def __init__(self, places: int, *, insecure: bool) -> None:
        self.insecure = insecure
        self.server_secret = b""
        self.server_key = ""
        if not insecure:
            public, self.server_secret = zmq.curve_keypair()
            self.server_key = public.decode()
        self.reader_secrets = [""] * places
        self._tickets: dict[bytes, int] = {}
        for place in range(places):
            self._make(place, place)

    def renew(self, ticket: int) -> None:
        """Another reader takes that place: only its key and the one before it count from now on.
        May be repeated if it was interrupted."""
        count = len(self.reader_secrets)
        place = ticket % count
        kept = (ticket, ticket - count)
        old = [
            key for key, its in self._tickets.items() if its % count == place and its not in kept
        ]
        self._make(place, ticket)
        for key in old:
            del self._tickets[key]

    def _make(self, place: int, ticket: int) -> None:
        if self.insecure:
            secret = os.urandom(16).hex()
            proof = secret.encode()
        else:
            public, private = zmq.curve_keypair()
            secret, proof = private.decode(), z85.decode(public)
        self._tickets[proof] = ticket
        self.reader_secrets[place] = secret

    def ticket_of_key(self, public_key: bytes) -> int | None:
        return None if self.insecure else self._tickets.get(public_key)

    def ticket_of_token(self, token: str) -> int | None:
        return self._tickets.get(token.encode()) if self.insecure else None
