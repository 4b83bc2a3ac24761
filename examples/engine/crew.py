"""The workers as the scheduler sees them: a process each, a queue to all, and one from each."""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Protocol, Self

from memlane import Cancelled, Closed, MessageQueue, ReaderDied, WriterDied

from .ending import say
from .image_store import ImageWriter
from .worker import START_SECONDS, Report

CLOSE_SECONDS = 5.0
"""How long workers may take to leave before they are killed."""

SILENT_SECONDS = 1.0
"""After so much of it the user is told whom the scheduler waits for."""

LONGEST_REST = 86_400.0
"""Seconds that the scheduler sleeps at most; poll(2) knows no more than 24 days."""


class WorkerDied(Exception):
    """A worker is gone, and with it a part of the model: the engine cannot go on."""

    def __init__(self, rank: int, pid: int, cause: str) -> None:
        """Name the worker, and why it died."""
        super().__init__(f"worker {rank} (pid {pid}) died: {cause}")
        self.rank = rank
        self.pid = pid


class Process(Protocol):
    """What the crew needs of a worker's process, wherever it runs."""

    @property
    def pid(self) -> int | None:
        """Its id."""

    @property
    def exitcode(self) -> int | None:
        """None as long as it runs."""

    @property
    def sentinel(self) -> int:
        """A descriptor that is ready when it has ended."""

    @property
    def last_words(self) -> str:
        """What it said of its end, if it said anything; complete when it has been joined."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, so many seconds at most."""

    def kill(self) -> None:
        """End it."""


