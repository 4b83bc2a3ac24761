"""Replaces an engine's systems with memlane's, as its variable asks, and logs each replacement.

Each engine's folder says which releases are tested with which systems.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from importlib import import_module
from itertools import chain

from memlane.engines._replacing import Replacement, Unfit, check, replace
from memlane.errors import InvalidArgument

SYSTEMS = ("queue", "store", "region")

_on: set[tuple[str, str]] = set()  # package and system
_declined: set[tuple[str, str]] = set()  # those that this version of the engine keeps its own of


@dataclass(frozen=True)
class Engine:
    """The differences between engines.

    Attributes:
        variable: the environment variable that switches memlane on.
        tested: the systems that have adapters, by release, the oldest first.
        own_address, same_node: engine functions ("module:name") that return this host's address,
            and which ranks of a group share memory with a given one.
    """

    name: str
    package: str
    variable: str
    tested: dict[str, tuple[str, ...]]
    own_address: str
    same_node: str

    def release_of(self, version: str) -> str | None:
        """The tested release that a version belongs to; of a newer version, which may have changed
        little, the newest one; or None."""
        found = re.match(r"(\d+\.\d+)\.\d", version)
        if found is None or found[1] in self.tested:
            return found and found[1]
        newest = next(reversed(self.tested))
        return newest if _number(found[1]) > _number(newest) else None

    def all_tested(self) -> str:
        """The tested releases, in words."""
        first, *_, last = *self.tested, *self.tested
        return f"{self.name} {first}" + (f" to {last}" if last != first else "")

    def systems_of(self, text: str, release: str) -> tuple[str, ...]:
        """The systems that the variable asks for, if this release has them."""
        words, offered = _words_of(text), self.tested[release]
        unknown = [word for word in words if word not in (*offered, "all")]
        if unknown:
            raise InvalidArgument(
                f"{self.variable}={text}: memlane has no {' and no '.join(map(repr, unknown))} for "
                f"{self.name} {release}; choose from {', '.join(offered)}, separated by commas, "
                f"or all"
            )
        return offered if "all" in words else tuple(words)

    def check_arrival(self, system: str) -> None:
        """Raises if this process uses the engine's own `system`, but received memlane's objects.

        May run before the plugin: spawned processes unpickle their arguments first.
        """
        text = os.environ.get(self.variable)
        if not {system, "all"} & set(_words_of(text or "")):
            why = f"{self.variable} is {'not set' if text is None else repr(text)} here"
        elif (self.package, system) in _declined:
            why = "memlane does not replace it in this version of the engine"
        else:
            return
        raise InvalidArgument(
            f"this {system}'s writer uses memlane, but this process uses the engine's own {system} "
            f"({why}): set {self.variable}={system} in every process and on every node, with the "
            f"same version of the engine"
        )

    def not_switched(self, what: str, system: str) -> str:
        """The error text for the reverse: the engine's own object arrived at memlane's system."""
        return (
            f"the writer of {what} uses the engine's own {system}, but this process uses "
            f"memlane's: set {self.variable}={system} in every process and on every node"
        )


def _number(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


def _words_of(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",")))


def switch_on(engine: Engine) -> None:
    """The body of the plugins. Can be called any number of times in a process.

    Raises:
        InvalidArgument: the variable names an unknown system, or one that this release lacks.
    """
    text = os.environ.get(engine.variable, "").strip()
    if not text:
        return
    log = logging.getLogger(f"{engine.package}.memlane")  # formatted and filtered as the engine's
    version: str = import_module(engine.package).__version__
    release = engine.release_of(version)
    if release is None:
        every = {(engine.package, system) for system in SYSTEMS}
        if not every <= _declined:
            _declined.update(every)
            log.warning(
                "%s=%s has no effect: memlane is tested with %s, and this is %s",
                *(engine.variable, text, engine.all_tested(), version),
            )
        return
    asked = [(engine.package, system) for system in engine.systems_of(text, release)]
    new = [system for system in asked if system not in _on | _declined]
    is_tested = version.startswith(f"{release}.")
    if new and not is_tested:
        log.warning("memlane is tested with %s, and tries %s", engine.all_tested(), version)
    found: dict[tuple[str, str], list[Replacement]] = {}
    for place in new:
        try:
            found[place] = _replacements(*place, is_tested)
        except Unfit as error:
            _declined.add(place)
            log.warning("%s %s keeps its own %s: %s", engine.name, version, place[1], error)
    for line in replace(chain.from_iterable(found.values())):
        log.info("%s", line)
    _on.update(found)
    memlane_log = logging.getLogger("memlane")
    if not memlane_log.handlers:
        memlane_log.parent = log  # memlane's lines about waits and deaths go to the engine's log


def _replacements(package: str, system: str, is_tested: bool) -> list[Replacement]:
    """Raises `Unfit` if an untested version of the engine differs where they take hold."""
    module = f"memlane.engines.{package}.{system}"
    if is_tested:
        return list(import_module(module).replacements())
    try:
        found: list[Replacement] = import_module(module).replacements()
    except (ImportError, AttributeError) as error:
        raise Unfit(str(error)) from None
    check(found)
    return found
