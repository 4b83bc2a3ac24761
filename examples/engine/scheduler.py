"""The scheduler's side: starts the workers, broadcasts each decision, and combines the answers."""

import multiprocessing
import secrets
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from memlane import Closed, Handle, MessageQueue, QueueStatistics, ReaderDied, WriterDied

from .batching import Batcher, Decision, Request
from .image_store import ImageWriter
from .model import ModelConfig, block_bytes, combine, elect
from .offload import RegionPlan, RegionStart
from .paging import Pools
from .progress import Progress
from .worker import CHUNK_BYTES, START_SECONDS, Assignment, Ballot, Ready, Report, run_worker

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


class Engine:
    """N worker processes that compute one step at a time; to be used in a `with` block.

    One queue broadcasts from the scheduler to all workers. One queue per worker carries its
    answers back; the worker creates it, for whoever writes a queue creates it. If there are
    images, one store has them for all. If the device's blocks may not do, the workers have an
    offload region, which they make among themselves: the scheduler only says what goes where.
    """

    def __init__(
        self, config: ModelConfig, workers: int, pools: Pools, store_bytes: int = 0
    ) -> None:
        """Start the workers and wait until all are connected.

        `pools` must be those of the `Batcher` that is to decide. `store_bytes` is the size of the
        store for images; 0 is for none.
        """
        self.reports: list[Report] = []
        """What each worker measured; complete after the `with` block if all left in order."""
        self.segments: list[str] = []
        """Names of all shared memory. The queues' are gone from /dev/shm once all are ready, the
        store's when the engine closes; the region's once all workers have mapped it."""
        self.region: RegionPlan | None = None
        if pools.region:
            instance, cell_bytes = secrets.token_hex(16), block_bytes(config, workers)
            self.region = RegionPlan(instance, pools.region, workers, cell_bytes)
        self.region_starts: list[RegionStart] = []
        """By rank; empty without a region."""
        self.images = ImageWriter(store_bytes, workers) if store_bytes else None
        self._config = config
        self._pools = pools
        self._processes: list[SpawnProcess] = []
        self._answers: list[MessageQueue] = []
        self._broadcast = MessageQueue(workers, workers, max_chunk_bytes=CHUNK_BYTES)
        self._note_segment(self._broadcast.export_handle())
        if self.images is not None:
            self.segments.append(self.images.handle().ring_buffer_handle[1])
        try:
            pipes = [self._spawn(rank, workers) for rank in range(workers)]
            for rank, pipe in enumerate(pipes):
                self._connect(rank, pipe)
            self._broadcast.wait_until_ready(START_SECONDS)
            for answers in self._answers:
                answers.wait_until_ready(START_SECONDS)
        except BaseException:
            self._close()
            raise

    def step(self, decision: Decision) -> list[Ballot]:
        """Have one decision computed; returns the ballots of all workers, by rank.

        Raises `WorkerDied` within a second if a worker is gone.
        """
        if self.images is not None:
            decision["images"] = self.images.take_references()
        decision["sent_ns"] = time.monotonic_ns()
        self._send(decision)
        # From here on the scheduler plays the all-reduce of the GPUs.
        for _ in range(self._config.layers):
            self._send(combine(self._gather()))
        return self._gather()

    def generate(self, batcher: Batcher, progress: Progress) -> Iterator[None]:
        """Run all requests to their end, from their arrivals on; yields after each step."""
        progress.start()
        while True:
            decided = progress.elapsed()
            decision = batcher.decide(decided, self._admit)
            if decision is not None:
                ballots = self.step(decision)
                new = batcher.accept(decision, elect([ballot.votes for ballot in ballots]))
                progress.latencies.extend(ballot.latency_ns / 1e9 for ballot in ballots)
                progress.note_step(decided, decision, new, batcher)
                yield
            elif batcher.next_arrival is not None:
                self._rest(progress.started + batcher.next_arrival)
            else:
                return

    def statistics(self) -> QueueStatistics:
        """Return what the broadcast queue says of itself and of every worker."""
        return self._broadcast.statistics()

    def pid(self, rank: int) -> int:
        """Return the process id of a worker."""
        pid = self._processes[rank].pid
        assert pid is not None  # it was started
        return pid

    @property
    def exit_codes(self) -> list[int | None]:
        """How the workers ended: 0 is in order, -9 is `kill -9`, None is still running."""
        return [process.exitcode for process in self._processes]

    def __enter__(self) -> Self:
        """Return the engine, which is running already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let the workers go, however the block ended."""
        self._close()

    def _admit(self, number: int, request: Request) -> bool:
        if request.image is None:
            return True
        if self.images is None:
            raise ValueError(f"request {number} has an image, and this engine has no store")
        return self.images.refer(number, request.image)

    def _spawn(self, rank: int, workers: int) -> Connection:
        """Start one worker; that it is `Ready` will come through the returned pipe."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        broadcast = self._broadcast.export_handle(rank)
        images = None if self.images is None else self.images.handle()
        assignment = Assignment(
            self._config, rank, workers, self._pools.device, broadcast, images, self.region
        )
        process = context.Process(
            target=run_worker,
            args=(assignment, theirs),
            name=f"worker-{rank}",
        )
        process.start()
        theirs.close()  # so that the pipe ends with the worker
        self._processes.append(process)
        return ours

    def _connect(self, rank: int, pipe: Connection) -> None:
        with pipe:
            if not pipe.poll(START_SECONDS):
                raise TimeoutError(f"worker {rank} did not start within {START_SECONDS:.0f} s")
            try:
                ready: Ready = pipe.recv()
            except EOFError:
                raise WorkerDied(rank, self.pid(rank), "it did not start") from None
        self._note_segment(ready.answers)
        self._answers.append(MessageQueue.create_from_handle(ready.answers, 0))
        if ready.region is not None:
            self.region_starts.append(ready.region)
            if (name := Path(ready.region.path).name) not in self.segments:
                self.segments.append(name)

    def _note_segment(self, handle: Handle) -> None:
        if handle.buffer_handle is not None:
            self.segments.append(handle.buffer_handle[3])

    def _rest(self, until: float) -> None:
        """Sleep until that time (of `time.monotonic`), but see at once when a worker is gone."""
        sentinels = [process.sentinel for process in self._processes]
        gone = wait(sentinels, min(max(0.0, until - time.monotonic()), LONGEST_REST))
        for rank, sentinel in enumerate(sentinels):
            if sentinel in gone:
                raise WorkerDied(rank, self.pid(rank), "it left while there was nothing to do")

    def _send(self, message: object) -> None:
        try:
            self._broadcast.enqueue(message)
        except ReaderDied as death:
            raise WorkerDied(death.rank, death.pid, f"{death!r}") from death

    def _gather(self) -> list[Any]:
        """One answer of every worker, in the order of ranks."""
        gathered = []
        for rank, answers in enumerate(self._answers):
            try:
                gathered.append(answers.dequeue())
            except WriterDied as death:
                raise WorkerDied(rank, self.pid(rank), f"{death!r}") from death
        return gathered

    def _close(self) -> None:
        self._broadcast.close()  # the workers see `Closed`, after what is still queued
        for answers in self._answers:
            self._take_report(answers)
            answers.close()
        for process in self._processes:
            process.join(CLOSE_SECONDS)
            if process.exitcode is None:
                process.kill()
                process.join()
        if self.images is not None:
            self.images.close()

    def _take_report(self, answers: MessageQueue) -> None:
        """Read on to the report; answers of an interrupted step may come before it."""
        try:
            while not isinstance(answer := answers.dequeue(CLOSE_SECONDS), Report):
                pass
            self.reports.append(answer)
        except (WriterDied, Closed, TimeoutError):
            pass  # this worker has none: it died, or does not answer any more
