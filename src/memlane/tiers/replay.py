"""Computes what each policy would hit on a trace: `python -m memlane.tiers.replay TRACE --blocks
N`.

A trace has a line of JSON for each request, with the ids of the blocks of its prompt in `hash_ids`:
equal ids have equal content and an equal prefix. Other fields are ignored, and so are times. Each
policy begins empty with N blocks. A request's leading run of ids that are there counts as prefix
hits; then each id is accessed once, from the last to the first: a hit, or a miss that is stored or
declined.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from memlane import _native
from memlane._importing import fork_waits
from memlane.errors import InvalidArgument
from memlane.tiers.pool import PolicyName

POLICIES = get_args(PolicyName)
_MOST_BLOCKS = (1 << 31) - 1
_ID_END = 1 << 63

Trace = list[list[int]]  # of each request, the ids


def read(path: Path) -> Trace:
    """The requests of a trace.

    Raises:
        InvalidArgument: the file cannot be read, or a line is not such a request.
    """
    trace = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    trace.append(_ids_in(line, f"{path}, line {number}"))
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} is not text in UTF-8") from None
    return trace


def _ids_in(line: str, where: str) -> list[int]:
    try:
        request = json.loads(line)
    except ValueError:
        raise InvalidArgument(f"{where}: not JSON") from None
    ids = request.get("hash_ids") if isinstance(request, dict) else None
    if not isinstance(ids, list):
        raise InvalidArgument(f"{where}: no list `hash_ids`")
    if not all(type(each) is int and -_ID_END <= each < _ID_END for each in ids):
        raise InvalidArgument(f"{where}: an id is not an integer of 64 bits")
    return ids


def replay(trace: Iterable[Sequence[int]], policy: PolicyName, blocks: int) -> dict[str, int]:
    """Counts of one policy: `requests`, `accesses`, `hits`, `prefix_hits`, `stores`."""
    cache = _native.Replay(policy, blocks)
    for ids in trace:
        cache.request(ids)
    return cache.counts()


def _blocks(text: str) -> int:
    try:
        blocks = int(text)
    except ValueError:
        blocks = 0
    if not 1 <= blocks <= _MOST_BLOCKS:
        raise argparse.ArgumentTypeError(f"a number from 1 to {_MOST_BLOCKS}, not {text!r}")
    return blocks


def _policies(text: str) -> list[PolicyName]:
    names = text.split(",")
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{', '.join(POLICIES)}, not {name!r}")
    return list(dict.fromkeys(names))  # type: ignore[arg-type]


def _table(found: dict[str, dict[str, int]]) -> str:
    lines = [f"{'policy':<8}{'prefix hits':>13}{'hits':>9}{'stores':>9}"]
    for policy, counts in found.items():
        prefix, hits, stores = (
            100 * counts[name] / max(1, counts["accesses"])
            for name in ("prefix_hits", "hits", "stores")
        )
        lines.append(f"{policy:<8}{prefix:>11.2f} %{hits:>7.2f} %{stores:>7.2f} %")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, or one JSON object; returns the exit code."""
    words = argparse.ArgumentParser(
        prog="python -m memlane.tiers.replay", description="What each policy would hit on a trace."
    )
    words.add_argument("trace", type=Path, help="a JSON object a line, with `hash_ids`")
    words.add_argument("--blocks", type=_blocks, required=True, help="the capacity")
    words.add_argument("--policy", type=_policies, default=list(POLICIES), help="NAME[,NAME...]")
    words.add_argument("--json", action="store_true", help="print one JSON object")
    asked = words.parse_args(arguments)
    try:
        trace = read(asked.trace)
    except InvalidArgument as error:
        print(f"memlane.tiers.replay: {error}", file=sys.stderr)
        return 2
    found = {}
    for policy in asked.policy:
        found[policy] = replay(_with_progress(trace, policy), policy, asked.blocks)
    if asked.json:
        print(json.dumps({"trace": str(asked.trace), "blocks": asked.blocks, "policies": found}))
    else:
        print(_table(found))
    return 0


def _with_progress(trace: Trace, policy: str) -> Iterable[Sequence[int]]:
    """On a terminal, and if rich is there: a bar on standard error."""
    if not sys.stderr.isatty():
        return trace
    try:
        with fork_waits:
            from rich.console import Console
            from rich.progress import track
    except ModuleNotFoundError:
        return trace
    return track(trace, policy, console=Console(stderr=True), transient=True)


if __name__ == "__main__":
    sys.exit(main())
