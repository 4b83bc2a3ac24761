"""Offload in the demo: blocks go to the region and back without changing a token."""

import random
import re
from collections.abc import Callable
from contextlib import ExitStack, closing
from multiprocessing import Pipe
from pathlib import Path

import pytest

from engine import worker
from engine.backing import Backing
from engine.batching import Batcher, Decision, Finds, Request, pools_for
from engine.model import Shard, block_bytes
from engine.offload import Offload, RegionPlan
from engine.paging import (
    BLOCK_SIZE,
    LEAST_REGION,
    BlockCache,
    Pools,
    PoolTooSmall,
    blocks_of,
    keys_of,
)
from engine.reference import run_reference
from memlane import MessageQueue
from tests.examples.demo import PROMPTS, complaints, run, write_prompts
from tests.examples.test_engine import CONFIG, compute
from tests.support.missing import package
from tests.support.redis_servers import REFUSAL, RedisServer
from tests.support.regions import new_id

WORKERS = 3
"""Eight heads: not all workers hold as many."""
AT_WORK = 4
REQUESTS = [Request(prompt * 3, 40, may_end_early=False) for prompt in PROMPTS]
ENOUGH = pools_for(REQUESTS, AT_WORK, offload=False).device
LONGEST = pools_for(REQUESTS, 1, offload=False).device

IN_WORKER_1 = """
import multiprocessing, os, signal
import engine.offload

def {name}(*arguments, call=engine.offload.{name}, **more):
    if multiprocessing.current_process().name != "worker-1":
        return call(*arguments, **more)
    {deed}

engine.offload.{name} = {name}
"""
"""Runs in every process of the demo before anything else, as sitecustomize.py."""


def batcher(pools: Pools | None = None, cache: BlockCache | None = None) -> Batcher:
    return Batcher(REQUESTS, max_batch=AT_WORK, max_step_tokens=32, pools=pools, cache=cache)


def tokens_of(batches: Batcher) -> list[bytes]:
    return [bytes(sequence.tokens) for sequence in batches.sequences]


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    """The tokens that a single process generates with room for everything."""
    batches = batcher()
    run_reference(CONFIG, WORKERS, batches)
    return tokens_of(batches)


def offloading(
    device: int,
    see: Callable[[Decision, list[Shard]], None],
    tier: str | None = None,
) -> tuple[list[bytes], Finds]:
    """Generates with that many blocks, all workers in this process; `see` is called for moves."""
    pools = pools_for(REQUESTS, AT_WORK, device=device, offload=True)
    shards = [Shard(CONFIG, rank, WORKERS, device) for rank in range(WORKERS)]
    plan = RegionPlan(new_id(), pools.region, WORKERS, block_bytes(CONFIG, WORKERS))
    pairs = [0, 0]
    with ExitStack() as stack:
        backing = stack.enter_context(Backing(plan, tier, "a model of the tests"))
        batches = batcher(pools, backing)
        ends = [
            stack.enter_context(closing(Offload(plan, rank, shard.cache.blocks)))
            for rank, shard in enumerate(shards)
        ]
        while (step := batches.decide(0.0)) is not None:
            for end in ends:
                end.move(step)
            see(step, shards)
            pairs[0] += len(step["swap_out"])
            pairs[1] += len(step["swap_in"])
            batches.accept(step, compute(shards, step)[1])
        spare = pools.region // 4
        assert backing.statistics().pool.reserved == spare
    for end, shard in zip(ends, shards, strict=True):
        for count, calls in zip(pairs, (end.moved.swap_out, end.moved.swap_in), strict=True):
            assert sum(nbytes for nbytes, _ in calls) == count * shard.cache.blocks[0].nbytes
    assert bool(batches.blocks.pauses) == (device < ENOUGH)
    assert pairs[1] == batches.finds.returned + batches.finds.prefix
    assert batches.blocks.used == 0
    return tokens_of(batches), batches.finds


