"""Replaying a request trace: what is read, what is refused, and when requests run."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from engine.batching import Batcher, Request
from engine.crew import WorkerDied
from engine.local import LocalCrew
from engine.model import ModelConfig
from engine.progress import Progress
from engine.scheduler import Engine
from engine.trace import TOKEN_SCALES, Scale, TraceError, TraceLine, read_trace, requests_of
from tests.examples.demo import run
from tests.support import Link, start
from tests.support.missing import needs

TRACES = os.environ.get("MEMLANE_TRACES")
"""A folder of real traces, if there is one."""

CONFIG = ModelConfig()
GOOD = {"timestamp": 10, "input_length": 600, "output_length": 65, "hash_ids": [7, 8]}


def write_trace(folder: Path, *lines: object) -> Path:
    """A file of these objects, one a line; text is written as it is."""
    path = folder / "trace.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def test_trace_is_read_and_scaled(tmp_path: Path) -> None:
    later = {**GOOD, "timestamp": 2010, "input_length": 1, "output_length": 0, "hash_ids": [9]}
    trace = read_trace(write_trace(tmp_path, GOOD, "", {**later, "model": "another field"}))
    assert trace[0] == TraceLine(10, 600, 65, [7, 8])
    first, second = requests_of(trace, Scale(time=0.5, tokens=64))
    assert (len(first.prompt), first.new_tokens, first.arrival) == (10, 2, 0.0)
    assert (len(second.prompt), second.new_tokens, second.arrival) == (1, 1, 1.0)


@pytest.mark.parametrize("tokens", TOKEN_SCALES)
def test_equal_ids_are_equal_content(tokens: int) -> None:
    lines = [
        TraceLine(0, 1536, 1, [1, 2, 3]),
        TraceLine(0, 1536, 1, [1, 2, 4]),
        TraceLine(0, 513, 1, [1, 2]),
    ]
    one, other, short = (request.prompt for request in requests_of(lines, Scale(1, tokens)))
    block = 512 // tokens
    assert len(one) == 3 * block
    assert one[: 2 * block] == other[: 2 * block]
    assert one[block] != one[2 * block] or tokens == 512
    assert one.startswith(short)
    assert len(short) == block + 1
    if tokens < 512:  # ids that differ could have the same one token
        assert one[2 * block :] != other[2 * block :]


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "has no requests"),
        (["", "  "], "has no requests"),
        ([GOOD, "not JSON"], "line 2: JSON is malformed"),
        ([GOOD, "", '{"timestamp": 1'], "line 3: Input data was truncated"),
        ([[1, 2]], "line 1: Expected `object`"),
        ([{**GOOD, "timestamp": "soon"}], "line 1: .*timestamp"),
        ([{**GOOD, "timestamp": -1}], "line 1: .*>= 0.*timestamp"),
        ([{**GOOD, "input_length": -600}], "line 1: .*>= 1.*input_length"),
        ([GOOD, {**GOOD, "output_length": -1}], "line 2: .*>= 0.*output_length"),
        ([{**GOOD, "output_length": 1.5}], "line 1: .*output_length"),
        ([{**GOOD, "hash_ids": [7, -8]}], "line 1: .*>= 0.*hash_ids"),
        ([{**GOOD, "hash_ids": [7]}], "line 1: 1 hash_ids for an input_length of 600 .* 2 blocks"),
        ([GOOD, {**GOOD, "timestamp": 9}], "line 2: the timestamp goes back to 9 ms, after 10 ms"),
        *(
            ([GOOD, {key: GOOD[key] for key in GOOD if key != field}], f"line 2: .*{field}")
            for field in GOOD
        ),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, lines: list[object], complaint: str) -> None:
    path = write_trace(tmp_path, *lines)
    with pytest.raises(TraceError, match=complaint) as refusal:
        read_trace(path)
    assert str(path) in str(refusal.value)


def test_wrong_trace_is_one_clear_error_before_anything_starts(tmp_path: Path) -> None:
    path = write_trace(tmp_path, GOOD, "not JSON")
    finished = run("--trace", str(path), "--requests", "1")
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert f"argument --trace: {path}, line 2: JSON is malformed" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--trace", "nowhere.jsonl"), "argument --trace: cannot read nowhere.jsonl: No such file"),
        (("--tokens", "5"), "argument --tokens: not with --trace"),
    ],
)
def test_what_does_not_go_with_a_trace_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    if "--trace" not in arguments:
        arguments = ("--trace", str(write_trace(tmp_path, GOOD)), *arguments)
    finished = run(*arguments)
    assert finished.returncode == 2
    assert complaint in finished.stderr


def test_replay_answers_every_request_no_earlier_than_it_arrives(tmp_path: Path) -> None:
    lines = [{**GOOD, "timestamp": 10 + 400 * number} for number in range(8)]
    finished = run(
        *("--workers", "2", "--trace", str(write_trace(tmp_path, *lines)), "--requests", "6"),
        *("--time-scale", "0.5", "--token-scale", "32"),
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "6 of 8 requests of trace.jsonl" in finished.stdout
    assert "time x 0.5: they arrive within 1.0 s; lengths / 32, rounded up" in finished.stdout
    # 600 / 32 tokens in and 65 / 32 out; the last token of an answer is not run.
    assert re.search(rf"requests +6 answered, {6 * (19 + 3 - 1)} tokens", finished.stdout)
    took = re.search(r"18 tokens in ([\d.]+) s", finished.stdout)
    assert took is not None
    assert float(took[1]) >= 1.0
    assert re.search(r"queueing delay +p50 [\d.]+ ms, p99 [\d.]+ ms", finished.stdout)
    assert re.search(r"first token +p50 [\d.]+ ms, p99 [\d.]+ ms", finished.stdout)
    assert "single process      the same tokens\n" in finished.stdout


def replay(link: Link, requests: list[Request], victim: int | None) -> Progress | str:
    """Role: an engine that answers; a worker may be killed while there is nothing to do."""
    batcher, progress = Batcher(requests, max_batch=2, max_step_tokens=16), Progress()
    with LocalCrew(CONFIG, 2, batcher.blocks.pools) as crew:
        try:
            for _ in Engine(CONFIG, crew).generate(batcher, progress):
                if victim is not None and batcher.counts(0.0).finished:
                    os.kill(crew.pid(victim), signal.SIGKILL)
        except WorkerDied as death:
            return str(death)
    return progress


def test_engine_rests_until_the_next_arrival() -> None:
    arrivals = [0.0, 0.0, 0.3, 0.31, 0.9]
    requests = [Request(b"abc", 4, arrival, may_end_early=False) for arrival in arrivals]
    progress = start(replay, requests, None).result()
    assert len(progress.queued) == len(progress.first_tokens) == len(arrivals)
    assert min(progress.queued) >= 0
    for queued, first_token in zip(progress.queued, progress.first_tokens, strict=True):
        assert first_token > queued
    assert progress.tokens == 4 * len(arrivals)
    # No step was made while there was nothing to do: each gave at least one token.
    assert len(progress.steps) <= progress.tokens


def resting_cpu(link: Link, requests: list[Request]) -> float:
    """Role: CPU seconds of the scheduler between the ends of the first and the second step."""
    batcher, progress = Batcher(requests, max_batch=2, max_step_tokens=16), Progress()
    with LocalCrew(CONFIG, 2, batcher.blocks.pools) as crew:
        first, second = (
            time.process_time() for _ in Engine(CONFIG, crew).generate(batcher, progress)
        )
    return second - first


def test_resting_costs_nothing() -> None:
    """Far less CPU than wall time: it does not poll."""
    requests = [Request(b"abc", 1, arrival, may_end_early=False) for arrival in (0.0, 1.0)]
    assert start(resting_cpu, requests).result() < 0.2


def test_death_is_seen_while_there_is_nothing_to_do() -> None:
    """The next request would arrive in an hour."""
    requests = [Request(b"abc", 1, arrival, may_end_early=False) for arrival in (0.0, 3600.0)]
    assert "worker 1 (pid " in start(replay, requests, 1).result()


@pytest.mark.parametrize("name", ["conversation_trace.jsonl", "synthetic_trace.jsonl"])
def test_real_trace_is_replayed(name: str) -> None:
    if TRACES is None:
        pytest.skip(needs("published traces"))
    path = Path(TRACES) / name
    finished = run("--workers", "2", "--trace", str(path), "--requests", "20")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "20 answered" in finished.stdout
    assert "the same tokens" in finished.stdout
