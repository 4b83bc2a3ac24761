"""Continuous batching: which sequences run in the next step, with which tokens, in which blocks.

Nothing here knows of processes, queues, stores or clocks.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

from .images import Image
from .paging import BlockTables, Pair, Pools, blocks_of, plan_pools

END_OF_TEXT = ord("\n")
"""As a newline ends a prompt in the prompts file, a generated one ends its sequence."""

SLICE_STEPS = 4
"""After so many steps those on the device make room for those who are not, if they must."""

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
    tables: list[list[int]]
    """For each run the blocks on the device that have the sequence's tokens, those of this step
    included."""
    swap_out: list[Pair]
    """Blocks to be copied from the device to the offload region, before anything else."""
    swap_in: list[Pair]
    """Blocks to be copied back, after that."""
    drop: list[int]
    """Finished sequences, which the workers may forget."""
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

    @property
    def most_computed(self) -> int:
        """How many tokens it may come to in the caches. The last one is generated and never run."""
        return len(self.prompt) + self.new_tokens - 1


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
    paused: int
    finished: int


Admit = Callable[[int, Request], bool]
"""Asked for the request of that number when it is its turn to join: has it all that it needs?"""


def admit_all(_number: int, _request: Request) -> bool:
    """Let every request join when it is its turn."""
    return True


class Batcher:
    """Sequences are at work from when there is room in the batch until they are finished.

    Prefill and decode are the same thing here: a sequence runs the tokens that are not computed
    yet. That is a prompt, chunk by chunk, or the one token that the previous step generated. Where
    a prompt is cut depends on nothing but its length, so neither does what is computed for it.

    If not all who are at work fit the device's blocks, some are paused. They take turns.
    """

    def __init__(
        self,
        requests: SequenceOf[Request],
        *,
        max_batch: int,
        max_step_tokens: int,
        pools: Pools | None = None,
    ) -> None:
        """Take the requests, in the order of their arrivals.

        Up to `max_batch` sequences are at work at a time. A step runs `max_step_tokens` tokens at
        most, of one prompt a quarter of that. None as pools is for a device with room for all.
        """
        self.sequences = [Sequence(request, bytearray(request.prompt)) for request in requests]
        self.blocks = BlockTables(pools or pools_for(requests, max_batch, offload=False))
        self._max_batch = max_batch
        self._max_step_tokens = max_step_tokens
        self._chunk_tokens = max(1, max_step_tokens // 4)
        self._waiting = deque(range(len(self.sequences)))
        self._at_work: list[int] = []
        """Those at the front run first."""
        self._finished: list[int] = []
        """Since the last decision."""
        self._finished_ever = 0
        self._paused = 0
        self._step = 0

    @property
    def joined(self) -> int:
        """How many requests have been started; they join in the order of their arrivals."""
        return len(self.sequences) - len(self._waiting)

    @property
    def next_arrival(self) -> float | None:
        """When the first of those arrives that are not at work yet; None if all are or were."""
        return self.sequences[self._waiting[0]].request.arrival if self._waiting else None

    def counts(self, elapsed: float) -> Counts:
        """Count the requests `elapsed` seconds after the start; any thread may ask."""
        # Where requests get last is looked at first, so that no difference is negative.
        finished = self._finished_ever
        paused = self._paused
        started = self.joined
        arrived = bisect_right(self.sequences, elapsed, key=lambda one: one.request.arrival)
        arrived = max(arrived, started)
        return Counts(
            to_come=len(self.sequences) - arrived,
            waiting=arrived - started,
            running=started - finished - paused,
            paused=paused,
            finished=finished,
        )

    def decide(self, elapsed: float, admit: Admit = admit_all) -> Decision | None:
        """Plan the step that starts `elapsed` seconds after the start; `accept` must follow.

        Who is not admitted waits for the next step, and so does everybody behind.
        None when there is nothing to run before the next arrival, if there is one.
        """
        while (
            len(self._at_work) < self._max_batch
            and (arrival := self.next_arrival) is not None
            and arrival <= elapsed
            and admit(self._waiting[0], self.sequences[self._waiting[0]].request)
        ):
            self._at_work.append(self._waiting.popleft())
        if not self._at_work:
            return None
        self._take_turns()
        run = self._choose()
        ends = {number: position + len(tokens) for number, position, tokens in run}
        others = [number for number in reversed(self._at_work) if number not in ends]
        moves = self.blocks.make_room(ends, others)
        self._paused = sum(map(self.blocks.is_paused, self._at_work))
        decision = Decision(
            step=self._step,
            sent_ns=0,
            run=run,
            tables=[self.blocks.table(number) for number in ends],
            swap_out=moves.swap_out,
            swap_in=moves.swap_in,
            drop=self._finished,
            images=[],
        )
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
                self._at_work.remove(number)
                self.blocks.drop(number)
                self._finished.append(number)
                self._finished_ever += 1
        return new

    def _take_turns(self) -> None:
        """Let who has no blocks go first, if the others have had their steps: none can starve."""
        if self._step % SLICE_STEPS == 0:
            self._at_work.sort(key=self.blocks.is_on_device)  # which is stable

    def _choose(self) -> list[Run]:
        """Fill the step and the device from the front. Where the device is full it ends."""
        run: list[Run] = []
        room, blocks = self._max_step_tokens, self.blocks.pools.device
        for number in self._at_work:
            sequence = self.sequences[number]
            at = sequence.computed
            tokens = bytes(sequence.tokens[at : at + self._chunk_tokens])
            blocks -= blocks_of(at + len(tokens))
            if blocks < 0:
                break
            if len(tokens) <= room:
                run.append((number, at, tokens))
                room -= len(tokens)
        return run


def pools_for(
    requests: SequenceOf[Request], max_batch: int, *, device: int | None = None, offload: bool
) -> Pools:
    """Return pools for a `Batcher` of these requests, as `plan_pools` does."""
    return plan_pools([one.most_computed for one in requests], max_batch, device, offload)
