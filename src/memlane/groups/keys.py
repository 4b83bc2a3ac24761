"""The keys of a group that has a secret: all are derived from it."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import zmq
from zmq.utils import z85

from memlane._contexts import need_curve
from memlane.errors import InvalidArgument, InvalidType

# Keys of a guessable secret could be found by trying, without asking the group once.
LEAST_SECRET = 16


class KeyPair(NamedTuple):
    """Two Curve25519 keys in Z85, as ZeroMQ takes them."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


class GroupKeys(NamedTuple):
    """Of the board, which only members can reach, and of its clients, which only it accepts."""

    board: KeyPair
    member: KeyPair


def group_keys(secret: str | bytes) -> GroupKeys:
    """Curve25519 takes any 32 bytes for a secret key, so a hash of the group's secret is one."""
    if isinstance(secret, str):
        secret = secret.encode()
    if not isinstance(secret, bytes):
        raise InvalidType(f"secret must be bytes or text, not {type(secret).__name__}")
    if len(secret) < LEAST_SECRET:
        raise InvalidArgument(
            f"a group's secret must have at least {LEAST_SECRET} bytes, not {len(secret)}; let "
            f"secrets.token_hex() make one"
        )
    need_curve()
    return GroupKeys(_key_pair(secret, b"memlane board"), _key_pair(secret, b"memlane member"))


def _key_pair(secret: bytes, role: bytes) -> KeyPair:
    key = z85.encode(hashlib.blake2b(secret, digest_size=32, person=role).digest())
    return KeyPair(zmq.curve_public(key), key)
