"""Workers for the tests of groups."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


class Model:
    """A worker that remembers what it ran."""

    def __init__(self, rank: int, world: int, fault: str = "") -> None:
        self.rank, self.world = rank, world
        self.ran: list[object] = []
        self.child: subprocess.Popen[bytes] | None = None
        if rank == world - 1:
            self.fail(fault)

    def fail(self, fault: str) -> None:
        if fault == "raises":
            raise KeyError("no such model")
        if fault == "exits":
            sys.exit(3)
        if fault == "crashes":
            faulthandler.disable()
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "hangs":
            signal.pause()

    def step(self, what: object) -> tuple[int, object]:
        self.ran.append(what)
        return self.rank, what

    def history(self) -> list[object]:
        return self.ran

    def raises(self) -> None:
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise ValueError("wrong") from error

    def raises_in_a_circle(self) -> None:
        """The cause of the cause is the exception itself."""
        error, cause = ValueError("wrong"), KeyError("the cause")
        cause.__cause__ = error
        raise error from cause

    def raises_frozen(self) -> None:
        raise Frozen from Frozen()

    def raises_its_own(self) -> None:
        class Own(Exception):
            pass

        raise Own("nobody knows it")

    def returns_a_lambda(self) -> Any:
        return lambda: None

    def returns_what_stays_here(self) -> "OnlyIn":
        return OnlyIn(os.getpid())

    def waits(self, descriptor: int) -> bytes:
        """Until the test writes a byte."""
        return os.read(descriptor, 1)

    def double(self, array: np.ndarray) -> np.ndarray:
        return array * 2

    def dies(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def exits(self) -> None:
        sys.exit(5)

    def starts_a_child(self) -> int:
        self.child = subprocess.Popen(["sleep", "600"])
        return self.child.pid

    def interrupt(self) -> str:
        """Returns what SIGINT does to a child of the worker."""
        code = "import signal; print(signal.getsignal(signal.SIGINT))"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout

    def counts(self, most: int) -> Iterator[tuple[int, int]]:
        """Notes each step that was asked for, and its end."""
        try:
            for number in range(most + self.rank):
                self.ran.append(number)
                yield self.rank, number
        finally:
            self.ran.append("ended")

    def counts_to_a_fault(self, fault: str) -> Iterator[int]:
        yield 1
        if self.rank == self.world - 1:
            self.fail(fault)
        yield 2

    def prints(self, most: int) -> None:
        """By Python, by descriptor, by a child, on both streams; the last line has no end."""
        for number in range(most):
            print("line", number)
        os.write(1, b"half ")
        print("a line")
        subprocess.run(["echo", "of a child"])
        print("an error", file=sys.stderr)
        print("no end", end="", flush=True)

    def raises_at(self, number: signal.Signals, descriptor: int) -> None:
        """From now on, wherever a signal of that number interrupts the worker."""

        def handler(*_: object) -> None:
            os.write(descriptor, b"x")
            raise LookupError("a handler's own")

        signal.signal(number, handler)

    def sleeps(self, seconds: float) -> None:
        time.sleep(seconds)

    def setting(self, name: str) -> str | None:
        return os.environ.get(name)


@dataclass(frozen=True)
class Frozen(Exception):
    """It refuses attributes, also those of tracebacks and notes."""


class Closing(Model):
    """It notes in a file that it was closed."""

    def __init__(self, rank: int, world: int, folder: str) -> None:
        super().__init__(rank, world)
        self.folder = folder

    def close(self) -> None:
        (Path(self.folder) / f"{self.rank}").write_text("".join(map(str, self.ran)))


class OnlyIn:
    """It can be decoded in one process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> tuple[Any, ...]:
        return only_in, (self.pid,)


def only_in(pid: int) -> OnlyIn:
    if os.getpid() != pid:
        raise ImportError("it cannot be decoded here")
    return OnlyIn(pid)


class Huge:
    """A worker lacks the memory for it that many times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __reduce__(self) -> tuple[Any, ...]:
        return huge, (self.times, os.getpid())


_tries: list[int] = []


def huge(times: int, sender: int) -> str:
    _tries.append(os.getpid())
    if os.getpid() != sender and _tries.count(os.getpid()) <= times:
        raise MemoryError("too huge")
    return "huge"


def triples(model: Model, number: int) -> int:
    """A function whose first argument is the worker."""
    return 3 * number + model.rank