@pytest.mark.parametrize("device", [LONGEST, LONGEST + 3, ENOUGH * 2 // 3, ENOUGH])
def test_tokens_are_those_of_a_run_without_offload(device: int, expected: list[bytes]) -> None:
    tokens, finds = offloading(device, lambda _step, _shards: None)
    assert tokens == expected
    assert finds.lost <= finds.returned


@pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)
def test_blocks_of_another_run_are_not_computed_again(
    tmp_path: Path, expected: list[bytes]
) -> None:
    """A tier that outlives the engine: prompts are not computed twice, and the tokens are equal."""
    package("redis")
    prefixes = []
    with RedisServer(tmp_path / "redis") as server:
        for _ in range(2):
            tokens, finds = offloading(LONGEST, lambda _step, _shards: None, tier=server.url)
            assert tokens == expected
            prefixes.append(finds.prefix)
    assert prefixes[1] > prefixes[0]


def test_tokens_tell_of_a_block_that_came_back_wrong(expected: list[bytes]) -> None:
    """One wrong block, in one worker, once, changes the tokens."""
    harmed: list[int] = []

    def harm(step: Decision, shards: list[Shard]) -> None:
        if step["swap_in"] and not harmed:
            harmed.append(step["swap_in"][0][1])
            shards[1].cache.blocks[harmed[0]] *= -1

    assert offloading(LONGEST, harm)[0] != expected
    assert harmed


def told(output: str) -> tuple[float, float, int]:
    """GB out, GB back, number of calls."""
    moved = re.search(r"GB by all workers \(([\d.]+) out, ([\d.]+) back\)", output)
    calls = re.search(r"copy_blocks +(\d+) calls .*: p50 [\d.]+ GB/s, [\d.]+ GB/s over all", output)
    assert moved is not None
    assert calls is not None
    return float(moved[1]), float(moved[2]), int(calls[1])


def test_summary_tells_what_was_moved(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, [prompt * 4 for prompt in PROMPTS])
    arguments = ("--workers", "2", "--tokens", "20", "--prompts", prompts, "--images", "2")
    finished = run(*arguments, "--device-blocks", "10")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    out, back, calls = told(finished.stdout)
    assert min(out, back, calls) > 0
    assert "10 blocks of 16 tokens on each device" in finished.stdout
    assert re.search(
        r"offload region .* cells of 24576 bytes, started in [\d.]+ s", finished.stdout
    )
    assert "nothing left of 5 segments" in finished.stdout
    assert "single process      the same tokens\n" in finished.stdout


def test_without_offload_there_is_no_region(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, PROMPTS)
    finished = run("--workers", "1", "--tokens", "4", "--prompts", prompts, "--no-offload")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "region" not in finished.stdout
    assert "moved" not in finished.stdout
    assert "nothing left of 3 segments" in finished.stdout
    assert "single process      the same tokens\n" in finished.stdout


def small(tmp_path: Path, name: str, deed: str) -> tuple[str, ...]:
    """Arguments for a run in which two sequences take turns, and worker 1 does that."""
    (tmp_path / "sitecustomize.py").write_text(IN_WORKER_1.format(name=name, deed=deed))
    prompts = write_prompts(tmp_path, [prompt * 4 for prompt in PROMPTS[:2]])
    return ("--workers", "2", "--tokens", "20", "--prompts", prompts, "--images", "0")


def test_check_fails_if_one_worker_gets_wrong_blocks_back(tmp_path: Path) -> None:
    deed = "arguments[1][arguments[2][0][1]] = 1; return call(*arguments[:2], arguments[2][1:])"
    finished = run(*small(tmp_path, "copy_blocks", deed), first=tmp_path)
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert re.search(r"single process +differs for requests \[", finished.stdout)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("copy_blocks", "died: "), ("SharedOffloadRegion", "died: killed by SIGKILL")],
)
def test_worker_that_dies_over_its_blocks_is_named(
    tmp_path: Path, name: str, complaint: str
) -> None:
    """It dies before it has joined the region, or in the middle of a step."""
    arguments = small(tmp_path, name, "os.kill(os.getpid(), signal.SIGKILL)")
    finished = run(*arguments, first=tmp_path)
    assert finished.returncode == 1
    *_, last = finished.stderr.splitlines()
    assert re.match(rf"engine: worker 1 \(pid \d+\) {complaint}", last)
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("name", ["copy_blocks", "SharedOffloadRegion"])
def test_nothing_is_left_if_the_scheduler_dies(tmp_path: Path, name: str) -> None:
    """No worker, and nothing in /dev/shm (which the conftest checks after every test)."""
    deed = "os.kill(os.getppid(), signal.SIGKILL); return call(*arguments, **more)"
    finished = run(*small(tmp_path, name, deed), first=tmp_path)
    assert finished.returncode == -9
    assert "Traceback" not in finished.stderr
    assert "worker 0 leaves" in finished.stderr
    MessageQueue(1, 1).close()  # a queue has a name until all are ready: this sweeps it


