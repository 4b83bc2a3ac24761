"""Checks the models of the protocol with Spin: they must hold, and their weakened variants fail.

`python -m verification.verify` runs everything, prints one line per search, and exits with 1 if
any result is not the required one. Needs spin and a C compiler.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from verification.cases import BASES, VARIANTS, Run, Variant

HERE = Path(__file__).parent
LONGEST_SECONDS = 120
# For weak fairness, Spin needs a bit per process and two more, in words of 32 bits.
COMPILE_LIVENESS = ("-DNFAIR=4",)
COMPILE_SAFETY = ("-DSAFETY",)
# These may end with sleeping or killed processes; their own assertions say which.
HAVE_THEIR_OWN_REST = ("wait", "watch", "death", "place", "latest", "segment", "extents", "store")


class Unusable(Exception):
    """A search that proves nothing: it did not compile, or did not complete."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a search.

    Attributes:
        violated: the property that does not hold; None if all hold
        states: how many were explored
        seconds: the time of the search alone
    """

    violated: str | None
    states: int
    seconds: float


def call(command: list[str], folder: str) -> str:
    """Runs a command, which must succeed, and returns its output."""
    run = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False
    )
    if run.returncode != 0:
        raise Unusable(f"{' '.join(command)}: {run.stdout}{run.stderr}")
    return run.stdout


def violation(text: str) -> str | None:
    """The property that a search reports as violated."""
    if found := re.search(r"assertion violated (\w+)", text):
        return found[1]
    if re.search(r"pan:\d+: acceptance cycle", text):
        claim = re.search(r"never claim\s+\+ \((\w+)\)", text)
        return claim[1] if claim else "ltl"
    if re.search(r"pan:\d+: invalid end state", text):
        return "no_deadlock"
    return None


def outcome_of(text: str, seconds: float) -> Outcome:
    """Reads the report of a search."""
    errors = re.search(r"errors: (\d+)", text)
    states = re.search(r"(\d+(?:\.\d+e\+\d+)?) states, stored", text)
    violated = violation(text)
    is_whole = "max search depth too small" not in text and "Search not completed" not in text
    if errors is None or states is None or (errors[1] == "0") != (violated is None):
        raise Unusable(text)
    if violated is None and not is_whole:
        raise Unusable(text)
    return Outcome(violated, int(float(states[1])), seconds)


def search(run: Run) -> Outcome:
    """Generates, compiles and runs a search."""
    defines = [f"-D{one}" for one in run.defines.split()]
    options = ["-m2000000", "-w22"]
    if run.liveness:
        defines.append("-DLIVENESS")
        options += ["-a", "-f"]
    if run.model in HAVE_THEIR_OWN_REST:
        options.append("-E")
    with tempfile.TemporaryDirectory(prefix="memlane-verify-") as folder:
        call(["spin", "-a", *defines, str(HERE / f"{run.model}.pml")], folder)
        how = COMPILE_LIVENESS if run.liveness else COMPILE_SAFETY
        call(["cc", "-O1", "-w", *how, "-o", "pan", "pan.c"], folder)
        begin = time.monotonic()
        text = call(["./pan", *options], folder)
        return outcome_of(text, time.monotonic() - begin)


@dataclass(frozen=True)
class Verdict:
    """One line of the table."""

    columns: tuple[str, ...]
    is_right: bool


def verdict_of(case: Run | Variant, outcome: Outcome | None) -> Verdict:
    """Compares an outcome with the required one. None: the search proved nothing."""
    if isinstance(case, Variant):
        columns, must = (f"{case.run.model}: {case.name}", case.weakened), case.caught_by
    else:
        size = case.defines + (", liveness" if case.liveness else "")
        columns, must = (case.model, size), "holds"
    if outcome is None:
        return Verdict((*columns, f"UNUSABLE (must be: {must})", "", ""), False)
    found = outcome.violated or "holds"
    said = found if found == must else f"{found} (MUST BE: {must})"
    numbers = (f"{outcome.states:,}", f"{outcome.seconds:.1f}")
    return Verdict((*columns, said, *numbers), found == must)


def judge(case: Run | Variant) -> Verdict:
    """Runs a case and returns its verdict."""
    run = case.run if isinstance(case, Variant) else case
    try:
        return verdict_of(case, search(run))
    except (Unusable, subprocess.TimeoutExpired) as error:
        print(f"{run}: {error}", file=sys.stderr)
        return verdict_of(case, None)


def table(title: tuple[str, ...], verdicts: Iterable[Verdict]) -> str:
    """Formats the verdicts as columns of text; the last two are numbers."""
    rows = [title, *(verdict.columns for verdict in verdicts)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(title))]
    lines = []
    for row in rows:
        words = [f"{text:<{width}}" for text, width in zip(row[:3], widths[:3], strict=True)]
        numbers = [f"{text:>{width}}" for text, width in zip(row[3:], widths[3:], strict=True)]
        lines.append("  ".join(words + numbers).rstrip())
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs the selected cases; returns 0 if every result is the required one."""
    parser = argparse.ArgumentParser(prog="python -m verification.verify", description=__doc__)
    parser.add_argument("--match", default="", help="only cases whose line contains this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, help="write the table to this file, too")
    options = parser.parse_args(arguments)

    bases = [case for case in BASES if options.match in f"{case.model}: {case.defines}"]
    variants = [case for case in VARIANTS if options.match in f"{case.run.model}: {case.name}"]
    begin = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        held = list(pool.map(judge, bases))
        caught = list(pool.map(judge, variants))
    wrong = sum(not verdict.is_right for verdict in held + caught)
    version = subprocess.run(["spin", "-V"], capture_output=True, text=True, check=True)
    text = "\n".join(
        [
            table(("model", "size", "property", "states", "seconds"), held),
            "",
            table(("variant", "weakened", "caught by", "states", "seconds"), caught),
            "",
            f"{version.stdout.strip()}: {len(held)} searches of models, {len(caught)} of weakened"
            f" ones, {time.monotonic() - begin:.0f} s; {wrong} not as they must be",
        ]
    )
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")
    return 1 if wrong or not held + caught else 0


if __name__ == "__main__":
    sys.exit(main())
