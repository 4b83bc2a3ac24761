"""The demo engine, run as a user would, and the arithmetic of its shards."""

import os
import pickle
import re
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.batching import Batcher, Counts, Decision, Request, Run, Sequence
from engine.kv_cache import Array
from engine.model import WEIGHTS, Batch, ModelConfig, Shard, combine, elect
from engine.reference import run_reference
from memlane import MessageQueue
from tests.examples.demo import (
    PROMPTS,
    RUN,
    command,
    complaints,
    environment,
    run,
    write_prompts,
)
from tests.support import PATIENCE
from tests.support.missing import package

CONFIG = ModelConfig()
BLOCKS = 64


@pytest.fixture
def prompts_file(tmp_path: Path) -> str:
    return write_prompts(tmp_path, [PROMPTS[0], b"", *PROMPTS[1:]])


def test_engine_generates_what_a_single_process_generates(prompts_file: str) -> None:
    finished = run("--workers", "2", "--tokens", "8", "--batch", "3", "--prompts", prompts_file)
    assert finished.returncode == 0, finished.stderr
    assert complaints(finished.stderr) == []
    assert "4 prompts" in finished.stdout  # the empty line is none
    for fact in ("tokens in", "per second", "p99", "% of one core", "nothing left", "same tokens"):
        assert fact in finished.stdout
    assert re.search(r"steps +\d+, .* p50 [\d.]+ ms, p99 [\d.]+ ms", finished.stdout)
    # One to start with; then per step one for the decision, and one for each layer.
    steps = re.search(r"steps +(\d+),", finished.stdout)
    sent = re.search(r"broadcast queue +([\d.]+) MB in (\d+) messages", finished.stdout)
    assert steps is not None
    assert sent is not None
    assert int(sent[2]) == 1 + int(steps[1]) * (1 + CONFIG.layers)
    assert float(sent[1]) > 0


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_killed_worker_is_named_and_nothing_is_left(workers: int, prompts_file: str) -> None:
    finished = run(
        "--workers", str(workers), "--tokens", "8", "--prompts", prompts_file, "--kill-worker"
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert complaints(finished.stderr) == []
    killed = re.search(r"kill -9 .*(worker \d+ \(pid \d+\))", finished.stdout)
    assert killed is not None
    assert f"{killed[1]} died" in finished.stdout
    assert f"exit codes {[0] * (workers - 1)}" in finished.stdout
    assert (
        f"nothing left of {workers + 3} segments" in finished.stdout
    )  # one each of store and region


@pytest.mark.parametrize(
    ("workers", "more"),
    [(1, []), (2, []), (4, []), (2, ["--no-offload"]), (2, ["--images", "0"])],
    ids=str,
)
def test_killed_worker_is_replaced(workers: int, more: list[str], prompts_file: str) -> None:
    """The others keep their processes, and all tokens are those of the undisturbed run."""
    finished = run(
        "--workers", str(workers), "--tokens", "16", "--batch", "3",
        "--prompts", prompts_file, "--kill-worker", "--restart", *more, brief=True,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = finished.stdout.splitlines()
    assert len(lines) <= 1 + 6
    assert max(map(len, lines)) <= 100
    assert complaints(finished.stderr) == []
    killed = re.search(r"kill -9 .*(worker \d+ \(pid \d+\))", finished.stdout)
    assert killed is not None
    assert f"{killed[1]} died" in finished.stdout
    assert re.search(r"replaced +by pid \d+; steps go on after [\d.]+ s", finished.stdout)
    assert "the same tokens" in finished.stdout
    assert "nothing left of" in finished.stdout


def test_restart_needs_a_kill(prompts_file: str) -> None:
    finished = run("--prompts", prompts_file, "--restart")
    assert finished.returncode == 2
    assert "argument --restart: only with --kill-worker" in finished.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_is_one_clear_error(prompts_file: str, unbuffered: str) -> None:
    """As with `| head -1`, or a full disk."""
    reading, writing = os.pipe()
    os.close(reading)
    full = os.open("/dev/full", os.O_WRONLY)
    for output, complaint in ((writing, "Broken pipe"), (full, "No space left on device")):
        finished = subprocess.run(
            command("--workers", "1", "--tokens", "2", "--prompts", prompts_file),
            env=environment(PYTHONUNBUFFERED=unbuffered),
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=RUN,
        )
        os.close(output)
        assert finished.returncode == 1
        (line,) = complaints(finished.stderr)
        assert line.startswith("engine: ")
        assert complaint in line


def test_without_any_output_it_runs(prompts_file: str) -> None:
    """As with `>&-`; the result is the exit code."""
    arguments = command("--workers", "1", "--tokens", "2", "--prompts", prompts_file)
    finished = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *arguments],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=RUN,
    )
    assert (finished.returncode, complaints(finished.stderr)) == (0, [])


