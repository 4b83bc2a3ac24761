"""One tensor-parallel worker: reads every decision, computes its shard, answers, and reports."""

import signal
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

from memlane import (
    Closed,
    Handle,
    MemlaneError,
    MessageQueue,
    ReaderDied,
    ShmObjectStorageHandle,
)

from .batching import Decision
from .image_store import ImageReader
from .kv_cache import Array
from .model import Batch, ModelConfig, Shard, Votes
from .offload import Moved, Offload, RegionPlan, RegionStart

CHUNK_BYTES = 1 << 20
"""Room for one message; the largest are the sums of a full step, about 64 KiB."""

START_SECONDS = 60.0
"""The time that processes wait for each other at the start; imports are slow on a busy host."""


class Assignment(NamedTuple):
    """A worker's arguments when it starts."""

    config: ModelConfig
    rank: int
    world: int
    blocks: int
    """Blocks of the KV cache on its device."""
    broadcast: Handle
    images: ShmObjectStorageHandle | None
    region: RegionPlan | None


class Ready(NamedTuple):
    """A worker's first message, once it is set up."""

    answers: Handle
    region: RegionStart | None


class Restart(NamedTuple):
    """Broadcast when a worker was replaced: all begin again, without a cache."""

    region: RegionPlan | None


class Restarted(Exception):
    """A worker was replaced in the middle of the step."""

    def __init__(self, restart: Restart) -> None:
        """Say how to go on."""
        super().__init__("a worker was replaced")
        self.restart = restart


class LastWords(NamedTuple):
    """A worker's message through the same pipe when it must leave because of an error."""

    text: str
    blames: int | None
    """The dead worker because of which it must leave, if there is one."""


class Ballot(NamedTuple):
    """A worker's last answer of a step."""

    votes: Votes
    latency_ns: int
    """The decision's latency: from just before the scheduler's `enqueue` to the return of
    `dequeue`."""


@dataclass
class Report:
    """A worker's measurements of broadcast, store and region; its very last answer."""

    waiting_ns: int = 0
    """Time spent inside `dequeue`."""
    waiting_cpu_ns: int = 0
    """CPU time of the whole process meanwhile, unpickling of the messages included."""
    answering_cpu_ns: int = 0
    """CPU time of the whole process inside `enqueue`."""
    cpu_ns: int = 0
    """CPU time of the whole process, for all steps."""
    view_ns: list[int] = field(default_factory=list)
    """Per image, the time until its pixels were accessible."""
    moved: Moved = field(default_factory=Moved)
    """The copies between device and offload region."""


def run_worker(assignment: Assignment, pipe: Connection) -> None:
    """Run a worker on the scheduler's host, with the store and the region if there are any.

    Exits with code 1 when the scheduler dies, which the queues detect by themselves. It starts with
    a terminal's signals blocked: they end the scheduler, which ends the workers.
    """
    try:
        _run(assignment, pipe)
    except (MemlaneError, OSError, MemoryError) as error:
        _leave(assignment.rank, pipe, error)


def _run(assignment: Assignment, pipe: Connection) -> None:
    config, rank, world, blocks, broadcast_handle, images_handle, plan = assignment
    shard = Shard(config, rank, world, blocks)
    device = shard.cache.blocks
    with (
        # First: a worker that comes when the scheduler has closed must not create a region, in
        # which it may be killed for being late.
        MessageQueue.create_from_handle(broadcast_handle, rank) as broadcast,
        closing(Offload(plan, rank, device)) if plan else nullcontext() as offload,
        MessageQueue(1, 1, max_chunk_bytes=CHUNK_BYTES) as answers,
        closing(ImageReader(images_handle)) if images_handle else nullcontext() as images,
    ):
        pipe.send(Ready(answers.export_handle(), offload.start if offload else None))
        work(config, shard, broadcast, answers, images, offload)


def _leave(rank: int, pipe: Connection, error: Exception) -> NoReturn:
    """Tell the scheduler the reason, or the user if the scheduler is gone."""
    try:
        blames = error.rank if isinstance(error, ReaderDied) else None
        pipe.send(LastWords(f"{type(error).__name__}: {error}", blames))
    except BrokenPipeError:
        why = "the scheduler died" if isinstance(error, BrokenPipeError) else error
        raise SystemExit(f"worker {rank} leaves: {why}") from None
    raise SystemExit(1)


def work(
    config: ModelConfig,
    shard: Shard,
    broadcast: MessageQueue,
    answers: MessageQueue,
    images: ImageReader | None = None,
    offload: Offload | None = None,
) -> None:
    """Compute steps until the scheduler closes the broadcast, then report."""
    broadcast.wait_until_ready(START_SECONDS)
    mail = _Mail(broadcast, answers)
    mail.take_start()
    # Now the scheduler has attached to the answers; dead before that, it would seem absent.
    answers.wait_until_ready(START_SECONDS)
    # From here on no segment of this worker has a name in /dev/shm: SIGTERM may end it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    answers.enqueue(None)
    started_ns = time.process_time_ns()
    try:
        while True:
            try:
                _step(config, shard, mail.take_decision(), mail, images, offload)
            except Restarted as error:
                shard.restart()
                if offload is not None and error.restart.region is not None:
                    offload.restart(error.restart.region)
                answers.enqueue(None)
    except Closed:
        report = mail.report
        report.cpu_ns = time.process_time_ns() - started_ns
        if images is not None:
            report.view_ns = images.view_ns
        if offload is not None:
            report.moved = offload.moved
        answers.enqueue(report)


def _step(
    config: ModelConfig,
    shard: Shard,
    told: tuple[Decision, int],
    mail: "_Mail",
    images: ImageReader | None,
    offload: Offload | None,
) -> None:
    decision, latency_ns = told
    shard.drop(decision["drop"])
    if offload is not None:
        offload.move(decision)
    if images is not None:
        images.show(decision["images"], shard.see)
    batch = Batch(decision, config)
    hidden = shard.embed(batch)
    for layer in range(config.layers):
        mail.answer(shard.block(layer, hidden, batch))
        hidden = hidden + mail.take_total()
    mail.answer(Ballot(shard.vote(hidden, batch), latency_ns))


class _Mail:
    """The ends of both queues; measures what they cost."""

    def __init__(self, broadcast: MessageQueue, answers: MessageQueue) -> None:
        self.report = Report()
        self._broadcast = broadcast
        self._answers = answers

    def answer(self, message: object) -> None:
        cpu_ns = time.process_time_ns()
        self._answers.enqueue(message)
        self.report.answering_cpu_ns += time.process_time_ns() - cpu_ns

    def take_start(self) -> None:
        """Wait for the first message, which says only that all are there; it is not measured."""
        self._broadcast.dequeue()

    def take_decision(self) -> tuple[Decision, int]:
        """Return the decision and its latency in ns."""
        decision: Decision = self._take()
        return decision, time.monotonic_ns() - decision["sent_ns"]

    def take_total(self) -> Array:
        total: Array = self._take()
        return total

    def _take(self) -> Any:
        started_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
        message = self._broadcast.dequeue()
        self.report.waiting_cpu_ns += time.process_time_ns() - cpu_ns
        self.report.waiting_ns += time.monotonic_ns() - started_ns
        if isinstance(message, Restart):
            raise Restarted(message)
        return message
