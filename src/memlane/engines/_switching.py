"""Puts memlane's systems in the place of an engine's, as its variable says, and logs it there.

Which engines there are, and what is tested with which release, their folders say.
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
_declined: set[str] = set()  # packages whose version is not tested


@dataclass(frozen=True)
class Engine:
    """What differs between engines; `variable` switches memlane on.

    Attributes:
        tested: releases, and the systems that there are adapters for.
        own_address, same_node: the engine's own functions ("module:name"), which tell this host's
            address, and which ranks of a group share memory with one of them.
    """

    name: str
    package: str
    variable: str
    tested: dict[str, tuple[str, ...]]
    own_address: str
    same_node: str

    def release_of(self, version: str) -> str | None:
        """The tested release that a version belongs to, None if it belongs to none."""
        found = re.match(r"(\d+\.\d+)\.\d", version)
        return found[1] if found and found[1] in self.tested else None

    def systems_of(self, text: str, release: str) -> tuple[str, ...]:
        """What the variable asks for, of what there is for this release."""
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
        """Where something of memlane's arrives, that system must be memlane's, too.

        Asked also before the plugin was called: spawned processes get their arguments first.
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
        """What is said where something of the engine's own arrives at memlane's."""
        return (
            f"the writer of {what} uses the engine's own {system}, but this process uses "
            f"memlane's: set {self.variable}={system} in every process and on every node"
        )


def _words_of(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",")))


def switch_on(engine: Engine) -> None:
    """What the plugins do; any number of times in a process.

    Raises:
        InvalidArgument: the variable names something that is no system, or one that is not there.
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
        memlane_log.parent = log  # what memlane says of waits and deaths is the engine's, too
