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
from .paging import BLOCK_SIZE, BlockCache, BlockTables, Pair, Pools, blocks_of, keys_of, plan_pools

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
    """Device blocks to copy to rows of the offload region, before anything else."""
    swap_in: list[Pair]
    """Rows to copy back to device blocks, after `swap_out`."""
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
    """True if `END_OF_TEXT` ends it. A trace specifies the length of each answer."""
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
    reached: int = 0
    """The number of tokens when it was on a device last; a paused sequence looks for them."""
    owed: int = 0
    """The number of tokens when some were lost: it is not paused for others before it has them."""
    has_run: bool = False
    has_restarted: bool = False

    @property
    def new_tokens(self) -> int:
        """The number of tokens after the prompt."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_finished(self) -> bool:
        """True if there is nothing left to generate."""
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


@dataclass
class Finds:
    """Blocks that sequences found in the cache when they went to the device, and did not find."""

    returned: int = 0
    """Blocks of paused sequences."""
    lost: int = 0
    """Blocks of paused sequences that were lost, and computed again."""
    prefix: int = 0
    """Blocks of requests that begin as others did."""


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

    If not all sequences at work fit the device's blocks, some are paused. They take turns. With a
    cache, each block is saved once it is full, so that little is left to do for a pause, and a
    request that begins as another one did starts where they part. What the cache has lost is
    computed again, in the same pieces.
    """

    def __init__(
        self,
        requests: SequenceOf[Request],
        *,
        max_batch: int,
        max_step_tokens: int,
        pools: Pools | None = None,
        cache: BlockCache | None = None,
    ) -> None:
        """Take the requests, in the order of their arrivals.

        Up to `max_batch` sequences are at work at a time. A step runs at most `max_step_tokens`
        tokens, and a quarter of that from one prompt. Without `pools`, all fit on the device.
        """
        self.sequences = [Sequence(request, bytearray(request.prompt)) for request in requests]
        self.blocks = BlockTables(pools or pools_for(requests, max_batch, offload=False))
        self.cache = cache
        self.finds = Finds()
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
        self._filled: dict[bytes, int] = {}
        """Keys and device blocks of what is to be saved."""
        self._step = 0

    @property
    def joined(self) -> int:
        """The number of requests that have been started; they join in the order of their
        arrivals."""
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
        run, found = self._choose()
        ends = {number: position + len(tokens) for number, position, tokens in run}
        others = [number for number in reversed(self._at_work) if number not in ends]
        for number, table in self.blocks.make_room(ends, others).items():
            self._fill(
                number, table, range(self.sequences[number].computed // BLOCK_SIZE, len(table))
            )
        self._paused = sum(
            not self.blocks.is_on_device(number) and self.sequences[number].reached > 0
            for number in self._at_work
        )
        decision = Decision(
            step=self._step,
            sent_ns=0,
            run=run,
            tables=[self.blocks.table(number) for number in ends],
            swap_out=self._save(),
            swap_in=[
                pair
                for number in ends
                for pair in zip(found.get(number, ()), self.blocks.table(number), strict=False)
            ],
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
            before = sequence.computed // BLOCK_SIZE
            sequence.computed += len(computed)
            sequence.reached = sequence.computed
            full = range(before, sequence.computed // BLOCK_SIZE)
            self._fill(number, self.blocks.table(number), full)
            if sequence.computed < len(sequence.tokens):
                continue
            sequence.tokens.append(token)
            new += 1
            if sequence.is_finished:
                self._at_work.remove(number)
                self.blocks.drop(number)
                self._finished.append(number)
                self._finished_ever += 1
        if self.cache is not None:
            self.cache.settle()
        return new

    def restart(self) -> None:
        """Begin again with every sequence at work, but keep its tokens: the devices' blocks are
        lost."""
        for number in self._at_work:
            self.sequences[number].computed = 0
            self.sequences[number].has_restarted = True
        self._waiting.extendleft(sorted(self._at_work, reverse=True))
        self._at_work, self._finished, self._paused = [], [], 0
        self._filled = {}
        self.blocks.clear()

    def _take_turns(self) -> None:
        """Move sequences without blocks to the front from time to time, so that none starves."""
        if self._step % SLICE_STEPS == 0:
            self._at_work.sort(key=self._has_had_its_turn)  # stable
        elif self.cache is not None and self._step % SLICE_STEPS == SLICE_STEPS - 1:
            for number in self._at_work:
                if not self.blocks.is_on_device(number):
                    self.cache.prefetch(self._keys(number, self._wanted(number)))

    def _has_had_its_turn(self, number: int) -> bool:
        sequence = self.sequences[number]
        # It must have got further than it was, or it would lose and compute the same for ever.
        has_got_on = sequence.owed == 0 or sequence.computed > sequence.owed
        return self.blocks.is_on_device(number) and has_got_on

    def _choose(self) -> tuple[list[Run], dict[int, list[int]]]:
        """Choose runs from the front that fit the step; stop when the device is full. Also returns
        the rows of the region from which sequences come to the device."""
        run: list[Run] = []
        found: dict[int, list[int]] = {}
        room, blocks = self._max_step_tokens, self.blocks.pools.device
        for number in self._at_work:
            sequence = self.sequences[number]
            if not self.blocks.is_on_device(number):
                found[number] = self._find(number)
                if run and sequence.computed < sequence.reached:
                    continue  # the region may have no room for its blocks beside those of others
            at, prompt = sequence.computed, len(sequence.request.prompt)
            end = min(at + self._chunk_tokens, prompt) if at < prompt else at + 1
            tokens = bytes(sequence.tokens[at:end])
            blocks -= blocks_of(at + len(tokens))
            if blocks < 0:
                break
            if len(tokens) <= room:
                run.append((number, at, tokens))
                room -= len(tokens)
                self._count(number, len(found.get(number, ())))
        return run, found

    # The cache

    def _shared(self, number: int) -> int:
        """Return how many tokens of a prompt are computed as in any other that begins with them."""
        return len(self.sequences[number].request.prompt) // self._chunk_tokens * self._chunk_tokens

    def _wanted(self, number: int) -> int:
        """Return how many tokens a sequence without blocks looks for. The last piece of a prompt
        must run: it elects the first token."""
        sequence = self.sequences[number]
        last = (len(sequence.request.prompt) - 1) // self._chunk_tokens * self._chunk_tokens
        return sequence.reached or last

    def _keys(self, number: int, tokens: int) -> list[bytes]:
        sequence = self.sequences[number]
        image, prompt = sequence.request.image, sequence.request.prompt
        name = "" if image is None else image.key
        return keys_of(name, bytes(sequence.tokens[:tokens]), self._shared(number), len(prompt))

    def _find(self, number: int) -> list[int]:
        """Return the rows of a sequence's first blocks, which are `computed` again then."""
        sequence = self.sequences[number]
        wanted = self._wanted(number)
        rows = [] if self.cache is None else self.cache.find(self._keys(number, wanted))
        tokens = min(wanted, len(rows) * BLOCK_SIZE)
        if tokens < min(wanted, len(sequence.request.prompt)):  # a prompt runs in whole pieces
            tokens = tokens // self._chunk_tokens * self._chunk_tokens
        sequence.computed = tokens
        return rows[: blocks_of(tokens)]

    def _count(self, number: int, found: int) -> None:
        sequence = self.sequences[number]
        if self.blocks.is_on_device(number):
            return
        if sequence.reached:
            self.finds.returned += found
            self.finds.lost += blocks_of(sequence.reached) - found
            sequence.owed = sequence.reached
        else:
            self.finds.prefix += found

    def _fill(self, number: int, table: list[int], places: range) -> None:
        """Save these blocks of a sequence in the next step, unless nobody will look for them."""
        if self.cache is None or not places:
            return
        sequence = self.sequences[number]
        keys = self._keys(number, sequence.computed)
        for place in places:
            self._filled[keys[place]] = table[place]

    def _save(self) -> list[Pair]:
        if self.cache is None or not self._filled:
            return []
        rows = self.cache.save([*self._filled])
        pairs = [(self._filled[key], row) for key, row in rows.items()]
        self._filled = {}
        return pairs


def pools_for(
    requests: SequenceOf[Request],
    max_batch: int,
    *,
    offload: bool,
    device: int | None = None,
    region: int | None = None,
) -> Pools:
    """Return pools for a `Batcher` of these requests, as `plan_pools` does."""
    lengths = [one.most_computed for one in requests]
    return plan_pools(lengths, max_batch, device, offload, region)
