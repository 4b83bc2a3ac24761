"""What has happened so far in a run: counted by the scheduler, read by live view and summary."""

import time
from array import array

from .batching import Batcher, Decision


class Progress:
    """Clock and counters of one run; all times are in seconds.

    One thread writes. Others may look at any time: everything only ever grows.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self.started = time.monotonic()
        self.tokens = 0
        """Generated so far."""
        self.computed_tokens = 0
        """Run through the model so far, prompts included."""
        self.steps = array("d")
        """Per step, how long it took: from the decision until its tokens were elected."""
        self.latencies = array("d")
        """Per step and worker, how long the decision was on its way: from just before the
        scheduler's `enqueue` until the worker's `dequeue` returned it."""
        self.queued = array("d")
        """Per request that was started, how long it waited for its first step since it arrived."""
        self.first_tokens = array("d")
        """Per request, when its first token was there, counted from its arrival."""

    def start(self) -> None:
        """Start the clock: the first request may arrive now."""
        self.started = time.monotonic()

    def elapsed(self) -> float:
        """Return the time since the start."""
        return time.monotonic() - self.started

    def note_step(self, decided: float, decision: Decision, new: int, batcher: Batcher) -> None:
        """Count a step that was decided at `decided` and gave `new` tokens just now."""
        now = self.elapsed()
        for number, position, tokens in decision["run"]:
            sequence = batcher.sequences[number]
            self.computed_tokens += len(tokens)
            if position == 0:
                self.queued.append(decided - sequence.request.arrival)
            if sequence.new_tokens == 1:
                self.first_tokens.append(now - sequence.request.arrival)
        self.tokens += new
        self.steps.append(now - decided)
