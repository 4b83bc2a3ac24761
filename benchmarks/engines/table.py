"""Tries which releases of vLLM run on memlane with the same tokens: `python -m
benchmarks.engines.table`.

Each with its own classes and with memlane's, tensor parallel 2, text and images; then a worker of
the second is killed. Prints a row a release, as docs/howto/vllm.md has them.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress

from benchmarks.engines import __main__ as runs
from benchmarks.engines.environment import RELEASES, set_up
from benchmarks.machine import describe


def tokens(what: str, side: str) -> tuple[str, list[str]]:
    """Returns the tokens of the client's engine, or why there are none; and its log."""
    lines = [line for _, line in runs.client(side, what)]
    found = runs.facts(lines[-1]) if lines else {}
    wrong = [line for line in lines if "Error: " in line] or ["no tokens"]
    return json.dumps(found["tokens"]) if "tokens" in found else wrong[-1], lines


def agrees(what: str, names: str) -> str:
    """Returns whether both sides make the same tokens, the second with memlane's class of that
    name."""
    own, _ = tokens(what, "vLLM's own")
    ours, log = tokens(what, "memlane")
    if not own.startswith("["):
        return f"vLLM itself fails: {own}"
    if not any(f"{names} is memlane's" in line for line in log):
        return "not replaced"
    return "equal" if own == ours else ours if not ours.startswith("[") else "DIFFERENT"


def death() -> str:
    """Returns how long after a kill of worker 1 the client has its error."""
    struck = error = 0.0
    with suppress(StopIteration):
        for at, line in runs.client("memlane", "kill", runs.ROLES["worker 1"]):
            found = runs.facts(line)
            struck = at if "victim" in found else struck
            error = at if "error" in found else error
    return f"{error - struck:.1f} s" if error else "no error"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.table", description=__doc__)
    parser.add_argument("releases", nargs="*", default=RELEASES, help="of vLLM")
    releases = parser.parse_args().releases
    print(f"tensor parallel 2, {describe()}\n")
    print("| vLLM | text on the queue | images through the store | a worker killed: error after |")
    print("|---|---|---|---|")
    for release in releases:
        runs.variables.clear()
        runs.variables.update(set_up(release))
        seen = agrees("text", "MessageQueue"), agrees("images", "SingleWriterShmObjectStorage")
        print(f"| {release} | {seen[0]} | {seen[1]} | {death()} |", flush=True)


if __name__ == "__main__":
    main()
