"""A stock vLLM with memlane's tier and policy on a CPU: right tokens, from the disk, whatever ends.

`make engines` runs it; a quarter of an hour.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from benchmarks.engines import environment

from memlane._base.processes import holders_in
from tests.engines.running import RELEASES, ROOT
from tests.support import assert_in_time, redis_servers
from tests.support.missing import needed, needs

SCRIPT = ROOT / "tests/engines/tiered_vllm.py"
PROMPTS, BLOCKS, ROW = 6, 90, 262_144  # that the prompts have together; bytes of a block
SECONDS = 300  # for an engine to start and answer

pytestmark = [
    needed(
        "a real vLLM",
        (environment.HERE / "venv/vllm-0.32.0").exists() and "MEMLANE_REAL_TIERS" in os.environ,
    ),
]


def in_memory() -> set[str]:
    return {entry.path for entry in os.scandir("/dev/shm")}


class Engine:
    """A vLLM in processes of its own, that answers and then waits."""

    def __init__(self, place: Path, release: str, rounds: int, options: dict[str, Any]) -> None:
        self._rounds, self._begun = rounds, 1
        self._output = place / f"output-{time.monotonic_ns()}"
        self._others = in_memory()
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "MEMLANE_"))}
        more = {"PYTHONPATH": str(environment._mixed_033())} if release == "0.33" else {}
        if more and options.get("data_parallel_size", 1) > 1:  # each would want a NUMA node
            more["VLLM_CPU_SIM_MULTI_NUMA"] = "0"  # there, but off: all may use the only one
        command = [environment.PYTHON, SCRIPT, place / "model", str(rounds), json.dumps(options)]
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                command,
                env={**clean, **environment.VARIABLES, **more, "TMPDIR": str(place)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def answers(self, count: int | None = None) -> list[dict[str, Any]]:
        """Returns the answers of each round, which begins when it is asked for, and the metrics; or
        the first ones."""
        count = count or self._rounds + 1
        while self._begun < min(count, self._rounds):
            self._begun += 1
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            told = [line for line in self.output.splitlines(True) if line.startswith("@@")]
            if len(told) >= count and told[count - 1].endswith("\n"):
                return [json.loads(line[2:]) for line in told[:count]]
            time.sleep(0.2)
        pytest.fail(self.output)

    def wait(self) -> int:
        """Until it ends by itself."""
        return self._process.wait(SECONDS)

    def kill(self) -> None:
        """With SIGKILL, and all that it has started; then removes what they left in memory."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        own = in_memory() - self._others
        while own & {path for path, _ in holders_in("/dev/shm")}:
            time.sleep(0.05)
        for path in own:
            Path(path).unlink()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model and of what engines write; its name is short, for the names of
    sockets."""
    place = tmp_path_factory.mktemp("t")
    (place / "model").mkdir()
    shutil.copy(environment.MODEL / "config.json", place / "model")
    return place


@contextmanager
def engine(place: Path, release: str, rounds: int = 1, **options: Any) -> Iterator[Engine]:
    """Killed at the end, as all of these engines are."""
    running = Engine(place, release, rounds, options)
    try:
        yield running
    finally:
        running.kill()


@cache
def tokens(place: Path, workers: int) -> list[list[int]]:
    """Without tiers, of both releases. The prompts end alike, so that their tokens differ shows
    that what the cache has decides about them."""
    with engine(place, "0.32", tensor_parallel_size=workers) as plain:
        (first,) = plain.answers(1)
    assert first["cached"] == [0] * PROMPTS
    assert len({tuple(each) for each in first["tokens"]}) == PROMPTS
    return first["tokens"]


def on(folder: Path, **own: Any) -> dict[str, Any]:
    return {"path": str(folder), "capacity": "64MiB", **own}


@cache
def killed(place: Path) -> Path:
    """The folder of an engine that was killed when it had answered every prompt once."""
    folder = place / "killed"
    with engine(place, "0.32", tier=on(folder)) as first:
        assert first.answers(1)[0]["cached"] == [0] * PROMPTS
    return folder


@RELEASES
@pytest.mark.parametrize("workers", [1, 2])
def test_tokens_are_those_without_tiers(place: Path, release: str, workers: int) -> None:
    """Memory holds less than half of the blocks; from the second round on the disk has them."""
    expected = tokens(place, workers)
    tier = on(place / f"{release}-{workers}")
    with engine(place, release, 2, tensor_parallel_size=workers, tier=tier) as tiered:
        first, second, last = tiered.answers()
    assert (first["tokens"], second["tokens"]) == (expected, expected)
    assert first["cached"] == [0] * PROMPTS
    assert min(second["cached"]) > 0
    assert last["metrics"]["vllm:memlane_disk_tier_stored"] == BLOCKS
    assert last["metrics"]["vllm:memlane_disk_tier_loaded"] > 0


def test_an_engine_after_one_that_was_killed(place: Path) -> None:
    """Finds its blocks, also with `TunedPolicy` for the memory. While it lives, another engine on
    its path is refused, and one with an `opener` of its own runs, with too few blocks for all."""
    expected, folder = tokens(place, 1), shutil.copytree(killed(place), place / "next")
    with engine(place, "0.32", tier=on(folder), policy="TunedPolicy") as second:
        answer, _ = second.answers()
        assert answer["tokens"] == expected
        assert min(answer["cached"]) > 0
        with engine(place, "0.32", tier=on(folder)) as refused:
            assert refused.wait() != 0
            assert "is in use by process" in refused.output
        own = on(folder, opener="own", capacity=60 * (ROW + 64) + 8192, policy="arc")
        with engine(place, "0.32", 2, tier=own) as beside:
            *rounds, last = beside.answers()
        assert [each["tokens"] for each in rounds] == [expected, expected]
        assert last["metrics"]["vllm:memlane_disk_tier_evicted"] > 0
        assert last["metrics"]["vllm:memlane_disk_tier_used"] <= 60 * ROW


def test_blocks_that_changed_on_disk_are_computed_again(place: Path) -> None:
    """Are computed again, with one line."""
    expected, folder = tokens(place, 1), shutil.copytree(killed(place), place / "changed")
    with (folder / "0.data").open("r+b") as data:
        for slot in range(BLOCKS):
            data.seek(slot * ROW + 77)
            byte = data.read(1)[0]
            data.seek(slot * ROW + 77)
            data.write(bytes([byte ^ 1]))
    with engine(place, "0.32", 2, tier=on(folder)) as second:
        *rounds, last = second.answers()
        assert second.output.count("blocks that are not what was stored") == 1
    assert [each["tokens"] for each in rounds] == [expected, expected]
    assert last["metrics"]["vllm:memlane_disk_tier_corrupt"] > 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 40 MiB, of the test's own."""
    if os.geteuid() != 0:
        pytest.skip(needs("root"))
    image, mounted = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(40 << 20)
    mounted.mkdir()
    run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image)
    run("mount", "-o", "loop", image, mounted)
    try:
        yield mounted
    finally:
        run("umount", "--lazy", mounted)  # what a killed engine had under way may take a moment


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


