"""Handles as JSON text."""

from __future__ import annotations

from typing import Any, TypeVar

from memlane._importing import fork_waits
from memlane.errors import InvalidArgument, InvalidType

T = TypeVar("T")
_DIGITS = frozenset("0123456789abcdef")


def check_version(version: object, known: int) -> None:
    """Raises InvalidArgument unless a handle of this format version can be read here."""
    if version != known:
        raise InvalidArgument(
            f"the handle has format version {version!r}, this memlane reads version {known}; use "
            f"the same version of memlane on both sides"
        )


def handle_text(handle: Any) -> str:
    """The fields of `handle` as JSON."""
    with fork_waits:  # imported late: half the cost of importing memlane
        from memlane._base.msgspec import msgspec

    return msgspec.json.encode(handle).decode()


def handle_in(text: str | bytes, kind: type[T], version: int) -> T:
    """The `kind`, a class of fields with types, in `text`; its `format_version` is `version`.

    Raises:
        InvalidArgument: there is none in it.
        InvalidType: it is not text.
    """
    with fork_waits:
        from memlane._base.msgspec import msgspec

    try:
        fields = msgspec.json.decode(text)
        if not isinstance(fields, dict) or "format_version" not in fields:
            raise InvalidArgument("this text is not a handle: it has no format version")
        check_version(fields["format_version"], version)
        return msgspec.convert(fields, kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidArgument(f"this text is not a handle: {error}") from None
    except TypeError as error:
        raise InvalidType(f"the text of a handle must be str or bytes: {error}") from None


def id_in(field: str, digits: object) -> bytes:
    """The 16 bytes of an id in a handle; raises InvalidArgument if there are none."""
    if not isinstance(digits, str) or len(digits) != 32 or not set(digits) <= _DIGITS:
        raise InvalidArgument(f"the handle's {field} is not 32 hexadecimal digits: {digits!r}")
    return bytes.fromhex(digits)


def check_sequences(handle: object, *fields: str) -> None:
    """Raises unless each of these fields is a list, a tuple or None."""
    for name in fields:
        value = getattr(handle, name)
        if value is not None and not isinstance(value, (list, tuple)):
            raise InvalidArgument(f"the handle's {name} is not a list: {value!r}")
