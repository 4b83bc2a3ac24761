"""What is tested with which vLLM. Where versions differ, they differ here.

The queue's callers and names are the same in all of them.
"""

from __future__ import annotations

import re

from memlane.errors import InvalidArgument

# Releases, and the systems that there are adapters for.
TESTED = {"0.32": ("queue",), "0.33": ("queue",)}
SYSTEMS = ("queue", "store", "region")


def release_of(version: str) -> str | None:
    """The tested release that a version belongs to, None if it belongs to none."""
    found = re.match(r"(\d+\.\d+)\.\d", version)
    return found[1] if found and found[1] in TESTED else None


def words_of(text: str) -> list[str]:
    """The systems that the variable asks for, or `all`."""
    words = [word.strip() for word in text.split(",")]
    unknown = [word for word in words if word not in (*SYSTEMS, "all")]
    if unknown:
        raise InvalidArgument(
            f"MEMLANE_VLLM={text}: there is no system {', '.join(map(repr, unknown))}; name some "
            f"of {', '.join(SYSTEMS)}, separated by commas, or all"
        )
    return words


def systems_of(words: list[str], release: str) -> tuple[str, ...]:
    """What there is for this release, of what was asked for."""
    offered = TESTED[release]
    if "all" in words:
        return offered
    missing = [word for word in words if word not in offered]
    if missing:
        raise InvalidArgument(
            f"MEMLANE_VLLM={','.join(words)}: memlane has no {' and no '.join(missing)} for vLLM "
            f"{release} yet; it has {', '.join(offered)}"
        )
    return tuple(dict.fromkeys(words))
