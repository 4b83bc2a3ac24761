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


@dataclass(frozen=True)
class Engine:
    """`tested`: releases, and the systems that there are adapters for."""

    name: str
    package: str
    variable: str
    tested: dict[str, tuple[str, ...]]

    @property
    def log(self) -> logging.Logger:
        """Formatted and filtered as the engine's own lines are."""
        return logging.getLogger(f"{self.package}.memlane")

    def words_of(self, text: str) -> list[str]:
        """The systems that the variable asks for, or `all`."""
        words = [word.strip() for word in text.split(",")]
        unknown = [word for word in words if word not in (*SYSTEMS, "all")]
        if unknown:
            raise InvalidArgument(
                f"{self.variable}={text}: there is no system {', '.join(map(repr, unknown))}; name "
                f"some of {', '.join(SYSTEMS)}, separated by commas, or all"
            )
        return words

    def release_of(self, version: str) -> str | None:
        """The tested release that a version belongs to, None if it belongs to none."""
        found = re.match(r"(\d+\.\d+)\.\d", version)
        return found[1] if found and found[1] in self.tested else None

    def systems_of(self, words: list[str], release: str) -> tuple[str, ...]:
        """What there is for this release, of what was asked for."""
        offered = self.tested[release]
        if "all" in words:
            return offered
        missing = [word for word in words if word not in offered]
        if missing:
            raise InvalidArgument(
                f"{self.variable}={','.join(words)}: memlane has no {' and no '.join(missing)} for "
                f"{self.name} {release} yet; it has {', '.join(offered)}"
            )
        return tuple(dict.fromkeys(words))


_on: set[tuple[str, str]] = set()  # engine and system
_declined: set[str] = set()  # variables of engines whose version is not tested


class _ToEngine(logging.Handler):
    """Hands on what memlane says of waits and deaths."""

    def __init__(self, log: logging.Logger) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.handle(record)


def switch_on(engine: Engine, text: str) -> None:
    """What the plugins do; any number of times in a process.

    Raises:
        InvalidArgument: the text names something that is no system, or one that is not there.
    """
    words = engine.words_of(text)
    version: str = import_module(engine.package).__version__
    release = engine.release_of(version)
    if release is None:
        if engine.variable not in _declined:
            _declined.add(engine.variable)
            engine.log.warning(
                "%s=%s changes nothing: memlane is tested with %s %s, and this is %s",
                *(engine.variable, text, engine.name, " and ".join(engine.tested), version),
            )
        return
    asked = [(engine.package, system) for system in engine.systems_of(words, release)]
    new = [system for system in asked if system not in _on]
    replacements: list[Replacement] = []
    for package, system in new:
        replacements += import_module(f"memlane.engines.{package}.{system}").replacements()
    for line in replace(replacements):
        engine.log.info("%s", line)
    _on.update(new)
    memlane_log = logging.getLogger("memlane")
    if not memlane_log.handlers:
        memlane_log.addHandler(_ToEngine(engine.log))
        memlane_log.propagate = False


def why_not(variable: str, system: str) -> str | None:
    """Why this process goes on with its engine's own system, None if it does not.

    Asked also before the plugin was called: spawned processes get their arguments first.
    """
    text = os.environ.get(variable)
    words = [word.strip() for word in (text or "").split(",")]
    if not {system, "all"} & set(words):
        return f"{variable} is {'not set' if text is None else repr(text)} here"
    if variable in _declined:
        return "memlane is not tested with the engine's version here"
    return None