class Crew:
    """The workers of an engine, by rank; to be used in a `with` block, which lets them go.

    One queue broadcasts from the scheduler to all of them. One queue per worker carries its
    answers back; the worker creates it, for whoever writes a queue creates it. Which of them are on
    this host only the queues know. Who starts the workers fills this in (`local.py`, `remote.py`).
    """

    dying_seconds = 0.0
    """So long at most a queue can know of a death before the system can say how it came about."""

    def __init__(self, broadcast: MessageQueue, images: ImageWriter | None = None) -> None:
        """Begin without a worker; `images` is the store that all of them will see, if any."""
        self.broadcast = broadcast
        self.images = images
        self.processes: dict[int, Process] = {}
        self.answers: dict[int, MessageQueue] = {}
        self.reports: list[Report] = []
        """What each worker measured; complete after the `with` block if all left in order."""
        self._is_one_gone = threading.Event()
        self._watcher: threading.Thread | None = None

    def wait_until_ready(self) -> None:
        """Return when all queues have their readers, and none has a name in /dev/shm any more."""
        with self._naming():
            self.broadcast.wait_until_ready(START_SECONDS)
        for rank, answers in self.answers.items():
            with self._naming(rank):
                answers.wait_until_ready(START_SECONDS)
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._watcher.start()
        self.send(None)
        self.gather()  # a worker answers when its own queue is ready, which takes its name away

    def send(self, message: object) -> None:
        """Tell all workers; raises `WorkerDied` within the time that the queue promises."""
        with self._naming():
            self.broadcast.enqueue(message)

    def gather(self) -> list[Any]:
        """Return one answer of every worker, in the order of ranks.

        Raises `WorkerDied` when any of them is gone, even while another is stopped whose answer is
        awaited first: the end of a process sets the event that cancels the wait.
        """
        gathered = []
        for rank, answers in self.answers.items():
            with self._naming(rank):
                gathered.append(answers.dequeue(cancel=self._is_one_gone))
        return gathered

    def rest(self, until: float) -> None:
        """Sleep until that time (of `time.monotonic`), but see at once when a worker is gone."""
        seconds = min(max(0.0, until - time.monotonic()), LONGEST_REST)
        if self._is_one_gone.wait(seconds):
            raise self._first_death()

    def pid(self, rank: int) -> int:
        """Return the process id of a worker."""
        pid = self.processes[rank].pid
        assert pid is not None  # it was started
        return pid

    @property
    def exit_codes(self) -> list[int | None]:
        """How the workers ended: 0 is in order, -9 is `kill -9`, None is still running."""
        return [process.exitcode for process in self.processes.values()]

    def named(self, text: str) -> str:
        """Say "worker 1" where memlane, which knows only its queues, has a "writer" or "reader"."""
        names = {self.pid(rank): f"worker {rank}" for rank in self.processes}
        names[os.getpid()] = "the scheduler"

        def name(match: re.Match[str]) -> str:
            return f"{names.get(int(match[2]), match[1])} (pid {match[2]}"

        return re.sub(r"((?:the |a )?(?:writer|reader)(?: \d+)?) \(pid (\d+)", name, text)

    def close(self, *, in_order: bool = True) -> None:
        """Let the workers go; in order: take their reports, which they send when all is done."""
        with ExitStack() as rest:  # is done whatever fails
            if self.images is not None:
                rest.callback(self.images.close)
            if self._watcher is not None:
                rest.callback(self._watcher.join)
            rest.callback(self._see_off)
            for answers in self.answers.values():
                rest.callback(answers.close)
            if not in_order:
                self._kill_stopped()
            self.broadcast.close()  # they see `Closed`, after what is still queued
            if in_order:
                self._take_reports()

    def __enter__(self) -> Self:
        """Return the crew, which is ready already; what memlane logs names its workers now."""
        logging.getLogger("memlane").addFilter(self._name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let the workers go, however the block ended."""
        logging.getLogger("memlane").removeFilter(self._name)
        self.close(in_order=kind is None)

    def death(self, rank: int, news: str) -> WorkerDied:
        """Return what is known of the death of a worker: more than the `news` of it, as a rule."""
        process = self.processes[rank]
        process.join(self.dying_seconds)
        cause = process.last_words or _end_of(process.exitcode) or self.named(news)
        return WorkerDied(rank, self.pid(rank), cause)

    def _name(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self.named(record.getMessage()), ()
        return True

    @contextmanager
    def _naming(self, rank: int | None = None) -> Iterator[None]:
        """Name the worker about which a queue complains; `rank` is whose answers are read."""
        try:
            yield
        except ReaderDied as death:
            raise self.death(death.rank, repr(death)) from death
        except WriterDied as death:
            assert rank is not None  # only answers are read here
            raise self.death(rank, repr(death)) from death
        except Cancelled:
            raise self._first_death() from None

    def _watch(self) -> None:
        """Thread: tell of the first worker that ends, and end."""
        wait([process.sentinel for process in self.processes.values()])
        self._is_one_gone.set()

    def _first_death(self) -> WorkerDied:
        gone = wait([process.sentinel for process in self.processes.values()], 0)
        rank = next(rank for rank, process in self.processes.items() if process.sentinel in gone)
        self.processes[rank].join(CLOSE_SECONDS)
        return self.death(rank, "it left")

    def _kill_stopped(self) -> None:
        """Who is stopped could not hear that it is to leave."""
        for reader in self.broadcast.statistics().readers:
            if reader.state == "stopped":
                say(f"worker {reader.rank} (pid {reader.pid}) is stopped: killed")
                self.processes[reader.rank].kill()

    def _see_off(self) -> None:
        """Wait until all have left, and kill those who do not."""
        if not (late := self._join(SILENT_SECONDS)):
            return
        patience = CLOSE_SECONDS - SILENT_SECONDS
        names = ", ".join(f"{rank} (pid {self.pid(rank)})" for rank in late)
        say(f"waiting for worker {names} to leave; killed in {patience:.0f} s")
        for rank in self._join(patience):
            self.processes[rank].kill()
            self.processes[rank].join()

    def _join(self, seconds: float) -> list[int]:
        """Return the ranks of those who are still there after so long."""
        deadline = time.monotonic() + seconds
        for process in self.processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        return [rank for rank, process in self.processes.items() if process.exitcode is None]

    def _take_reports(self) -> None:
        """Read on to the reports; answers of an interrupted step may come before them."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for answers in self.answers.values():
            try:
                left = max(0.0, deadline - time.monotonic())
                while not isinstance(answer := answers.dequeue(left), Report):
                    pass
                self.reports.append(answer)
            except (WriterDied, Closed, TimeoutError):
                pass  # this worker has none: it died, or does not answer any more


def _end_of(exitcode: int | None) -> str:
    if exitcode is None:
        return ""
    if exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"it left with exit code {exitcode}"
