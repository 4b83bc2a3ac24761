"""`python -m benchmarks.engines [--release R] [--rounds N] [--only speed|images|nodes|deaths]`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.engines.environment import MODEL, PYTHON, RELEASES, ROOT, SEER, set_up
from benchmarks.machine import describe

SIDES = {"vLLM's own": "", "memlane": "all"}
CLIENT = Path(__file__).with_name("client.py")
OWN_SHM = str(ROOT / "tests/own_shm.sh")
ROLES = {
    "worker 0": "VLLM::Worker_TP0",
    "worker 1": "VLLM::Worker_TP1",
    "EngineCore": "VLLM::EngineCore",
}
LOGS = MODEL.parent / "logs"
Line = tuple[float, str]

variables: dict[str, str] = {}  # the environment of every client


def client(side: str, *words: str) -> Iterator[Line]:
    """The lines of a client's log, each with its arrival time. Leaves no process behind."""
    sockets = tempfile.TemporaryDirectory()  # a killed vLLM leaves its sockets and segments behind
    model = SEER if words == ("images",) else MODEL
    process = subprocess.Popen(
        [OWN_SHM, "nice", "-n", "5", str(PYTHON), str(CLIENT), str(model), *words],
        env={**os.environ, **variables, "TMPDIR": sockets.name, "MEMLANE_VLLM": SIDES[side]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    log = LOGS / f"{'-'.join((*words, SIDES[side] or 'own'))}.log".replace("::", "-")
    log.parent.mkdir(exist_ok=True)
    try:
        lines = log.open("w")
        for line in process.stdout or ():
            print(line, end="", file=lines, flush=True)
            yield time.monotonic(), line.rstrip()
            if line.startswith(('@@{"left"', '@@{"tokens"')):
                return
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        sockets.cleanup()


def facts(line: str) -> dict[str, Any]:
    return json.loads(line[2:]) if line.startswith("@@") else {}


def speeds(what: str, rounds: int) -> None:
    """Prints one table of medians; `what` is the client's command."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            lines = list(client(side, what))
            found = facts(lines[-1][1])
            if "tokens" not in found:
                raise SystemExit("\n".join(line for _, line in lines[-40:]))
            runs[side].append(found)
    tokens = {json.dumps(run["tokens"]) for found in runs.values() for run in found}
    print(f"\n| {what} | {' | '.join(SIDES)} | ratio |\n|---|---|---|---|")
    print(f"| tokens | | | {'equal' if len(tokens) == 1 else 'DIFFERENT'} |")
    for name in found.keys() - {"tokens"}:
        own, ours = (statistics.median(run[name] for run in runs[side]) for side in SIDES)
        print(f"| {name} | {own:.1f} | {ours:.1f} | {ours / own:.3f} |", flush=True)


def strikes(what: str, role: str) -> None:
    for side in SIDES:
        victim, struck = 0, 0.0
        said = error = left = "-"
        for at, line in client(side, what, ROLES[role]):
            found = facts(line)
            if "victim" in found:
                victim, struck = found["victim"], at
            elif "error" in found:
                error = f"{at - struck:.2f} s"
            elif "left" in found:
                left = str(len(found["left"]))
            elif victim and said == "-" and f"(pid {victim}" in line and "memlane" not in line[:4]:
                said = f"{at - struck:.2f} s: {line.split('] ')[-1][:110]}"
        print(f"| {what} {role} | {side} | {error} | {said} | {left} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="turns of each side")
    parser.add_argument("--only", choices=["speed", "images", "nodes", "deaths"])
    parser.add_argument("--release", choices=RELEASES, default="0.32", help="of vLLM")
    arguments = parser.parse_args()
    variables.update(set_up(arguments.release))
    print(f"vLLM {arguments.release}, tensor parallel 2, {describe()}")
    for what in ("speed", "images", "nodes"):
        if arguments.only in (None, what):
            speeds(what, arguments.rounds)
    if arguments.only in (None, "deaths"):
        print("\n| what | on | client's error after | named in the log | processes after 8 s |")
        print("|---|---|---|---|---|")
        for what, roles in (("kill", list(ROLES)), ("stop", ["worker 0", "worker 1"])):
            for role in roles:
                strikes(what, role)


if __name__ == "__main__":
    main()
