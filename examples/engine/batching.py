"""Continuous batching: which sequences run in the next step, and with which tokens.

Nothing here knows of processes or queues. The engine and the reference run drive the same
`Batcher`, so they make the same decisions as long as they get the same tokens.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypedDict

END_OF_TEXT = ord("\n")
"""A generated newline ends a sequence, as a newline ends a prompt in the prompts file."""


Run = tuple[int, int, bytes]
"""One sequence's share of a step: its number, the position of the first token, the tokens."""


class Decision(TypedDict):
    """What every worker is told at every step: a few hundred bytes of plain data.

    Plain, because instances of a class would cost as much to pickle as everything else together.
    """

    step: int
    sent_ns: int
    """`time.monotonic_ns()` just before the broadcast; the clock is the same in all processes."""
    run: list[Run]
    drop: list[int]
    """Finished sequences, whose keys and values the workers may forget."""


@dataclass
class Sequence:
    """A prompt and what was generated from it. `computed` tokens are in the workers' caches."""

    prompt: bytes
    tokens: bytearray
    computed: int = 0

    @property
    def generated(self) -> bytes:
        """The tokens after the prompt."""
        return bytes(self.tokens[len(self.prompt) :])


class Batcher:
    """Sequences join whenever there is room in the batch, and leave when they are finished.

    Prefill and decode are the same thing here: a sequence runs the tokens that are not computed
    yet. That is a prompt (or as much of it as the step has room for) or the one token that the
    previous step generated.
    """

    def __init__(
        self, prompts: Iterable[bytes], *, new_tokens: int, max_batch: int, max_step_tokens: int
    ) -> None:
        """Queue the prompts, none empty. Each gets up to `new_tokens` tokens.

        A step runs up to `max_batch` sequences and `max_step_tokens` tokens in all.
        """
        self.sequences = [Sequence(prompt, bytearray(prompt)) for prompt in prompts]
        self._new_tokens = new_tokens
        self._max_batch = max_batch
        self._max_step_tokens = max_step_tokens
        self._waiting = deque(range(len(self.sequences)))
        self._running: list[int] = []
        self._finished: list[int] = []
        self._step = 0

    def decide(self) -> Decision | None:
        """Plan the next step; None when every sequence is finished. `accept` must follow."""
        while self._waiting and len(self._running) < self._max_batch:
            self._running.append(self._waiting.popleft())
        if not self._running:
            return None
        run: list[Run] = []
        room = self._max_step_tokens
        for number in self._running:  # the oldest first: none can starve
            sequence = self.sequences[number]
            tokens = bytes(sequence.tokens[sequence.computed : sequence.computed + room])
            if tokens:
                run.append((number, sequence.computed, tokens))
                room -= len(tokens)
        decision = Decision(step=self._step, sent_ns=0, run=run, drop=self._finished)
        self._step += 1
        self._finished = []
        return decision

    def accept(self, decision: Decision, next_tokens: list[int]) -> int:
        """Take the token that was elected for each run; returns how many were new.

        A run that stopped short of its prompt's end has none: there the next token is known.
        """
        new = 0
        for (number, _, computed), token in zip(decision["run"], next_tokens, strict=True):
            sequence = self.sequences[number]
            sequence.computed += len(computed)
            if sequence.computed < len(sequence.tokens):
                continue
            sequence.tokens.append(token)
            new += 1
            if token == END_OF_TEXT or len(sequence.generated) == self._new_tokens:
                self._running.remove(number)
                self._finished.append(number)
        return new
