"""Types registered by users, by the name under which they are stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from memlane._importing import fork_waits
from memlane.errors import InvalidArgument, InvalidType

T = TypeVar("T")


class Registered(NamedTuple):
    type: type
    name: str
    fields: tuple[str, ...]
    build: Callable[[dict[str, Any]], Any]

    def items(self, value: object) -> list[tuple[str, Any]]:
        try:
            return [(name, getattr(value, name)) for name in self.fields]
        except AttributeError as error:
            raise InvalidArgument(f"a field of {self.name} was never set: {error}") from error


_by_type: dict[type, Registered] = {}
_by_name: dict[str, Registered] = {}

of_type = _by_type.get


def register(cls: type[T], name: str | None) -> type[T]:
    if not isinstance(cls, type):
        raise InvalidType(f"only a class can be registered, not {cls!r}")
    if name is None:
        # multiprocessing renames the main module in processes that it spawns.
        module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
        name = f"{module}.{cls.__qualname__}"
    if type(name) is not str or not name:
        raise InvalidArgument(f"the name of a registered type must be text, not {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the name of a registered type is not UTF-8: {error}") from None
    holder = _by_name.get(name)
    if holder is not None and not _is_same(holder.type, cls):
        raise InvalidArgument(
            f"the name {name!r} belongs to {holder.type!r}; give {cls!r} another with name=..."
        )
    entry = Registered(cls, name, *_fields_and_builder(cls))
    _by_type[cls] = entry
    _by_name[name] = entry
    return cls


def of_name(name: Any) -> Registered:
    entry = _by_name.get(name) if isinstance(name, str) else None
    if entry is None:
        raise InvalidArgument(
            f"Unsupported object type {name!r}: nothing is registered under this name here; call "
            f"MsgpackSerde.register_type in the writer and in every reader"
        )
    return entry


def _is_same(one: type, other: type) -> bool:
    """Returns whether both are the same class, even if its module was executed again in between."""
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def _fields_and_builder(cls: type) -> tuple[tuple[str, ...], Callable[[dict[str, Any]], Any]]:
    with fork_waits:
        from memlane._base.msgspec import msgspec

    if issubclass(cls, msgspec.Struct):
        return cls.__struct_fields__, lambda values: cls(**values)
    # A class with its own __new__ (a subclass of dict, say) has more state than its fields.
    if dataclasses.is_dataclass(cls) and cls.__new__ is object.__new__:
        names = tuple(field.name for field in dataclasses.fields(cls))
        return names, lambda values: _build_dataclass(cls, values)
    raise InvalidType(f"only plain dataclasses and msgspec Structs can be registered, not {cls!r}")


def _build_dataclass(cls: type, values: dict[str, Any]) -> Any:
    """Skips __init__, as pickle and copy do: fields may be frozen, or not among its parameters."""
    made: Any = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
