"""Replaces an engine's systems with memlane's, as its variable asks, and logs each replacement.

Each engine's folder says which releases are tested with which systems.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from importlib import import_module

from memlane.engines._replacing import Replacement, replace
from memlane.errors import InvalidArgument

SYSTEMS = ("queue", "store", "region")

_on: set[tuple[str, str]] = set()  # package and system
_declined: set[str] = set()  # packages whose version has not been tested


@dataclass(frozen=True)
class Engine:
    """What differs between engines.

    Attributes:
        variable: the environment variable that switches memlane on.
        tested: the systems that have adapters, by release.
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
        """The tested release that a version belongs to, or None."""
        found = re.match(r"(\d+\.\d+)\.\d", version)
        return found[1] if found and found[1] in self.tested else None

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
        elif self.package in _declined:
            why = "memlane is not tested with this version of the engine"
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
        if engine.package not in _declined:
            _declined.add(engine.package)
            log.warning(
                "%s=%s has no effect: memlane is tested with %s %s, and this is %s",
                *(engine.variable, text, engine.name, " and ".join(engine.tested), version),
            )
        return
    asked = [(engine.package, system) for system in engine.systems_of(text, release)]
    new = [system for system in asked if system not in _on]
    replacements: list[Replacement] = []
    for package, system in new:
        replacements += import_module(f"memlane.engines.{package}.{system}").replacements()
    for line in replace(replacements):
        log.info("%s", line)
    _on.update(new)
    memlane_log = logging.getLogger("memlane")
    if not memlane_log.handlers:
        memlane_log.parent = log  # memlane's lines about waits and deaths go to the engine's log