def test_prompts_come_from_standard_input() -> None:
    finished = subprocess.run(
        command("--workers", "1", "--tokens", "2", "--prompts", "-"),
        env=environment(),
        input=b"\n".join(PROMPTS),
        capture_output=True,
        timeout=RUN,
    )
    assert finished.returncode == 0, finished.stderr
    assert b"4 prompts" in finished.stdout


def test_missing_prompts_file_is_a_clear_error(tmp_path: Path) -> None:
    finished = run("--prompts", str(tmp_path / "nowhere.txt"))
    assert finished.returncode == 2
    assert "cannot read" in finished.stderr
    assert "nowhere.txt: No such file" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_prompts_file_without_prompts_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"\n\n")
    finished = run("--prompts", str(tmp_path / "empty.txt"))
    assert finished.returncode == 2
    assert "no prompts in" in finished.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tokens", "0"),
        ("--batch", "x"),
        ("--workers", "9"),
        ("--time-scale", "-1"),
        ("--time-scale", "nan"),
        ("--token-scale", "3"),
        ("--requests", "5"),  # of which trace?
        ("--images", "-1"),
        ("--images", "101"),
        ("--store-mib", "2"),
        ("--device-blocks", "0"),
    ],
)
def test_wrong_number_is_a_clear_error(arguments: tuple[str, str]) -> None:
    finished = run(*arguments)
    assert finished.returncode == 2
    assert f"argument {arguments[0]}: " in finished.stderr


def test_more_tokens_than_memory_are_refused(prompts_file: str) -> None:
    finished = run("--tokens", "100000000", "--prompts", prompts_file)
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert re.search(r"KV cache would need \d+ GB, and this machine has \d+ GB", finished.stderr)


@pytest.fixture
def images() -> int:
    return 8


