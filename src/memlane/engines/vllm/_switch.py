"""Puts memlane's systems in the place of vLLM's, and says so in vLLM's log."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from memlane.engines._replacing import replace
from memlane.engines.vllm._versions import TESTED, release_of, systems_of, words_of

if TYPE_CHECKING:
    from memlane.engines._replacing import Replacement

logger = logging.getLogger("vllm.memlane")  # formatted and filtered as vLLM's own lines are

_on: set[str] = set()
_declined: str | None = None  # the version that was


class _ToVllm(logging.Handler):
    """Hands on what memlane says of waits and deaths."""

    def emit(self, record: logging.LogRecord) -> None:
        logger.handle(record)


def switch_on(text: str) -> None:
    """As `memlane.engines.vllm.register`."""
    global _declined
    words = words_of(text)
    import vllm

    version: str = vllm.__version__
    release = release_of(version)
    if release is None:
        if _declined is None:
            logger.warning(
                "MEMLANE_VLLM=%s changes nothing: memlane is tested with vLLM %s, and this is %s",
                text,
                " and ".join(TESTED),
                version,
            )
        _declined = version
        return
    systems = [system for system in systems_of(words, release) if system not in _on]
    replacements: list[Replacement] = []
    for system in systems:
        replacements += import_module(f"memlane.engines.vllm.{system}").replacements()
    for line in replace(replacements):
        logger.info("%s", line)
    _on.update(systems)
    memlane_log = logging.getLogger("memlane")
    if not memlane_log.handlers:
        memlane_log.addHandler(_ToVllm())
        memlane_log.propagate = False


def is_declined() -> bool:
    """Has this process gone on with vLLM's own systems, although it was asked for memlane's?"""
    return _declined is not None
