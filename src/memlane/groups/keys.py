"""The keys of a group, all derived from its secret."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import zmq
from zmq.utils import z85

from memlane._net.contexts import need_curve
from memlane.errors import InvalidArgument, InvalidType

# Keys of a guessable secret could be brute-forced without contacting the group.
LEAST_SECRET = 16


class KeyPair(NamedTuple):
    """A Curve25519 key pair in Z85, as ZeroMQ expects it."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


class GroupKeys(NamedTuple):
    """The key pairs with which the board and its members authenticate each other."""

    board: KeyPair
    member: KeyPair


def group_keys(secret: str | bytes) -> GroupKeys:
    """Any 32 bytes are a Curve25519 secret key, so hashes of the group's secret serve as keys."""
    if isinstance(secret, str):
        try:
            secret = secret.encode(errors="surrogateescape")  # bytes of an environment variable
        except UnicodeEncodeError:
            raise InvalidArgument("secret is not text that can be encoded: pass bytes") from None
    if not isinstance(secret, bytes):
        raise InvalidType(f"secret must be bytes or text, not {type(secret).__name__}")
    if len(secret) < LEAST_SECRET:
        raise InvalidArgument(
            f"a group's secret must have at least {LEAST_SECRET} bytes, not {len(secret)}; make "
            f"one with secrets.token_hex()"
        )
    need_curve()
    return GroupKeys(_key_pair(secret, b"memlane board"), _key_pair(secret, b"memlane member"))


def _key_pair(secret: bytes, role: bytes) -> KeyPair:
    key = z85.encode(hashlib.blake2b(secret, digest_size=32, person=role).digest())
    return KeyPair(zmq.curve_public(key), key)
