"""Continuous batching: which sequences run in the next step, with which tokens, in which blocks.

Nothing here knows about processes, queues, stores or clocks.
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
"""A newline ends a prompt in the prompts file; a generated newline ends its sequence."""

SLICE_STEPS = 4
"""Every this many steps, sequences without blocks on the device move ahead of the others."""

Run = tuple[int, int, bytes]
"""One sequence's share of a step: its number, the position of the first token, the tokens."""


ImageReference = tuple[int, int, int]
"""An image that a sequence needs: the sequence's number, then address and id in the store."""


class Decision(TypedDict):
    """The message to all workers at each step: a few hundred bytes of plain data.

    Plain, because pickling instances of a class would cost as much as everything else together.
    """

    step: int
    sent_ns: int
    """`time.monotonic_ns()` just before the broadcast; the clock is the same in all processes."""
    run: list[Run]
    tables: list[list[int]]
    """For each run, the device blocks that hold the sequence's tokens, including this step's."""
    swap_out: list[Pair]
    """Blocks to copy from the device to the offload region, before anything else."""
    swap_in: list[Pair]
    """Blocks to copy back, after `swap_out`."""
    drop: list[int]
    """Finished sequences, which the workers may forget."""
    images: list[ImageReference]
    """Images of the sequences that join in this step. The pixels stay in the store."""


@dataclass(frozen=True)
class Request:
    """A non-empty prompt, and how many tokens to generate."""

    prompt: bytes
    """With an image, it begins with `images.PLACEHOLDERS`."""
    new_tokens: int
    """Tokens to generate; an upper bound if `may_end_early`."""
    arrival: float = 0.0
    """Seconds from the start of the run; the engine ignores the request until then."""
    may_end_early: bool = True
    """Whether `END_OF_TEXT` ends it. A trace specifies the length of each answer."""
    image: Image | None = None

    @property
    def most_computed(self) -> int:
        """The most tokens it may have in the caches. The last token is generated but never run."""
        return len(self.prompt) + self.new_tokens - 1


@dataclass
class Sequence:
    """A request and its tokens so far, of which `computed` are in the workers' caches."""

    request: Request
    tokens: bytearray
    computed: int = 0
    has_restarted: bool = False

    @property
    def new_tokens(self) -> int:
        """How many tokens there are after the prompt."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing left to generate."""
        ended = self.request.may_end_early and self.tokens[-1] == END_OF_TEXT
        return self.new_tokens > 0 and (ended or self.new_tokens == self.request.new_tokens)


class Counts(NamedTuple):
    """Number of requests in each state."""

    to_come: int
    waiting: int
    """Arrived, but not in the batch yet."""
    running: int
    paused: int
    finished: int


Admit = Callable[[int, Request], bool]
"""Called when it is the turn of that request to join; returns whether it may join now."""


def admit_all(_number: int, _request: Request) -> bool:
    """Let every request join when it is its turn."""
    return True


class Batcher:
    """A sequence is at work from when it joins the batch until it is finished.

    Prefill and decode are the same here: a sequence runs the tokens that are not computed yet.
    These are its prompt, piece by piece, then the tokens that were generated, one by one. Where a
    prompt is split depends only on its length, so its result does not depend on other sequences,
    nor on whether it runs for the first time.

    If not all sequences at work fit the device's blocks, some are paused. They take turns.
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

        Up to `max_batch` sequences are at work at a time. A step runs at most `max_step_tokens`
        tokens, and a quarter of that from one prompt. Without `pools`, all fit on the device.
        """
        self.sequences = [Sequence(request, bytearray(request.prompt)) for request in requests]
        self.blocks = BlockTables(pools or pools_for(requests, max_batch, offload=False))
        self._max_batch = max_batch
        self._max_step_tokens = max_step_tokens
        self._chunk_tokens = max(1, max_step_tokens // 4)
        self._waiting = deque(range(len(self.sequences)))
        self._at_work: list[int] = []
        """The front runs first."""
        self._finished: list[int] = []
        """Finished since the last decision."""
        self._finished_ever = 0
        self._paused = 0
        self._step = 0

    @property
    def joined(self) -> int:
        """How many requests have been started; they join in the order of their arrivals."""
        return len(self.sequences) - len(self._waiting)

    @property
    def next_arrival(self) -> float | None:
        """Arrival of the next request that has not been started; None if all have been."""
        return self.sequences[self._waiting[0]].request.arrival if self._waiting else None

    def counts(self, elapsed: float) -> Counts:
        """Count the requests `elapsed` seconds after the start; any thread may call this."""
        # Read the last states of a request first, so that no difference is negative.
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

        A request that is not admitted waits for the next step, and so do all behind it.
        Returns None if there is nothing to run before the next arrival, or ever.
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
        """Take the token elected for each run; returns how many sequences got a new token.

        The token of a run that ended inside its prompt is ignored: the next token is known.
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

    def restart(self) -> None:
        """Begin again with every sequence at work, but keep its tokens: the caches are lost."""
        for number in self._at_work:
            self.sequences[number].computed = 0
            self.sequences[number].has_restarted = True
        self._waiting.extendleft(sorted(self._at_work, reverse=True))
        self._at_work, self._finished, self._paused = [], [], 0
        self.blocks.clear()

    def _take_turns(self) -> None:
        """Move sequences without blocks to the front from time to time, so that none starves."""
        if self._step % SLICE_STEPS == 0:
            self._at_work.sort(key=self.blocks.is_on_device)  # stable

    def _choose(self) -> list[Run]:
        """Choose runs from the front that fit the step; stop when the device is full."""
        run: list[Run] = []
        room, blocks = self._max_step_tokens, self.blocks.pools.device
        for number in self._at_work:
            sequence = self.sequences[number]
            at, prompt = sequence.computed, len(sequence.request.prompt)
            end = min(at + self._chunk_tokens, prompt) if at < prompt else at + 1
            tokens = bytes(sequence.tokens[at:end])
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
