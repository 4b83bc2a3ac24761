"""The scheduler's side: sends each decision to the crew, and combines the answers."""

import time
from collections.abc import Callable, Iterator

from .batching import Batcher, Decision, Request
from .crew import Crew, WorkerDied
from .model import ModelConfig, combine, elect
from .progress import Progress
from .worker import Ballot


class Engine:
    """A crew of workers that computes one step at a time."""

    def __init__(self, config: ModelConfig, crew: Crew) -> None:
        """Use a crew that is ready, and whose workers hold the shards of that model."""
        self.crew = crew
        self._config = config

    def step(self, decision: Decision) -> list[Ballot]:
        """Compute one decision; returns the ballots of all workers, by rank.

        Raises `WorkerDied` if a worker dies, within a second if it was on this host.
        """
        crew = self.crew
        if crew.images is not None:
            decision["images"] = crew.images.take_references()
        decision["sent_ns"] = time.monotonic_ns()
        try:
            crew.send(decision)
        except WorkerDied:
            if crew.images is not None:
                crew.images.put_back(decision["images"])
            raise
        # The scheduler stands in for the GPUs' all-reduce.
        for _ in range(self._config.layers):
            crew.send(combine(crew.gather()))
        return crew.gather()

    def generate(
        self,
        batcher: Batcher,
        progress: Progress,
        replace: Callable[[WorkerDied], None] | None = None,
    ) -> Iterator[None]:
        """Run all requests to their end as they arrive; yields after each step.

        If a worker dies, `replace` must start another one in its place. All workers then compute
        again what was in their caches.
        """
        progress.start()
        while True:
            decided = progress.elapsed()
            decision = batcher.decide(decided, self._admit)
            if decision is not None:
                try:
                    ballots = self.step(decision)
                except WorkerDied as death:
                    if replace is None:
                        raise
                    replace(death)
                    batcher.restart()
                    continue
                new = batcher.accept(decision, elect([ballot.votes for ballot in ballots]))
                progress.latencies.extend(ballot.latency_ns / 1e9 for ballot in ballots)
                progress.note_step(decided, decision, new, batcher)
                yield
            elif batcher.next_arrival is not None:
                self.crew.rest(progress.started + batcher.next_arrival)
            else:
                return

    def _admit(self, number: int, request: Request) -> bool:
        if request.image is None:
            return True
        if self.crew.images is None:
            raise ValueError(f"request {number} has an image, and this engine has no store")
        return self.crew.images.refer(number, request.image)
