"""The workers as the scheduler sees them: a process each, a queue to all, and one from each."""

import time
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Protocol, Self

from memlane import Closed, MessageQueue, ReaderDied, WriterDied

from .image_store import ImageWriter
from .worker import START_SECONDS, Report

CLOSE_SECONDS = 5.0
"""How long a worker may take to leave before it is killed."""

LONGEST_REST = 86_400.0
"""Seconds that the scheduler sleeps at most; poll(2) knows no more than 24 days."""


class WorkerDied(Exception):
    """A worker is gone, and with it a part of the model: the engine cannot go on."""

    def __init__(self, rank: int, pid: int, cause: str) -> None:
        """Name the worker; `cause` is what the queue said."""
        super().__init__(f"worker {rank} (pid {pid}) died: {cause}")
        self.rank = rank
        self.pid = pid


class Process(Protocol):
    """What the crew needs of a worker's process; those of multiprocessing have it."""

    @property
    def pid(self) -> int | None:
        """Its id."""

    @property
    def exitcode(self) -> int | None:
        """None as long as it runs."""

    @property
    def sentinel(self) -> int:
        """A descriptor that is ready when it has ended."""

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

    def __init__(self, broadcast: MessageQueue, images: ImageWriter | None = None) -> None:
        """Begin without a worker; `images` is the store that all of them will see, if any."""
        self.broadcast = broadcast
        self.images = images
        self.processes: dict[int, Process] = {}
        self.answers: dict[int, MessageQueue] = {}
        self.reports: list[Report] = []
        """What each worker measured; complete after the `with` block if all left in order."""

    def wait_until_ready(self) -> None:
        """Return when all queues have their readers."""
        self.broadcast.wait_until_ready(START_SECONDS)
        for answers in self.answers.values():
            answers.wait_until_ready(START_SECONDS)

    def send(self, message: object) -> None:
        """Tell all workers; raises `WorkerDied` within the time that the queue promises."""
        try:
            self.broadcast.enqueue(message)
        except ReaderDied as death:
            raise WorkerDied(death.rank, death.pid, f"{death!r}") from death

    def gather(self) -> list[Any]:
        """Return one answer of every worker, in the order of ranks; raises as `send` does."""
        gathered = []
        for rank, answers in self.answers.items():
            try:
                gathered.append(answers.dequeue())
            except WriterDied as death:
                raise WorkerDied(rank, self.pid(rank), f"{death!r}") from death
        return gathered

    def rest(self, until: float) -> None:
        """Sleep until that time (of `time.monotonic`), but see at once when a worker is gone."""
        sentinels = [process.sentinel for process in self.processes.values()]
        gone = wait(sentinels, min(max(0.0, until - time.monotonic()), LONGEST_REST))
        for rank, process in self.processes.items():
            if process.sentinel in gone:
                raise WorkerDied(rank, self.pid(rank), "it left while there was nothing to do")

    def pid(self, rank: int) -> int:
        """Return the process id of a worker."""
        pid = self.processes[rank].pid
        assert pid is not None  # it was started
        return pid

    @property
    def exit_codes(self) -> list[int | None]:
        """How the workers ended: 0 is in order, -9 is `kill -9`, None is still running."""
        return [process.exitcode for process in self.processes.values()]

    def close(self) -> None:
        """Let the workers go, and take their reports."""
        self.broadcast.close()  # they see `Closed`, after what is still queued
        for answers in self.answers.values():
            self._take_report(answers)
            answers.close()
        for process in self.processes.values():
            process.join(CLOSE_SECONDS)
            if process.exitcode is None:
                process.kill()
                process.join()
        if self.images is not None:
            self.images.close()

    def __enter__(self) -> Self:
        """Return the crew, which is ready already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let the workers go, however the block ended."""
        self.close()

    def _take_report(self, answers: MessageQueue) -> None:
        """Read on to the report; answers of an interrupted step may come before it."""
        try:
            while not isinstance(answer := answers.dequeue(CLOSE_SECONDS), Report):
                pass
            self.reports.append(answer)
        except (WriterDied, Closed, TimeoutError):
            pass  # this worker has none: it died, or does not answer any more
