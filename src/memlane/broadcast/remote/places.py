"""Who may read: one place and one key for each expected reader, and nobody else.

The writer has a key pair, made for this queue, and so has each place; a handle carries the secret
of its reader's place, or all. libzmq asks the list of places (ZAP, RFC 27) before it lets any byte
of a connection through, and tells of each frame which place sent it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from memlane.broadcast.remote.sockets import can_receive

if TYPE_CHECKING:
    from collections.abc import Iterable

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"memlane"


class Keys:
    """The secrets of a queue; with `insecure` mere tokens, which a listener learns."""

    def __init__(self, places: int, *, insecure: bool) -> None:
        self.insecure = insecure
        self._server_secret = b""
        self.server_key = ""
        if insecure:
            self.reader_secrets = [os.urandom(16).hex() for _ in range(places)]
            self._place_of = {secret.encode(): i for i, secret in enumerate(self.reader_secrets)}
            return
        public, self._server_secret = zmq.curve_keypair()
        self.server_key = public.decode()
        self.reader_secrets = []
        self._place_of = {}
        for place in range(places):
            public, secret = zmq.curve_keypair()
            self.reader_secrets.append(secret.decode())
            self._place_of[z85.decode(public)] = place

    def guard(self, listener: zmq.Socket[bytes]) -> None:
        """Has libzmq speak to those only whom the list of places has."""
        if self.insecure:
            return
        listener.set(zmq.CURVE_SERVER, 1)
        listener.set(zmq.CURVE_SECRETKEY, self._server_secret)
        listener.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        listener.set(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def place_of_key(self, public_key: bytes) -> int | None:
        return None if self.insecure else self._place_of.get(public_key)

    def place_of_token(self, token: str) -> int | None:
        return self._place_of.get(token.encode()) if self.insecure else None


def identify(connecting: zmq.Socket[bytes], server_key: str, secret: str) -> None:
    """A reader's side of `Keys.guard`."""
    if not server_key:
        return
    connecting.set(zmq.CURVE_SERVERKEY, server_key.encode())
    connecting.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret.encode()))
    connecting.set(zmq.CURVE_SECRETKEY, secret.encode())


def is_key(text: object) -> bool:
    """Is it a CURVE key, as text?"""
    if not isinstance(text, str) or len(text) != 40:
        return False
    try:
        return len(z85.decode(text.encode("ascii"))) == 32
    except (ValueError, KeyError, UnicodeError):
        return False


class Porter:
    """Answers libzmq who may come in. Its socket must be bound before the listener is."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._keys = keys
        self.socket = context.socket(zmq.REP)
        self.socket.bind(ZAP_ADDRESS)
        self.refused = 0

    def answer_all(self) -> Iterable[int]:
        """Answers what was asked; yields the places of those that were let in."""
        while can_receive(self.socket):
            version, request, _domain, _address, _identity, mechanism, *credentials = (
                self.socket.recv_multipart()
            )
            place = None
            if mechanism == b"CURVE" and len(credentials) == 1:
                place = self._keys.place_of_key(credentials[0])
            if place is None:
                self.refused += 1
                self.socket.send_multipart([version, request, b"400", b"not expected", b"", b""])
            else:
                user = str(place).encode()
                self.socket.send_multipart([version, request, b"200", b"OK", user, b""])
                yield place
