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

CLOSE_SECONDS = 10.0
"""The time in which workers may leave before they are killed: less than a second each, unless the
machine is busy."""

SILENT_SECONDS = 1.0
"""After this time the user is told which workers have not left yet."""

LONGEST_REST = 86_400.0
"""The longest time that the scheduler sleeps; poll(2) takes at most 24 days."""


class WorkerDied(Exception):
    """A worker died, and with it a part of the model: the engine cannot continue."""

    def __init__(self, rank: int, pid: int, cause: str) -> None:
        """Name the worker, and why it died."""
        super().__init__(f"worker {rank} (pid {pid}) died: {cause}")
        self.rank = rank
        self.pid = pid


class Process(Protocol):
    """A worker's process as the crew uses it, on whichever host it runs."""

    @property
    def pid(self) -> int | None:
        """Its id."""

    @property
    def exitcode(self) -> int | None:
        """The exit code; None while it runs."""

    @property
    def sentinel(self) -> int:
        """A descriptor that is ready once the process has ended."""

    @property
    def last_words(self) -> str:
        """The reason why it left, if it gave one; complete after `join`."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most `timeout` seconds."""

    def kill(self) -> None:
        """Kill it."""


class Crew:
    """The workers of an engine, by rank; use it in a `with` block, which shuts them down.

    One queue broadcasts from the scheduler to all workers. One queue per worker carries its answers
    back; the worker creates it, because the writer of a queue creates it. Only the queues know
    which workers are on this host. Subclasses start the workers (`local.py`, `remote.py`).
    """

    dying_seconds = 0.0
    """The longest time between a queue's report of a death and the exit code of the process."""

    def __init__(self, broadcast: MessageQueue, images: ImageWriter | None = None) -> None:
        """Begin without workers; `images` is the store that all of them will read, if any."""
        self.broadcast = broadcast
        self.images = images
        self.processes: dict[int, Process] = {}
        self.answers: dict[int, MessageQueue] = {}
        self.reports: list[Report] = []
        """The reports of all workers; complete after the `with` block if all left in order."""
        self.queue_cpu_ns = 0
        """CPU time of the scheduler's thread inside the queues."""
        self._is_one_gone = threading.Event()
        self._watcher: threading.Thread | None = None

    def wait_until_ready(self) -> None:
        """Return when all readers have attached to all queues, whose names are then unlinked."""
        with self._naming():
            self.broadcast.wait_until_ready(START_SECONDS)
        for rank, answers in self.answers.items():
            with self._naming(rank):
                answers.wait_until_ready(START_SECONDS)
        self._begin_to_watch()
        self.send(None)
        self.gather()  # a worker answers once its own queue is ready, and its name unlinked

    def send(self, message: object) -> None:
        """Send to all workers; raises `WorkerDied` within the time that the queue promises."""
        with self._naming(), self._counting():
            self.broadcast.enqueue(message)

    def gather(self) -> list[Any]:
        """Return one answer from each worker, in rank order.

        Raises `WorkerDied` if any worker dies, even while this waits for another one that is
        stopped: the end of any process sets the event that cancels the wait.
        """
        gathered = []
        for rank, answers in self.answers.items():
            with self._naming(rank), self._counting():
                gathered.append(answers.dequeue(cancel=self._is_one_gone))
        return gathered

    def rest(self, until: float) -> None:
        """Sleep until that time (of `time.monotonic`); raises `WorkerDied` at once if one dies."""
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
        """The workers' exit codes: 0 is in order, -9 is `kill -9`, None is still running."""
        return [process.exitcode for process in self.processes.values()]

    def named(self, text: str) -> str:
        """Replace the "writer" and "reader" of memlane's messages by "worker 1" and the like."""
        names = {self.pid(rank): f"worker {rank}" for rank in self.processes}
        names[os.getpid()] = "the scheduler"

        def name(match: re.Match[str]) -> str:
            return f"{names.get(int(match[2]), match[1])} (pid {match[2]}"

        return re.sub(r"((?:the |a )?(?:writer|reader)(?: \d+)?) \(pid (\d+)", name, text)

    def close(self, *, in_order: bool = True) -> None:
        """Shut the workers down; if `in_order`, collect the reports that they send at the end."""
        with ExitStack() as rest:  # runs whatever fails
            if self.images is not None:
                rest.callback(self.images.close)
            if self._watcher is not None:
                rest.callback(self._watcher.join)
            rest.callback(self._see_off)
            for answers in self.answers.values():
                rest.callback(answers.close)
            if not in_order:
                self._kill_stopped()
            self.broadcast.close()  # workers get `Closed` after what is still queued
            if in_order:
                self._take_reports()

    def __enter__(self) -> Self:
        """Return the crew, which is already ready; memlane's log messages now name its workers."""
        logging.getLogger("memlane").addFilter(self._name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut the workers down, however the block ended."""
        logging.getLogger("memlane").removeFilter(self._name)
        self.close(in_order=kind is None)

    def death(self, rank: int, fallback: str) -> WorkerDied:
        """Return the error for a dead worker, with the best known cause, or `fallback`."""
        process = self.processes[rank]
        process.join(self.dying_seconds)
        cause = process.last_words or _end_of(process.exitcode) or self.named(fallback)
        return WorkerDied(rank, self.pid(rank), cause)

    def _name(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self.named(record.getMessage()), ()
        return True

    @contextmanager
    def _naming(self, rank: int | None = None) -> Iterator[None]:
        """Raise a queue's error as `WorkerDied`; `rank` is the worker whose answers are read."""
        try:
            yield
        except ReaderDied as death:
            raise self.death(death.rank, repr(death)) from death
        except WriterDied as death:
            assert rank is not None  # only answers are read here
            raise self.death(rank, repr(death)) from death
        except Cancelled:
            raise self._first_death() from None

    @contextmanager
    def _counting(self) -> Iterator[None]:
        cpu_ns = time.thread_time_ns()
        yield
        self.queue_cpu_ns += time.thread_time_ns() - cpu_ns

    def _begin_to_watch(self) -> None:
        """Call it again once all processes run again, of which one had ended."""
        if self._watcher is not None:
            self._watcher.join()
        self._is_one_gone.clear()
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        """Thread: set the event when the first worker ends."""
        wait([process.sentinel for process in self.processes.values()])
        self._is_one_gone.set()

    def _first_death(self) -> WorkerDied:
        gone = wait([process.sentinel for process in self.processes.values()], 0)
        rank = next(rank for rank, process in self.processes.items() if process.sentinel in gone)
        self.processes[rank].join(CLOSE_SECONDS)
        return self.death(rank, "it left")

    def _kill_stopped(self) -> None:
        """Kill stopped workers, which would not notice the shutdown."""
        for reader in self.broadcast.statistics().readers:
            if reader.state == "stopped":
                say(f"worker {reader.rank} (pid {reader.pid}) is stopped: killed")
                self.processes[reader.rank].kill()

    def _see_off(self) -> None:
        """Wait until all workers have left, and kill those that do not leave."""
        if not (late := self._join(SILENT_SECONDS)):
            return
        patience = CLOSE_SECONDS - SILENT_SECONDS
        names = ", ".join(f"{rank} (pid {self.pid(rank)})" for rank in late)
        say(f"waiting for worker {names} to leave; killed in {patience:.0f} s")
        for rank in self._join(patience):
            self.processes[rank].kill()
            self.processes[rank].join()

    def _join(self, seconds: float) -> list[int]:
        """Wait at most that long; returns the ranks of the workers that are still running."""
        deadline = time.monotonic() + seconds
        for process in self.processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        return [rank for rank, process in self.processes.items() if process.exitcode is None]

    def _take_reports(self) -> None:
        """Read each worker's report; answers of an interrupted step may precede it."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for answers in self.answers.values():
            try:
                left = max(0.0, deadline - time.monotonic())
                while not isinstance(answer := answers.dequeue(left), Report):
                    pass
                self.reports.append(answer)
            except (WriterDied, Closed, TimeoutError):
                pass  # no report: the worker died, or no longer answers


def _end_of(exitcode: int | None) -> str:
    if exitcode is None:
        return ""
    if exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"it left with exit code {exitcode}"