def test_an_engine_on_a_disk_without_space_goes_on(place: Path, disk: Path) -> None:
    """Starts with the space that there is, and says so once. Later it loses even that: the engine
    goes on, also with one line, and stores again when there is space."""
    expected = tokens(place, 1)
    with (disk / "other").open("wb") as other:
        os.posix_fallocate(other.fileno(), 0, 24 << 20)
    with engine(place, "0.32", 3, tier=on(disk / "kv", policy="lru")) as running:
        before = running.answers(1)
        assert running.output.count("has room for") == 1
        data = disk / "kv/0.data"
        run(
            "fallocate", "--punch-hole", "--offset", "0", "--length", f"{data.stat().st_size}", data
        )
        run("sh", "-c", f"cat /dev/zero > {disk}/all 2>/dev/null || true")
        full = running.answers(2)[1]
        (disk / "all").unlink()
        *rounds, last = running.answers()
        assert running.output.count("cannot store blocks: No space left on device") == 1
    assert rounds[:2] == [*before, full]
    assert [each["tokens"] for each in rounds] == [expected] * 3
    assert last["metrics"]["vllm:memlane_disk_tier_errors"] > 0
    stored = last["metrics"]["vllm:memlane_disk_tier_stored"]
    assert stored > last["metrics"]["vllm:memlane_disk_tier_capacity"] / ROW  # round 3, too


def test_a_disk_that_does_not_answer(place: Path, disk: Path) -> None:
    """Blocks are misses until it does; the engine goes on, with one line."""
    expected = tokens(place, 1)
    few = on(disk / "kv", policy="lru", capacity=60 * (ROW + 64) + 8192, timeout=0.5)
    line = "does not answer: nothing is stored or loaded until it does"
    with engine(place, "0.32", 8, tier=few) as running:
        running.answers(1)
        run("fsfreeze", "--freeze", disk)  # every write hangs
        try:
            began = time.monotonic()
            running.answers(2)
            assert_in_time(60, began)
            for number in range(3, 8):  # until a block is a second late
                if line in running.output:
                    break
                running.answers(number)
        finally:
            run("fsfreeze", "--unfreeze", disk)
        *rounds, last = running.answers()
        assert running.output.count(line) == 1
    assert [each["tokens"] for each in rounds] == [expected] * 8
    assert last["metrics"]["vllm:memlane_disk_tier_expired"] > 0
    assert last["metrics"]["vllm:memlane_disk_tier_stalled"] == 0


