"""Plans the measurements by importance, and what is left out if time is short. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.gpu.device import TO_DEVICE, TO_HOST

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DIRECTIONS = {TO_DEVICE: "host to GPU", TO_HOST: "GPU to host"}
# Seconds that one block and one byte of a move take all ways together, for a first estimate.
BLOCK_SECONDS, BYTE_SECONDS = 2e-5, 2e-9


@dataclass(frozen=True)
class Scale:
    """The sizes of a run: those of a GPU, or small ones for a dry run."""

    sizes: tuple[int, ...]  # bytes of a block
    counts: tuple[int, ...]  # blocks; of each size at most so many as `moved` bytes have
    moved: int
    ceiling: int  # bytes of the one copy beside which all is shown
    registered: int  # bytes of each kind of memory
    pieces: int  # bytes of a region that is registered in sixteen pieces
    product: tuple[int, int]  # side of the matrices, number of products
    rounds: int


FULL = Scale(
    sizes=tuple(size * KIB for size in (1, 4, 8, 16, 32, 64, 256, 1024, 4096)),
    counts=(16, 256, 4096, 100_000),
    moved=512 * MIB,
    ceiling=GIB,
    registered=4 * GIB,
    pieces=16 * GIB,
    product=(8192, 100),
    rounds=3,
)
DRY = Scale(
    sizes=(KIB, 4 * KIB, 32 * KIB),
    counts=(4, 16),
    moved=128 * KIB,
    ceiling=256 * KIB,
    registered=256 * KIB,
    pieces=MIB,
    product=(16, 2),
    rounds=2,
)


@dataclass(frozen=True)
class Step:
    """One measurement: a `kind` of it, of blocks of a size, their count and direction."""

    kind: str  # "move", "rows", "beside a matmul", "registration" or "pieces"
    direction: int = 0
    size: int = 0
    count: int = 0
    seconds: float = 30.0  # an estimate

    @property
    def name(self) -> str:
        if not self.direction:
            return self.kind
        return f"{self.kind}: {self.count} of {shown(self.size)}, {DIRECTIONS[self.direction]}"


def shown(nbytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def steps(scale: Scale) -> list[Step]:
    """First what the bars need: the pieces, and the most blocks of each size."""
    most: list[Step] = []
    others: list[Step] = []
    for size in scale.sizes:
        fitting = [min(count, scale.moved // size) for count in scale.counts]
        for count in sorted(set(fitting)):
            seconds = 0.1 + (scale.rounds + 2) * count * (BLOCK_SECONDS + size * BYTE_SECONDS)
            for direction in DIRECTIONS:
                step = Step("move", direction, size, count, seconds)
                (most if count == max(fitting) else others).append(step)
    rows = [
        Step("rows", direction, size, min(4096, scale.moved // size), 1.0)
        for size in scale.sizes
        for direction in DIRECTIONS
    ]
    beside = [
        Step("beside a matmul", direction, size, min(4096, scale.moved // size), 6.0)
        for size in (4 * KIB, 32 * KIB)
        for direction in DIRECTIONS
    ]
    most.sort(key=lambda step: step.count)  # calls for 100,000 blocks last: they could fail
    return [Step("pieces"), *most, Step("registration"), *rows, *beside, *others]


@dataclass
class Plan:
    """Hands out steps while they fit before `until`, by estimates that learn from those done."""

    left: list[Step]
    until: float
    dropped: list[Step] = field(default_factory=list)
    _estimated: float = 0.0
    _taken: float = 0.0

    def next(self, now: float) -> Step | None:
        """The next step that fits; those that do not are dropped."""
        slowness = max(1.0, self._taken / self._estimated) if self._estimated else 1.0
        while self.left:
            step = self.left.pop(0)
            if now + step.seconds * slowness <= self.until:
                return step
            self.dropped.append(step)
        return None

    def took(self, step: Step, seconds: float) -> None:
        self._estimated += step.seconds
        self._taken += seconds
