"""Workers on this host: they share its memory, so they have a store and an offload region, too."""

import errno
import resource
import secrets
import time
from collections.abc import Sequence
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path

from memlane import Handle, MessageQueue, SegmentMissing

from .backing import Backing
from .crew import CLOSE_SECONDS, Crew, WorkerDied
from .ending import interruptible, kept_from_children
from .image_store import ImageWriter
from .model import ModelConfig, block_bytes
from .offload import RegionPlan, RegionStart
from .paging import Pools
from .worker import (
    CHUNK_BYTES,
    START_SECONDS,
    Assignment,
    LastWords,
    Ready,
    Restart,
    run_worker,
)


class CannotStart(Exception):
    """The system refuses to start a process; the message says which one, and what to do."""


class LocalWorker:
    """A worker's process, and the pipe on which it reports that it is ready, or why it ends."""

    def __init__(self, assignment: Assignment) -> None:
        """Start it."""
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe(duplex=False)
        with theirs:  # only the worker keeps a copy, so the pipe ends with the worker
            self._process = context.Process(
                target=run_worker, args=(assignment, theirs), name=f"worker-{assignment.rank}"
            )
            self._process.start()
        self.sentinel = self._process.sentinel
        """A descriptor that is ready once the process has ended."""
        self.last_words = ""
        """The reason why it ended, if it could give one; complete after `join`."""
        self.blames: int | None = None
        """The worker whose death made it end, if it said so; complete after `join`."""

    @property
    def pid(self) -> int | None:
        """Its id."""
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def hear(self) -> Ready | None:
        """Return what it sends when it is ready; None if it has ended, or has said why it ends."""
        try:
            message: Ready | LastWords = self.pipe.recv()
        except EOFError:
            return None
        if isinstance(message, LastWords):
            self.last_words, self.blames = message
            return None
        return message

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most `timeout` seconds."""
        self._process.join(timeout)
        if self.exitcode is not None and not self.pipe.closed:
            with self.pipe:
                while self.hear() is not None:
                    pass

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()


class LocalCrew(Crew):
    """N worker processes on this host.

    Images, if there are any, are in one store for all workers. If the device may have too few
    blocks, workers and scheduler share an offload region, with a tier behind it.
    """

    dying_seconds = 5.0  # a process drops its locks just before its exit code is known

    def __init__(
        self,
        config: ModelConfig,
        workers: int,
        pools: Pools,
        store_bytes: int = 0,
        tier: str | None = None,
    ) -> None:
        """Start the workers and wait until all are connected.

        `pools` must be those of the `Batcher` that will decide. `store_bytes` is the size of the
        image store; 0 means no store. `tier` is the URL of the tier behind the region; None means
        a disk.
        """
        super().__init__(
            MessageQueue(workers, workers, max_chunk_bytes=CHUNK_BYTES),
            ImageWriter(store_bytes, workers) if store_bytes else None,
        )
        self.workers: dict[int, LocalWorker] = {}
        self.segments: list[str] = []
        """Names of all segments. The queues' names are unlinked once all are ready, the store's
        when the crew is closed, the region's once all workers have mapped it."""
        self.region: RegionPlan | None = None
        self.backing: Backing | None = None
        self._config, self._device_blocks = config, pools.device
        self.region_starts: list[RegionStart] = []
        """One per worker; empty without a region."""
        self._note_segment(self.broadcast.export_handle())
        if self.images is not None:
            self.segments.append(self.images.handle().ring_buffer_handle[1])
        try:
            if pools.region:
                instance, cell_bytes = secrets.token_hex(16), block_bytes(config, workers)
                self.region = RegionPlan(instance, pools.region, workers, cell_bytes)
            ranks = range(workers)
            self._start([self._assignment(r, self.broadcast.export_handle(r)) for r in ranks])
            with interruptible():
                self._connect()
                if self.region is not None:
                    self.backing = Backing(self.region, tier, repr(config))
                self.wait_until_ready()
        except BaseException:
            self.close(in_order=False)
            raise

    def replace(self, rank: int) -> float:
        """Start another worker in the place of a dead one; returns how long its own start took.

        It gets every message from the next one on, which tells all workers to begin again.
        """
        self.broadcast.release_reader(rank)
        handle = self.broadcast.readmit(rank)
        self.answers.pop(rank).close()
        if self.region is not None:  # the old one has no name by which it could join
            self.region = self.region._replace(instance=secrets.token_hex(16))
        started = time.monotonic()
        self._start([self._assignment(rank, handle)])
        self._begin_to_watch()
        self.send(Restart(self.region))
        self._connect()
        if self.region is not None and self.backing is not None:
            self.backing.restart(self.region)
        seconds = time.monotonic() - started
        with self._naming(rank):
            self.answers[rank].wait_until_ready(START_SECONDS)
        for other, answers in self.answers.items():
            with self._naming(other):  # answers of the interrupted step come before
                while answers.dequeue(cancel=self._is_one_gone) is not None:
                    pass
        return seconds

    def death(self, rank: int, fallback: str) -> WorkerDied:
        """Return the error for the worker that died first: others may have left because of it."""
        death = super().death(rank, fallback)
        blamed = self.workers[rank].blames
        return death if blamed in (None, rank) else self.death(blamed, "it left")

    def close(self, *, in_order: bool = True) -> None:
        """Shut the workers down, then leave the region."""
        try:
            super().close(in_order=in_order)
        finally:
            if self.backing is not None:
                self.backing.close()

    def _assignment(self, rank: int, broadcast: Handle) -> Assignment:
        images = None if self.images is None else self.images.handle()
        world = self.broadcast.n_local_reader
        blocks = self._device_blocks
        return Assignment(self._config, rank, world, blocks, broadcast, images, self.region)

    def _start(self, assignments: Sequence[Assignment]) -> None:
        try:
            with kept_from_children():
                # Otherwise the first worker's start does this, and unblocks two of the signals.
                resource_tracker.ensure_running()
            with kept_from_children():
                for assignment in assignments:
                    worker = LocalWorker(assignment)
                    self.workers[assignment.rank] = self.processes[assignment.rank] = worker
        except OSError as error:
            raise CannotStart(f"cannot start worker {len(self.workers)}: {_why(error)}") from error

    def _connect(self) -> None:
        """Wait for all workers at once: a slow one must not hide one that cannot start."""
        deadline = time.monotonic() + START_SECONDS
        ranks = {worker.pipe: rank for rank, worker in self.workers.items()}
        while len(self.answers) < len(self.workers):
            heard = wait(list(ranks), max(0.0, deadline - time.monotonic()))
            if not heard:
                late = [rank for rank in self.workers if rank not in self.answers]
                raise TimeoutError(f"workers {late} did not start within {START_SECONDS:.0f} s")
            for pipe, rank in ranks.items():
                if pipe in heard:
                    self._take(rank)
        self.answers = dict(sorted(self.answers.items()))

    def _take(self, rank: int) -> None:
        """Connect to a worker that is ready; anything it sends later is about its end."""
        if (ready := self.workers[rank].hear()) is None:
            raise self.death(rank, "it did not start")
        self._note_segment(ready.answers)
        try:
            with self._naming(rank):
                self.answers[rank] = MessageQueue.create_from_handle(ready.answers, 0)
        except SegmentMissing:  # it is leaving
            self.workers[rank].join(CLOSE_SECONDS)
            raise self.death(rank, "it left") from None
        if ready.region is not None:
            self.region_starts.append(ready.region)
            if (name := Path(ready.region.path).name) not in self.segments:
                self.segments.append(name)

    def _note_segment(self, handle: Handle) -> None:
        if handle.buffer_handle is not None:
            self.segments.append(handle.buffer_handle[3])


def _why(error: OSError) -> str:
    match error.errno:
        case errno.EMFILE:
            limit, option = resource.RLIMIT_NOFILE, "open files (ulimit -n"
        case errno.EAGAIN:
            limit, option = resource.RLIMIT_NPROC, "processes (ulimit -u"
        case errno.ENOENT:
            return f"{error.strerror}; has the working directory been removed?"
        case _:
            return str(error)
    most, _ = resource.getrlimit(limit)
    now = "unlimited" if most == resource.RLIM_INFINITY else most
    return f"{error.strerror}; raise the limit on {option}, now {now}), or use fewer --workers"