@pytest.fixture
def long_run(tmp_path: Path, images: int) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """An engine that generates for minutes, and its two workers as pidfds."""
    many = write_prompts(tmp_path, PROMPTS * 1000)
    engine = subprocess.Popen(
        command("--workers", "2", "--prompts", many, "--images", str(images)),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert engine.stdout is not None
    with engine:
        engine.stdout.readline()
        ready = re.search(r"2 ready \(pids (\d+), (\d+);", engine.stdout.readline())
        assert ready is not None
        workers = [os.pidfd_open(int(pid)) for pid in ready.groups()]
        yield engine, workers
        engine.kill()
        for worker in workers:
            os.close(worker)


def wait_for_exit(workers: list[int], seconds: float) -> None:
    for worker in workers:
        assert select.select([worker], [], [], seconds)[0], f"still running after {seconds} s"


@pytest.mark.parametrize(("images", "seconds_into_the_run"), [(0, 0.0), (0, 0.3), (8, 0.3)])
def test_workers_leave_when_the_scheduler_is_killed(
    long_run: tuple[subprocess.Popen[str], list[int]], images: int, seconds_into_the_run: float
) -> None:
    """The conftest checks after every test that nothing is left in /dev/shm."""
    engine, workers = long_run
    with pytest.raises(subprocess.TimeoutExpired):
        engine.wait(seconds_into_the_run)
    engine.kill()
    wait_for_exit(workers, PATIENCE)
    _, complaints = engine.communicate()
    assert "worker 0 leaves" in complaints
    assert "worker 1 leaves" in complaints
    assert "Traceback" not in complaints
    if images:
        MessageQueue(1, 1).close()  # a store has a name until it is closed: this sweeps it


def test_interrupt_ends_the_engine_quietly(
    long_run: tuple[subprocess.Popen[str], list[int]],
) -> None:
    engine, workers = long_run
    engine.send_signal(signal.SIGINT)
    _, said = engine.communicate(timeout=RUN)
    assert (engine.returncode, complaints(said)) == (130, [])
    wait_for_exit(workers, 0.0)


def batcher(prompts: list[bytes], max_batch: int = 3, max_step_tokens: int = 16) -> Batcher:
    requests = [Request(prompt, new_tokens=6) for prompt in prompts]
    return Batcher(requests, max_batch=max_batch, max_step_tokens=max_step_tokens)


def generated(sequence: Sequence) -> bytes:
    return bytes(sequence.tokens[len(sequence.request.prompt) :])


def compute(shards: list[Shard], decision: Decision) -> tuple[Array, list[int]]:
    """The hidden state of each run's last row, and the chosen tokens."""
    batch = Batch(decision, CONFIG)
    hidden = shards[0].embed(batch)
    for layer in range(CONFIG.layers):
        hidden = hidden + combine([shard.block(layer, hidden, batch) for shard in shards])
    return hidden[batch.last_rows], elect([shard.vote(hidden, batch) for shard in shards])


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_shards_together_are_the_whole_model(workers: int) -> None:
    shards = [Shard(CONFIG, rank, workers, BLOCKS) for rank in range(workers)]
    whole = [Shard(CONFIG, 0, 1, BLOCKS)]
    batches = batcher(PROMPTS)
    while (decision := batches.decide(0.0)) is not None:
        hidden, tokens = compute(shards, decision)
        whole_hidden, whole_tokens = compute(whole, decision)
        np.testing.assert_allclose(hidden, whole_hidden, rtol=0, atol=1e-3)
        assert tokens == whole_tokens
        batches.accept(decision, tokens)


@pytest.mark.parametrize("chunk", [1, 50])
def test_caches_and_chunks_change_nothing(chunk: int) -> None:
    """A text in bytes or chunks, beside another, gives the same result as alone and at once."""
    text = b"All happy families are alike; every unhappy family is unhappy in its own way."
    alone, _ = compute([Shard(CONFIG, 0, 1, BLOCKS)], decision([(0, 0, text)]))
    shards = [Shard(CONFIG, 0, 1, BLOCKS)]
    for start in range(0, len(text), chunk):
        other = (8, start // chunk, b"x")
        beside, _ = compute(shards, decision([other, (3, start, text[start : start + chunk])]))
    np.testing.assert_allclose(beside[1], alone[0], rtol=0, atol=1e-3)


def test_who_runs_beside_changes_not_one_bit() -> None:
    """So a sequence has the same tokens whether it was paused or not."""
    text = b"All happy families are alike; every unhappy"
    others = [(number, 0, text[number:]) for number in range(4, 7)]
    for cut in (1, 20):
        alone, beside = [Shard(CONFIG, 0, 1, BLOCKS)], [Shard(CONFIG, 0, 1, BLOCKS)]
        for start in range(0, len(text), cut):
            run = (3, start, text[start : start + cut])
            hidden, (token,) = compute(alone, decision([run]))
            crowd, tokens = compute(beside, decision([*others[:2], run, *others[2:]]))
            np.testing.assert_array_equal(crowd[2], hidden[0])
            assert tokens[2] == token


def decision(runs: list[Run]) -> Decision:
    """Each sequence has eight blocks of its own."""
    tables = [list(range(8 * (number % 8), 8 * (number % 8) + 8)) for number, _, _ in runs]
    return Decision(
        step=0, sent_ns=0, run=runs, tables=tables, swap_out=[], swap_in=[], drop=[], images=[]
    )


def test_batcher_runs_each_token_once_within_its_limits() -> None:
    prompts = [b"a" * length for length in (40, 1, 7, 2, 23)]
    batches = batcher(prompts)
    computed = [b""] * len(prompts)
    dropped: list[int] = []
    while (step := batches.decide(0.0)) is not None:
        assert len(step["run"]) <= 3
        assert 1 <= sum(len(tokens) for _, _, tokens in step["run"]) <= 16
        dropped += step["drop"]
        for sequence, position, tokens in step["run"]:
            assert sequence not in dropped
            assert position == len(computed[sequence])
            computed[sequence] += tokens
        new = batches.accept(step, [ord("b")] * len(step["run"]))
        assert new <= len(step["run"])
    assert [generated(finished) for finished in batches.sequences] == [b"bbbbbb"] * len(prompts)
    # The last token of a sequence is generated and never run.
    assert computed == [prompt + b"bbbbb" for prompt in prompts]


def test_newline_ends_a_sequence() -> None:
    batches = batcher([b"one", b"two"])
    step = batches.decide(0.0)
    assert step is not None
    assert batches.accept(step, [ord("\n"), ord("x")]) == 2
    step = batches.decide(0.0)
    assert step is not None
    assert step["drop"] == [0]
    assert [sequence for sequence, _, _ in step["run"]] == [1]


def test_decision_is_a_few_hundred_bytes() -> None:
    """The kind of message that the broadcast is made for, at the default batch size."""
    batches = batcher([b"?"] * 8, max_batch=8)
    step = batches.decide(0.0)
    assert step is not None
    assert len(pickle.dumps(step, protocol=5)) < 300


def test_reference_finishes_every_sequence() -> None:
    batches = batcher(PROMPTS)
    run_reference(CONFIG, 2, batches)
    for sequence in batches.sequences:
        assert sequence.new_tokens == 6 or generated(sequence).endswith(b"\n")


def test_requests_run_only_after_they_have_arrived() -> None:
    batches = Batcher(
        [Request(b"abc", 1, arrival) for arrival in (0.5, 0.5, 2.0)],
        max_batch=1,
        max_step_tokens=16,
    )
    assert batches.decide(0.4) is None
    assert batches.next_arrival == 0.5
    assert batches.counts(0.4) == Counts(to_come=3, waiting=0, running=0, paused=0, finished=0)
    for number in (0, 1):
        step = batches.decide(0.5)
        assert step is not None
        assert [sequence for sequence, _, _ in step["run"]] == [number]
        assert batches.counts(0.5) == Counts(
            to_come=1, waiting=1 - number, running=1, paused=0, finished=number
        )
        assert batches.accept(step, [ord("x")]) == 1
    assert batches.decide(1.9) is None
    assert batches.next_arrival == 2.0
    assert batches.decide(2.0) is not None
    assert batches.next_arrival is None


def test_answer_of_known_length_does_not_end_at_a_newline() -> None:
    request = Request(b"one", 3, may_end_early=False)
    batches = Batcher([request], max_batch=1, max_step_tokens=16)
    while (step := batches.decide(0.0)) is not None:
        batches.accept(step, [ord("\n")])
    assert generated(batches.sequences[0]) == b"\n\n\n"


def test_training_repeats_and_writes_what_the_model_reads(tmp_path: Path) -> None:
    """Two runs of the same few steps write the same bytes, of the shapes of the shipped weights."""
    package("torch")
    from engine.train import train

    paths = [tmp_path / "one.npz", tmp_path / "other.npz"]
    for path in paths:
        train(3, path)
    with np.load(paths[0]) as one, np.load(paths[1]) as other, np.load(WEIGHTS) as shipped:
        assert set(one) == set(other) == set(shipped)
        for name in one:
            assert one[name].shape == shipped[name].shape
            np.testing.assert_array_equal(one[name], other[name])
