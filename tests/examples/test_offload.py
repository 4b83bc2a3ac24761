"""Offload in the demo: blocks go to the region and back without changing a token."""

import random
import re
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from engine.batching import SLICE_STEPS, Batcher, Decision, Request, pools_for
from engine.model import Shard, block_bytes
from engine.offload import Offload, RegionPlan
from engine.paging import Pools, PoolTooSmall, blocks_of
from engine.reference import run_reference
from memlane import MessageQueue
from tests.examples.demo import PROMPTS, run, write_prompts
from tests.examples.test_engine import CONFIG, compute
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


def batcher(pools: Pools | None = None) -> Batcher:
    return Batcher(REQUESTS, max_batch=AT_WORK, max_step_tokens=32, pools=pools)


def tokens_of(batches: Batcher) -> list[bytes]:
    return [bytes(sequence.tokens) for sequence in batches.sequences]


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    """What a single process generates with room for everything."""
    batches = batcher()
    run_reference(CONFIG, WORKERS, batches)
    return tokens_of(batches)


def offloading(device: int, see: Callable[[Decision, list[Shard]], None]) -> list[bytes]:
    """Generates with that many blocks, all workers in this process; `see` is called for moves."""
    pools = pools_for(REQUESTS, AT_WORK, device=device, offload=True)
    batches = batcher(pools)
    shards = [Shard(CONFIG, rank, WORKERS, device) for rank in range(WORKERS)]
    plan = RegionPlan(new_id(), pools.region, WORKERS, block_bytes(CONFIG, WORKERS))
    pairs = [0, 0]
    with ExitStack() as stack:
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
    for end, shard in zip(ends, shards, strict=True):
        for count, calls in zip(pairs, (end.moved.swap_out, end.moved.swap_in), strict=True):
            assert sum(nbytes for nbytes, _ in calls) == count * shard.cache.blocks[0].nbytes
    assert pairs[0] == pairs[1]
    assert bool(pairs[0]) == (device < ENOUGH)
    assert batches.blocks.used == 0
    return tokens_of(batches)


@pytest.mark.parametrize("device", [LONGEST, LONGEST + 3, ENOUGH * 2 // 3, ENOUGH])
def test_tokens_are_those_of_a_run_without_offload(device: int, expected: list[bytes]) -> None:
    assert offloading(device, lambda _step, _shards: None) == expected


def test_tokens_tell_of_a_block_that_came_back_wrong(expected: list[bytes]) -> None:
    """One wrong block, in one worker, once, changes the tokens."""
    harmed: list[int] = []

    def harm(step: Decision, shards: list[Shard]) -> None:
        if step["swap_in"] and not harmed:
            harmed.append(step["swap_in"][0][1])
            shards[1].cache.blocks[harmed[0]] *= -1

    assert offloading(LONGEST, harm) != expected
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
    assert out == back > 0
    assert calls > 0
    assert "10 blocks of 16 tokens on each device" in finished.stdout
    assert re.search(
        r"offload region .* cells of 32768 bytes, started in [\d.]+ s", finished.stdout
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
    assert pools_for([Request(b"?" * 40, 9)], 8, device=3, offload=True) == Pools(3, 3)


@pytest.mark.parametrize("seed", range(5))
def test_every_table_has_its_tokens_and_nobody_starves(seed: int) -> None:
    """The pools are lists here, which know the owner and index of each block."""
    chance = random.Random(seed)
    requests = [
        Request(bytes(chance.randint(1, 100)), chance.randint(1, 60), may_end_early=False)
        for _ in range(30)
    ]
    least = pools_for(requests, 1, offload=False).device
    pools = pools_for(requests, 8, device=least + chance.randint(0, 10), offload=True)
    batches = Batcher(requests, max_batch=8, max_step_tokens=64, pools=pools)
    device: list[tuple[int, int] | None] = [None] * pools.device
    region: list[tuple[int, int] | None] = [None] * pools.region
    last_run: dict[int, int] = {}
    while (step := batches.decide(0.0)) is not None:
        for source, target in step["swap_out"]:
            region[target], device[source] = device[source], None
        for source, target in step["swap_in"]:
            assert device[target] is None
            device[target], region[source] = region[source], None
        for number in step["drop"]:
            assert (number, 0) not in region
        for (number, position, tokens), table in zip(step["run"], step["tables"], strict=True):
            assert len(table) == blocks_of(position + len(tokens))
            computed = [(number, index) for index in range(blocks_of(position))]
            assert [device[block] for block in table[: len(computed)]] == computed
            for index, block in enumerate(table):
                device[block] = (number, index)
            assert step["step"] - last_run.get(number, step["step"]) <= 8 * SLICE_STEPS
            last_run[number] = step["step"]
        batches.accept(step, [0] * len(step["run"]))
        for number, _, _ in step["run"]:
            if batches.sequences[number].is_finished:
                device = [None if one and one[0] == number else one for one in device]
    assert all(sequence.is_finished for sequence in batches.sequences)
    assert batches.blocks.pauses > 0
    assert not any(device)
    assert not any(region)
