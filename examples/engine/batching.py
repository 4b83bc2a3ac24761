"""Continuous batching: which sequences run in the next step, and with which tokens.

Nothing here knows of processes, queues, stores or clocks. The engine and the reference run drive
the same `Batcher`, so they make the same decisions as long as they get the same tokens, and let
the same requests join.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

from .images import Image

END_OF_TEXT = ord("\n")
"""As a newline ends a prompt in the prompts file, a generated one ends its sequence."""


Run = tuple[int, int, bytes]
"""One sequence's share of a step: its number, the position of the first token, the tokens."""


ImageReference = tuple[int, int, int]
"""An image that a sequence needs: the sequence's number, then address and id in the store."""


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
    images: list[ImageReference]
    """Of the sequences that join in this step. The pixels are in the store, and not sent."""


@dataclass(frozen=True)
class Request:
    """What somebody asks for: a prompt, not empty, and how much shall follow it."""

    prompt: bytes
    """With an image it begins with `images.PLACEHOLDERS`."""
    new_tokens: int
    """Tokens to generate; at most so many if `may_end_early`."""
    arrival: float = 0.0
    """Seconds from the start of the run; before that nobody knows of it."""
    may_end_early: bool = True
    """Whether `END_OF_TEXT` ends it. In a trace it is known how long each answer was."""
    image: Image | None = None


@dataclass
class Sequence:
    """A request and what was generated for it. `computed` tokens are in the workers' caches."""

    request: Request
    tokens: bytearray
    computed: int = 0

    @property
    def new_tokens(self) -> int:
        """How many tokens there are after the prompt."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is to be generated any more."""
        ended = self.request.may_end_early and self.tokens[-1] == END_OF_TEXT
        return self.new_tokens > 0 and (ended or self.new_tokens == self.request.new_tokens)


class Counts(NamedTuple):
    """How many requests are where."""

    to_come: int
    waiting: int
    """They have arrived, and there is no room in the batch yet."""
    running: int
    finished: int


Admit = Callable[[int, Request], bool]
"""Asked for the request of that number when it is its turn to join: has it all that it needs?"""


def admit_all(_number: int, _request: Request) -> bool:
    """Let every request join when it is its turn."""
    return True


class Batcher:
    """Sequences join whenever there is room in the batch, and leave when they are finished.

    Prefill and decode are the same thing here: a sequence runs the tokens that are not computed
    yet. That is a prompt (or as much of it as the step has room for) or the one token that the
    previous step generated.
    """

    def __init__(
        self, requests: Iterable[Request], *, max_batch: int, max_step_tokens: int
    ) -> None:
        """Take the requests, in the order of their arrivals.

        A step runs up to `max_batch` sequences and `max_step_tokens` tokens in all.
        """
        self.sequences = [Sequence(request, bytearray(request.prompt)) for request in requests]
        self._max_batch = max_batch
        self._max_step_tokens = max_step_tokens
        self._waiting = deque(range(len(self.sequences)))
        self._running: list[int] = []
        self._finished: list[int] = []
        """Since the last decision."""
        self._finished_ever = 0
        self._step = 0

    @property
    def joined(self) -> int:
        """How many requests have been started; they join in the order of their arrivals."""
        return len(self.sequences) - len(self._waiting)

    @property
    def next_arrival(self) -> float | None:
        """When the first of those arrives that do not run yet; None if all do or did."""
        return self.sequences[self._waiting[0]].request.arrival if self._waiting else None

    def counts(self, elapsed: float) -> Counts:
        """Count the requests `elapsed` seconds after the start; any thread may ask."""
        # Where requests get last is looked at first, so that no difference is negative.
        finished = self._finished_ever
        started = self.joined
        arrived = bisect_right(self.sequences, elapsed, key=lambda one: one.request.arrival)
        arrived = max(arrived, started)
        return Counts(
            to_come=len(self.sequences) - arrived,
            waiting=arrived - started,
            running=started - finished,
            finished=finished,
        )

    def decide(self, elapsed: float, admit: Admit = admit_all) -> Decision | None:
        """Plan the step that starts `elapsed` seconds after the start; `accept` must follow.

        Who is not admitted waits for the next step, and so does everybody behind.
        None when there is nothing to run before the next arrival, if there is one.
        """
        while (
            len(self._running) < self._max_batch
            and (arrival := self.next_arrival) is not None
            and arrival <= elapsed
            and admit(self._waiting[0], self.sequences[self._waiting[0]].request)
        ):
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
        decision = Decision(step=self._step, sent_ns=0, run=run, drop=self._finished, images=[])
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
            if sequence.is_finished:
                self._running.remove(number)
                self._finished.append(number)
                self._finished_ever += 1
        return new
