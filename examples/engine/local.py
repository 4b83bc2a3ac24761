"""Workers on this host: they share its memory, so they have a store and an offload region, too."""

import multiprocessing
import secrets
from multiprocessing.connection import Connection
from pathlib import Path

from memlane import Handle, MessageQueue

from .crew import Crew, WorkerDied
from .image_store import ImageWriter
from .model import ModelConfig, block_bytes
from .offload import RegionPlan, RegionStart
from .paging import Pools
from .worker import CHUNK_BYTES, START_SECONDS, Assignment, Ready, run_worker


class LocalCrew(Crew):
    """N worker processes on this host.

    If there are images, one store has them for all. If the device's blocks may not do, the workers
    have an offload region, which they make among themselves: the scheduler only says what goes
    where.
    """

    def __init__(
        self, config: ModelConfig, workers: int, pools: Pools, store_bytes: int = 0
    ) -> None:
        """Start the workers and wait until all are connected.

        `pools` must be those of the `Batcher` that is to decide. `store_bytes` is the size of the
        store for images; 0 is for none.
        """
        super().__init__(
            MessageQueue(workers, workers, max_chunk_bytes=CHUNK_BYTES),
            ImageWriter(store_bytes, workers) if store_bytes else None,
        )
        self.segments: list[str] = []
        """Names of all shared memory. The queues' are gone from /dev/shm once all are ready, the
        store's when the crew is let go; the region's once all workers have mapped it."""
        self.region: RegionPlan | None = None
        if pools.region:
            instance, cell_bytes = secrets.token_hex(16), block_bytes(config, workers)
            self.region = RegionPlan(instance, pools.region, workers, cell_bytes)
        self.region_starts: list[RegionStart] = []
        """By rank; empty without a region."""
        self._note_segment(self.broadcast.export_handle())
        if self.images is not None:
            self.segments.append(self.images.handle().ring_buffer_handle[1])
        try:
            pipes = [self._spawn(config, rank, workers, pools.device) for rank in range(workers)]
            for rank, pipe in enumerate(pipes):
                self._connect(rank, pipe)
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _spawn(self, config: ModelConfig, rank: int, workers: int, blocks: int) -> Connection:
        """Start one worker; that it is `Ready` will come through the returned pipe."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        broadcast = self.broadcast.export_handle(rank)
        images = None if self.images is None else self.images.handle()
        assignment = Assignment(config, rank, workers, blocks, broadcast, images, self.region)
        process = context.Process(
            target=run_worker,
            args=(assignment, theirs),
            name=f"worker-{rank}",
        )
        process.start()
        theirs.close()  # so that the pipe ends with the worker
        self.processes[rank] = process
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
        self.answers[rank] = MessageQueue.create_from_handle(ready.answers, 0)
        if ready.region is not None:
            self.region_starts.append(ready.region)
            if (name := Path(ready.region.path).name) not in self.segments:
                self.segments.append(name)

    def _note_segment(self, handle: Handle) -> None:
        if handle.buffer_handle is not None:
            self.segments.append(handle.buffer_handle[3])
