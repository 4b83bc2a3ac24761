"""The keys of a queue: one place and one key pair for each expected reader, and no others.

The writer and each place have a key pair made for this queue. A handle carries the secret of its
reader's place, or of all places. libzmq checks keys against the list of places (ZAP, RFC 27) before
passing on any byte of the connection, and labels each frame with the place that sent it.
"""

from __future__ import annotations

import os

import zmq
from zmq.utils import z85


class Keys:
    """The secrets of a queue; with `insecure` only tokens, which anyone on the network can read."""

    def __init__(self, places: int, *, insecure: bool) -> None:
        self.insecure = insecure
        self.server_secret = b""
        self.server_key = ""
        if insecure:
            self.reader_secrets = [os.urandom(16).hex() for _ in range(places)]
            self._place_of = {secret.encode(): i for i, secret in enumerate(self.reader_secrets)}
            return
        public, self.server_secret = zmq.curve_keypair()
        self.server_key = public.decode()
        self.reader_secrets = []
        self._place_of = {}
        for place in range(places):
            public, secret = zmq.curve_keypair()
            self.reader_secrets.append(secret.decode())
            self._place_of[z85.decode(public)] = place

    def place_of_key(self, public_key: bytes) -> int | None:
        return None if self.insecure else self._place_of.get(public_key)

    def place_of_token(self, token: str) -> int | None:
        return self._place_of.get(token.encode()) if self.insecure else None
