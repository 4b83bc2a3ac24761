"""Prefixes each line that workers print: by their descriptors, so that what C prints, and what they
start, has it as well."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import cast

from memlane._base.lifetime import start_thread

_STREAMS = ("stdout", "stderr")
_PIPE_BYTES = 1 << 16
_LONGEST_LINE = 1 << 20  # bytes; more is printed as several


class Output:
    """The pipes of one worker, and the thread that prints what comes."""

    def __init__(self) -> None:
        pipes = [connection.Pipe(duplex=False) for _ in _STREAMS]
        self._readers = [reader for reader, _ in pipes]
        self.writers = [writer for _, writer in pipes]
        self._thread: threading.Thread | None = None

    def begin(self, prefix: str) -> None:
        """Prints with that prefix from now on, until the worker, which has started, ends."""
        for writer in self.writers:
            writer.close()
        thread = threading.Thread(target=self._run, args=(prefix,), name="memlane-output")
        thread.daemon = True
        start_thread(thread)
        self._thread = thread

    def _run(self, prefix: str) -> None:
        streams = {r.fileno(): name for r, name in zip(self._readers, _STREAMS, strict=True)}
        rest = dict.fromkeys(streams, b"")
        while rest:
            for at in cast("list[int]", connection.wait([*rest])):
                data = os.read(at, _PIPE_BYTES)
                *lines, last = (rest[at] + data).split(b"\n")
                if last and (not data or len(last) > _LONGEST_LINE):
                    lines, last = [*lines, last], b""
                _print(streams[at], prefix, lines)
                rest[at] = last
                if not data:
                    del rest[at]
        for reader in self._readers:
            reader.close()

    def end(self, seconds: float) -> None:
        """Waits at most that long until everything is printed that the worker has."""
        if self._thread is not None:
            self._thread.join(seconds)


def _print(stream: str, prefix: str, lines: Sequence[bytes]) -> None:
    text = "".join(f"{prefix}{line.decode(errors='replace')}\n" for line in lines)
    with suppress(OSError, ValueError, AttributeError):  # there is nowhere to print it
        getattr(sys, stream).write(text)
        getattr(sys, stream).flush()


def redirect(writers: Sequence[connection.Connection]) -> None:
    """Makes these pipes the output of this process."""
    for number, (writer, name) in enumerate(zip(writers, _STREAMS, strict=False), start=1):
        os.dup2(writer.fileno(), number)
        writer.close()
        # A new one: a forked process may have inherited what a notebook or a test has put there.
        made = os.fdopen(number, "w", buffering=1, errors="backslashreplace", closefd=False)
        setattr(sys, name, made)
