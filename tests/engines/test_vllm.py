"""vLLM's own modules on memlane: switching, the queue's calls, and deaths of workers."""

import re
import subprocess
import sys

import pytest

from memlane import InvalidArgument
from memlane.engines.vllm._engine import VLLM
from tests.engines.running import EVERY_RELEASE, RELEASES, replacements_in, run

QUEUE = {"MEMLANE_VLLM": "queue"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("value", [None, "", " "])
def test_unset_variable_costs_nothing(value: str | None, engine: str) -> None:
    """The plugin loads its own file and what `import memlane` loads, and nothing of anybody."""
    code = (
        f"import sys; from memlane.engines.{engine} import register; register(); "
        "print(*sorted(name for name in sys.modules if name.startswith('memlane')), "
        "{'vllm', 'sglang', 'torch', 'numpy', 'logging', 'typing'} & set(sys.modules))"
    )
    run_ = subprocess.run(
        [sys.executable, "-c", code],
        env={} if value is None else {f"MEMLANE_{engine.upper()}": value},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = ["memlane", "memlane._importing", "memlane._locks", "memlane.engines"]
    assert run_.stdout.split() == [*loaded, f"memlane.engines.{engine}", "set()"]


@EVERY_RELEASE
def test_every_importer_is_rebound(release: str) -> None:
    """By vLLM's plugins, once however often they are called; each replacement is one line."""
    assert replacements_in(run("through_plugins", release=release, **QUEUE)) == [
        "vllm.distributed.device_communicators.shm_broadcast.MessageQueue is memlane's, also in "
        "an_early_importer, vllm.v1.executor.multiproc_executor",
        "vllm.v1.executor.multiproc_executor.MultiprocExecutor._post_init_executor is memlane's",
        "vllm.v1.executor.multiproc_executor.MultiprocExecutor.shutdown is memlane's",
    ]


@pytest.mark.parametrize(
    ("text", "systems"),
    [
        ("queue", ("queue",)),
        (" queue, queue", ("queue",)),
        ("region,store", ("region", "store")),
        ("all", ("queue", "store", "region")),
        ("queue,all", ("queue", "store", "region")),
    ],
)
def test_words_choose_the_systems_to_replace(text: str, systems: tuple[str, ...]) -> None:
    """One or more, in any order; `all` is what there is for the release."""
    assert VLLM.systems_of(text, "0.33") == systems


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("quue", "memlane has no 'quue' for vLLM 0.33"),
        ("queue,", "memlane has no ''"),
        ("1", "choose from queue, store, region, separated by commas, or all"),
    ],
)
def test_words_that_lead_nowhere_are_refused(text: str, says: str) -> None:
    """A word that is no system, or not there yet, is an error that lists the valid ones."""
    with pytest.raises(InvalidArgument, match=says):
        VLLM.systems_of(text, "0.33")


def test_vllm_does_not_start_with_a_wrong_word() -> None:
    """vLLM does not start with a word that leads nowhere."""
    assert "memlane has no 'quue' for vLLM 0.33" in run("switched", fails=True, MEMLANE_VLLM="quue")


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.33.2", "0.33"),
        ("0.24.1+cpu", "0.24"),
        ("0.33.0rc1", "0.33"),
        *[(newer, "0.33") for newer in ("0.34.0", "0.330.1", "1.0.0")],
        *[(other, None) for other in ("0.23.2", "0.9.2", "dev")],
    ],
)
def test_every_patch_of_a_tested_release_is_that_release(version: str, release: str | None) -> None:
    """Every patch of a tested release is that release; what is newer gets the newest one's."""
    assert VLLM.release_of(version) == release


def test_older_versions_are_declined() -> None:
    """With one warning that names those that are tested; vLLM keeps its own queue."""
    log = run("declined", TEST_VERSION="0.23.1", **QUEUE)
    (warning,) = re.findall(r"WARNING .*", log)
    assert "memlane is tested with vLLM 0.24 to 0.33, and this is 0.23.1" in warning


def test_newer_versions_are_tried() -> None:
    """With one warning, if nothing is different where memlane takes hold."""
    log = run("through_plugins", TEST_VERSION="0.34.0", **QUEUE)
    assert re.findall(r"WARNING .*", log) == [
        "WARNING memlane is tested with vLLM 0.24 to 0.33, and tries 0.34.0"
    ]
    assert len(replacements_in(log)) == 3


def test_newer_versions_keep_what_differs() -> None:
    """A name that is gone, and an argument that memlane does not know, are told; the rest is on."""
    log = run("tried", TEST_VERSION="0.34.0", MEMLANE_VLLM="all")
    _, *warnings = re.findall(r"WARNING .*", log)
    assert len(warnings) == 2
    assert "vLLM 0.34.0 keeps its own queue: " in warnings[0]
    assert warnings[0].endswith("shm_broadcast.MessageQueue.enqueue takes priority")
    assert "vLLM 0.34.0 keeps its own store: " in warnings[1]
    assert "SingleWriterShmRingBuffer is gone" in warnings[1]
    assert ["SharedOffloadRegion" in line for line in replacements_in(log)] == [True]


@EVERY_RELEASE
def test_the_queue_has_the_calls_of_vllms_class(release: str) -> None:
    """Signatures, attributes and `shutdown`; places on other hosts; handles of the other side."""
    run("calls", "remote_places", "mixed_handles", release=release, **QUEUE)


@RELEASES
def test_second_shutdown_of_an_executor_waits(release: str) -> None:
    """Or the process would end before its workers have been ended."""
    run("second_shutdown", release=release, **QUEUE)


def test_survivor_that_hangs_is_killed() -> None:
    """Before vLLM asks it with SIGTERM, which it does not hear; unless vLLM's patience is set."""
    assert "SIGTERM" not in run("survivor_that_hangs", **QUEUE)
    patience = {"VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1"}
    assert "SIGTERM" in run("survivor_that_hangs", **QUEUE, **patience)


@RELEASES
def test_the_executor_for_ray_shuts_down_once_and_names_deaths(release: str) -> None:
    """Its own shutdown: a second caller waits, its monitor never does; deaths are named."""
    run("ray_worker_dies", "ray_shutdown_joins_its_monitor", release=release, **QUEUE)


def test_objects_reach_all_ranks_of_a_group() -> None:
    """One writer and many readers, or the reverse, over torch's groups and vLLM's own."""
    run("groups", TEST_DEVICES="1", **QUEUE)


def test_the_death_of_a_worker_is_named_in_a_second() -> None:
    """It is named within a second, with rank and pid, whosever answer is awaited."""
    run("awaited_worker_dies", "another_worker_dies", **QUEUE)


def test_a_stop_of_another_worker_is_named_first() -> None:
    """It is named first, in vLLM's log; an idle wait says nothing."""
    log = run("another_worker_stops", MEMLANE_RINGBUFFER_WARNING_INTERVAL="0.5", **QUEUE)
    stopped = re.search(r"stopped: (\d+)", log)
    assert stopped is not None
    lines = re.findall(r"WARNING .*reader 1 \(pid (\d+) .*, stopped, .*\), reader 0 .*", log)
    assert set(lines) == {stopped[1]}
    assert "WARNING" not in log[stopped.end() :]
