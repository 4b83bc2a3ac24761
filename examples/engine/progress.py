"""Counters of a run: the scheduler writes them, the live view and the summary read them."""

import time
from array import array

from .batching import Batcher, Decision


class Progress:
    """Clock and counters of one run; all times are in seconds.

    One thread writes. Others may read at any time: everything only grows.
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
        """Per step and worker, the latency of the decision: from just before the scheduler's
        `enqueue` until the worker's `dequeue` returned it."""
        self.queued = array("d")
        """Per request that was started, the time from its arrival to its first step."""
        self.first_tokens = array("d")
        """Per request, the time from its arrival to its first token."""

    def start(self) -> None:
        """Start the clock: the first request may arrive now."""
        self.started = time.monotonic()

    def elapsed(self) -> float:
        """Return the time since the start."""
        return time.monotonic() - self.started

    def note_step(self, decided: float, decision: Decision, new: int, batcher: Batcher) -> None:
        """Count a step that was decided at `decided` and has just generated `new` tokens."""
        now = self.elapsed()
        for number, _, tokens in decision["run"]:
            sequence = batcher.sequences[number]
            self.computed_tokens += len(tokens)
            if sequence.has_restarted:
                continue
            if not sequence.has_run:
                sequence.has_run = True
                self.queued.append(decided - sequence.request.arrival)
            if sequence.new_tokens == 1:
                self.first_tokens.append(now - sequence.request.arrival)
        self.tokens += new
        self.steps.append(now - decided)
