"""A coverage-guided fuzzer for targets in Python.

    python -m tests.fuzz.engine TARGET [--seconds N] [--only] [--found F] --crash F FILE...

The engine of native/tests/fuzz, for Python: it tries all inputs in the files and folders, then
mutates those that reached something new. Coverage is the steps from line to line in memlane's own
files, seen by `sys.settrace`, and the kinds of errors. A target has `attempt(content)`, which
returns, or raises for a fault; `GENUINE`, inputs that are tried first; and optionally its own
`change(content, dice)`: a mutation that knows the format gets deeper than one that flips bits.

A fault is any exception, a signal, more than a minute without an end, or memory beyond a limit
(RLIMIT_AS: a MemoryError then shows). Everything runs in a child, which may die of it; the input is
in memory that the parent shares.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import mmap
import os
import random
import resource
import signal
import struct
import sys
import time
import traceback
import warnings
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import memlane

PATIENCE = 60
"""Seconds for one input."""
ROOM = 512 << 20
"""Memory that all inputs together may take, in bytes."""
LONGEST = 64 << 10
NUMBERS = [0, 1, 2, 63, 64, 127, 128, 255, 4095, 4096, 65535, 65536, 2**31 - 1, 2**31]
NUMBERS += [2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
_OURS = str(Path(memlane.__file__).parent)


class Coverage:
    """Steps from line to line in memlane's files."""

    def __init__(self) -> None:
        self.seen: set[Any] = set()
        self._new = False

    def note(self, step: Any) -> None:
        if step not in self.seen:
            self.seen.add(step)
            self._new = True

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS):
            return None
        last = code.co_firstlineno

        def step(inner: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            self.note((code, last, inner.f_lineno, event))
            last = inner.f_lineno
            return step

        return step

    def is_new(self, target: ModuleType, content: bytes) -> bool:
        """Tries an input; returns whether it reached something new."""
        self._new = False
        sys.settrace(self._enter)
        try:
            self.note(target.attempt(content))
        finally:
            sys.settrace(None)
        return self._new


def change(content: bytes, dice: random.Random) -> bytes:
    """Changes, adds or removes some bytes."""
    changed = bytearray(content or bytes(16))
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(changed))
        match dice.randrange(6):
            case 0:
                changed[at] ^= 1 << dice.randrange(8)
            case 1:
                changed[at] = dice.randrange(256)
            case 2:
                width = dice.choice([1, 2, 4, 8])
                number = (dice.choice(NUMBERS) + dice.choice([0, 0, 0, -1, 1])) % (1 << 8 * width)
                order = dice.choice(["little", "big"])
                changed[at : at + width] = number.to_bytes(width, order)  # type: ignore[arg-type]
            case 3:
                del changed[at : at + dice.choice([1, 2, 4, 16, 64])]
            case 4:
                changed[at:at] = dice.randbytes(dice.choice([1, 2, 4, 16]))
            case _:
                length = dice.choice([1, 4, 16, 64])
                start = dice.randrange(len(changed))
                changed[at:at] = changed[start : start + length]
        if not changed:
            changed = bytearray(1)
    return bytes(changed[:LONGEST])


class Current:
    """The input being tried, where the parent sees it after the child's death."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, LONGEST + 8)

    def set(self, content: bytes) -> None:
        self._memory[: 8 + len(content)] = struct.pack("<Q", len(content)) + content

    def get(self) -> bytes:
        (length,) = struct.unpack_from("<Q", self._memory)
        return self._memory[8 : 8 + length]


def _inputs(places: list[Path]) -> list[bytes]:
    files: list[Path] = []
    for place in places:
        if place.is_dir():
            files += sorted(place.iterdir())
        elif place.exists():
            files.append(place)
    return [file.read_bytes()[:LONGEST] for file in files]


def _limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, resource.RLIM_INFINITY))


def fuzz(target: ModuleType, options: argparse.Namespace, current: Current) -> str:
    """Runs until the time is over; returns a summary. A fault raises."""
    warnings.simplefilter("ignore")
    dice = random.Random(options.random)
    coverage = Coverage()
    corpus: list[bytes] = []
    tried = 0
    begin = time.monotonic()

    def attempt(content: bytes) -> bool:
        nonlocal tried
        tried += 1
        current.set(content)
        signal.alarm(PATIENCE)
        if not coverage.is_new(target, content):
            return False
        corpus.append(content)
        return True

    target.attempt(target.GENUINE[0])  # imports what it needs before memory is counted
    _limit_memory()
    for content in ([] if options.only else target.GENUINE) + _inputs(options.places):
        attempt(content)
    mutate = getattr(target, "change", change)
    while corpus and time.monotonic() - begin < options.seconds:
        latest = corpus[-min(len(corpus), 32) :]
        content = mutate(dice.choice(corpus if dice.random() < 0.5 else latest), dice)
        if attempt(content[:LONGEST]) and options.found:
            name = hashlib.sha256(content).hexdigest()[:16]
            (options.found / name).write_bytes(content)
    signal.alarm(0)
    seconds = time.monotonic() - begin
    return (
        f"{options.target}: {tried} inputs in {seconds:.1f} s, {len(corpus)} of them kept, "
        f"{len(coverage.seen)} steps"
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--random", type=int, default=None)
    parser.add_argument("--found", type=Path, default=None)
    parser.add_argument("--crash", type=Path, required=True)
    parser.add_argument("--only", action="store_true", help="not what the target itself knows")
    parser.add_argument("places", nargs="*", type=Path)
    options = parser.parse_intermixed_args()
    current = Current()
    child = os.fork()
    if child == 0:
        status = 76
        try:
            target = importlib.import_module(f"tests.fuzz.targets.{options.target}")
            print(fuzz(target, options, current), flush=True)
            status = 0
        except BaseException:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        options.crash.write_bytes(current.get())
        if status < 0:
            print(f"signal {-status} ({signal.strsignal(-status)})", file=sys.stderr)
    return abs(status)


if __name__ == "__main__":
    sys.exit(main())