def test_pool_too_small_for_a_sequence_is_refused_before_anything_starts(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, [b"?" * 40, b"?"])
    finished = run("--prompts", prompts, "--images", "0", "--tokens", "9", "--device-blocks", "2")
    assert finished.returncode == 2
    assert finished.stdout == ""
    complaint = "argument --device-blocks: the longest request needs 3 blocks of 16 tokens"
    assert complaint in finished.stderr
    assert "Traceback" not in finished.stderr
    with pytest.raises(PoolTooSmall):
        pools_for([Request(b"?" * 40, 10)], 8, device=3, offload=True)
    assert pools_for([Request(b"?" * 40, 9)], 8, device=3, offload=True) == Pools(3, LEAST_REGION)


class Shelf:
    """A `BlockCache` of a few rows that forgets now and then; knows what was put into them."""

    def __init__(self, chance: random.Random, rows: int) -> None:
        self.rows: list[bytes | None] = [None] * rows
        self._chance = chance
        self._keys: dict[bytes, int] = {}
        self._new: dict[bytes, int] = {}
        self._held: set[int] = set()

    def find(self, keys: list[bytes]) -> list[int]:
        found = []
        for key in keys:
            if key not in self._keys or self._chance.random() < 0.01:
                break
            found.append(self._keys[key])
        self._held.update(found)
        return found

    def prefetch(self, keys: list[bytes]) -> None:
        pass

    def save(self, keys: list[bytes]) -> dict[bytes, int]:
        for key in keys:
            used = self._held | {*self._keys.values()} | {*self._new.values()}
            free = [row for row in range(len(self.rows)) if row not in used]
            if not free:
                gone = [each for each, row in self._keys.items() if row not in self._held]
                if not gone:
                    break
                free = [self._keys.pop(self._chance.choice(gone))]
            if key not in self._keys:
                self._new[key] = free[0]
        return dict(self._new)

    def settle(self) -> None:
        self._keys.update(self._new)
        self._new = {}
        self._held.clear()


@pytest.mark.parametrize("seed", range(8))
def test_every_table_has_its_tokens_and_nobody_starves(seed: int) -> None:
    """A block is the tokens up to its end here; the cache forgets, and requests begin alike."""
    chance = random.Random(seed)
    beginnings = [chance.randbytes(40) for _ in range(3)]
    requests = [
        Request(
            (chance.choice(beginnings) + chance.randbytes(60))[: chance.randint(1, 100)],
            chance.randint(1, 60),
            may_end_early=False,
        )
        for _ in range(30)
    ]
    least = pools_for(requests, 1, offload=False).device
    pools = pools_for(requests, 8, device=least + chance.randint(0, 10), offload=True)
    shelf = Shelf(chance, chance.choice((LEAST_REGION, pools.region)))
    batches = Batcher(requests, max_batch=8, max_step_tokens=64, pools=pools, cache=shelf)
    device: list[bytes | None] = [None] * pools.device
    last_run: dict[int, int] = {}
    while (step := batches.decide(0.0)) is not None:
        assert step["step"] < 20_000
        for source, target in step["swap_out"]:
            shelf.rows[target] = device[source]
        for source, target in step["swap_in"]:
            device[target] = shelf.rows[source]
        for (number, position, tokens), table in zip(step["run"], step["tables"], strict=True):
            sequence = batches.sequences[number]
            assert len(table) == blocks_of(position + len(tokens))
            assert bytes(sequence.tokens[position : position + len(tokens)]) == tokens
            for index, block in enumerate(table):
                end = (index + 1) * BLOCK_SIZE
                if index < blocks_of(position):
                    content = device[block]
                    assert content is not None
                    assert content[:position] == sequence.tokens[: min(position, end)]
                device[block] = bytes(sequence.tokens[: min(position + len(tokens), end)])
            last_run[number] = step["step"]
        batches.accept(step, [chance.randrange(256) for _ in step["run"]])
    assert all(sequence.is_finished for sequence in batches.sequences)
    assert batches.blocks.pauses > 0
    assert batches.finds.prefix > 0
    assert batches.finds.returned > 0
    assert batches.blocks.used == 0


class Nothing:
    """A `BlockCache` that has lost whatever it was given."""

    def find(self, keys: list[bytes]) -> list[int]:
        return []

    def prefetch(self, keys: list[bytes]) -> None:
        pass

    def save(self, keys: list[bytes]) -> dict[bytes, int]:
        return {}

    def settle(self) -> None:
        pass