@pytest.mark.skipif(bool(redis_servers.REFUSAL), reason=redis_servers.REFUSAL)
@RELEASES
def test_engines_that_share_a_redis_server_find_each_others_blocks(
    place: Path, release: str
) -> None:
    """An engine finds what one before it has computed. Without the server it goes on, with right
    tokens; and with another one, that begins empty."""
    expected = tokens(place, 1)
    with redis_servers.RedisServer(place / f"redis-{release}") as server:
        tier = {"type": "RedisTier", "url": server.url, "timeout": 2.0}
        with engine(place, release, tier=tier) as first:
            (alone,) = first.answers(1)
            assert alone == {"tokens": expected, "cached": [0] * PROMPTS}
        with engine(place, release, 3, tier=tier) as second:
            (after,) = second.answers(1)
            assert after["tokens"] == expected
            assert min(after["cached"][:-1]) > 0  # the last was perhaps not stored yet
            server.kill()
            began = time.monotonic()
            second.answers(2)
            assert_in_time(60, began)
            server.start()
            *rounds, last = second.answers()
            assert "it is skipped until it does" in second.output
    assert [each["tokens"] for each in rounds] == [expected] * 3
    assert last["metrics"]["vllm:memlane_redis_tier_loaded"] > 0
    assert last["metrics"]["vllm:memlane_redis_tier_corrupt"] == 0


@RELEASES
def test_routers_know_what_the_disk_holds(place: Path, release: str) -> None:
    """By vLLM's own events, through evictions, a reset and a restart; after a reset nothing of
    before is found."""
    expected, folder = tokens(place, 1), place / f"routed-{release}"
    tier = on(folder, policy="lru", capacity=60 * (ROW + 64) + 8192)
    events = f"ipc://{place}/events-{release}"
    with engine(place, release, 3, tier=tier, events=events, resets=[2]) as first:
        *rounds, last = first.answers()
    assert [each["tokens"] for each in rounds] == [expected] * 3
    assert rounds[2]["cached"] == [0] * PROMPTS
    assert last["metrics"]["vllm:memlane_disk_tier_evicted"] > 0
    assert last["routed"] * ROW == last["metrics"]["vllm:memlane_disk_tier_used"] > 0


@pytest.mark.parametrize("disks", [1, 2])
def test_routers_know_what_the_disk_has_after_a_restart(place: Path, disks: int) -> None:
    """At once, though the engine before it was killed."""
    folders = [str(place / f"again-{disks}-{number}") for number in range(disks)]
    tier = on(place, path=folders if disks > 1 else folders[0])
    with engine(place, "0.32", tier=tier, events=f"ipc://{place}/before") as first:
        first.answers()
    assert all((Path(folder) / "0.keys").stat().st_size > 100 for folder in folders)
    with engine(place, "0.32", 0, tier=tier, events=f"ipc://{place}/after") as second:
        (last,) = second.answers()
    assert last["routed"] * ROW == last["metrics"]["vllm:memlane_disk_tier_used"] > 0


@RELEASES
def test_data_parallel_replicas_find_their_blocks_after_a_restart(
    place: Path, release: str
) -> None:
    """Each has a pair of files of its own, and finds its blocks after a restart."""
    expected, folder = tokens(place, 1), place / f"replicas-{release}"
    with engine(place, release, 2, data_parallel_size=2, tier=on(folder)) as first:
        *rounds, last = first.answers()
    assert [each["tokens"] for each in rounds] == [expected * 2] * 2
    assert rounds[0]["cached"] == [0] * 2 * PROMPTS
    assert min(rounds[1]["cached"]) > 0
    assert last["metrics"]["vllm:memlane_disk_tier_stored"] == 2 * BLOCKS
    names = {file.name for file in folder.iterdir()}
    assert names == {f"{opener}.{what}" for opener in "01" for what in ("data", "headers", "uses")}
    with engine(place, release, data_parallel_size=2, tier=on(folder)) as second:
        (again,) = second.answers(1)
    assert again["tokens"] == expected * 2
    assert min(again["cached"]) > 0