@pytest.mark.parametrize("seed", range(40))
def test_a_cache_that_loses_everything(seed: int) -> None:
    """Costs time, but all sequences get on."""
    chance = random.Random(seed)
    requests = [
        Request(chance.randbytes(chance.randint(1, 70)), chance.randint(1, 60), may_end_early=False)
        for _ in range(6)
    ]
    least = pools_for(requests, 1, offload=False).device
    batches = Batcher(
        requests,
        max_batch=chance.randint(2, 4),
        max_step_tokens=128,
        pools=Pools(least, LEAST_REGION),
        cache=Nothing(),
    )
    while (step := batches.decide(0.0)) is not None:
        assert step["step"] < 20_000
        batches.accept(step, [chance.randrange(256) for _ in step["run"]])
    assert all(sequence.is_finished for sequence in batches.sequences)


def test_keys_of_blocks_differ_by_all_that_decides_them() -> None:
    """Differ by image, by all tokens so far, and, behind what is shared, by the prompt's length."""
    tokens = bytes(range(50))
    keys = keys_of("", tokens, 32, 50)
    assert len(set(keys)) == 4
    assert keys_of("", tokens[:40], 32, 50)[:2] == keys[:2]
    assert keys_of("", tokens, 32, 51)[:2] == keys[:2]
    assert not {*keys_of("", tokens, 32, 51)[2:]} & {*keys}
    assert not {*keys_of("an image", tokens, 32, 50)} & {*keys}
    assert not {*keys_of("", b"x" + tokens[1:], 32, 50)} & {*keys}


def summary(output: str) -> tuple[int, int, float, float]:
    """Blocks found by resumed sequences and by requests that begin alike, GB out and GB back."""
    found = re.search(r"blocks found +(\d+) by resumed sequences, (\d+) by requests", output)
    moved = re.search(r"tier behind it .*: ([\d.]+) GB.* out, ([\d.]+) GB.* back", output)
    assert found is not None
    assert moved is not None
    return int(found[1]), int(found[2]), float(moved[1]), float(moved[2])


@pytest.mark.parametrize("more", [[], ["--region-blocks", "40"], ["--kill-worker", "--restart"]])
def test_the_demo_pages_through_a_disk(more: list[str]) -> None:
    """Its files are gone at once, and the tokens are those of a single process."""
    finished = run("--workers", "2", "--tokens", "16", *more)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert complaints(finished.stderr) == []
    returned, prefix, out, back = summary(finished.stdout)
    assert min(returned, prefix) > 0
    assert min(out, back) > 0 or more
    assert "single process      the same tokens\n" in finished.stdout
    assert "nothing left" in finished.stdout


@pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)
def test_the_demo_pages_through_a_server(tmp_path: Path) -> None:
    """Another run finds the prompts of the first one there."""
    package("redis")
    with RedisServer(tmp_path / "redis") as server:
        arguments = ("--workers", "2", "--tokens", "16", "--region-blocks", "40")
        arguments += ("--tier", server.url)
        prefixes = []
        for _ in range(2):
            finished = run(*arguments)
            assert finished.returncode == 0, finished.stdout + finished.stderr
            assert "single process      the same tokens\n" in finished.stdout
            assert "tier behind it      unix: " in finished.stdout
            prefixes.append(summary(finished.stdout)[1])
        assert prefixes[1] > prefixes[0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--region-blocks", "3"], "a region has at least 16 blocks"),
        (["--region-blocks", "40", "--no-offload"], "--region-blocks: not with --no-offload"),
        (["--tier", "redis://localhost", "--no-offload"], "--tier: not with --no-offload"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], complaint: str) -> None:
    finished = run(*arguments)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert complaint in finished.stderr


@pytest.mark.parametrize("place", ["redis://127.0.0.1:1", "gopher://x", "s3://"])
def test_a_tier_that_is_not_there(place: str) -> None:
    """Is said in a line, before any worker starts."""
    for name in ("redis", "obstore"):
        package(name)
    finished = run("--tier", place)
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr
    assert finished.stderr.startswith("engine: ")


def test_a_worker_that_comes_too_late_makes_no_region(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scheduler has closed: it may kill those who are late, and they would leave a file."""
    monkeypatch.setattr(worker, "Offload", None)
    with MessageQueue(1, 1) as broadcast:
        handle = broadcast.export_handle(0)
    region = RegionPlan(new_id(), 8, 1, block_bytes(CONFIG, 1))
    theirs, ours = Pipe()
    with ours, theirs:
        with pytest.raises(SystemExit):
            worker.run_worker(worker.Assignment(CONFIG, 0, 1, 8, handle, None, region), theirs)
        assert ours.recv().text.startswith("SegmentMissing")
