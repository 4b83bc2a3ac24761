"""vLLM's own modules on memlane's offload region."""

import re
from functools import partial

from tests.engines import running
from tests.engines.running import EVERY_RELEASE, RELEASES, replacements_in

IMPORTERS = ("cpu.gpu_worker", "tiering.manager", "tiering.spec")
REGION = {"MEMLANE_VLLM": "region"}
run = partial(running.run, file="vllm_region_scenarios")


@EVERY_RELEASE
def test_every_importer_is_rebound(release: str) -> None:
    """All of them, by one line; the queue stays vLLM's."""
    (line,) = replacements_in(run("through_plugins", release=release, **REGION))
    home = "vllm.v1.kv_offload.cpu.shared_offload_region"
    first, others = line.split(", also in ")
    assert first == f"{home}.SharedOffloadRegion is memlane's"
    assert {f"vllm.v1.kv_offload.{one}" for one in IMPORTERS} <= set(others.split(", "))


@EVERY_RELEASE
def test_callers_of_every_release_are_served(release: str) -> None:
    """With the names that the release has for the constructor's arguments, and for the views."""
    run("as_the_release_calls_it", release=release, **REGION)


@RELEASES
def test_ranks_write_their_cells_and_a_tier_reads_rows(release: str) -> None:
    """Processes write their cells, a tier reads rows; the name goes at the barrier or the end."""
    run("workers_and_scheduler", "barriers", release=release, **REGION)


@RELEASES
def test_ranks_that_fail(release: str) -> None:
    """They keep nobody waiting at a barrier."""
    run("failing_ranks", "interrupted", release=release, **REGION)


@RELEASES
def test_barriers_that_fail(release: str) -> None:
    """After a failed set-up they are logged, with their rank; alone they are the error."""
    log = run("failing_barriers", release=release, **REGION)
    lines = re.findall(r"WARNING rank 0 .*", log)
    assert len(lines) == (3 if release == "0.33" else 1)
    assert "peers left (1)" in lines[0]


def test_layouts_give_the_views_that_vllm_expects() -> None:
    """Scenarios: who populates what; canonical views; what is left over, refused or wrong."""
    run("parts", "canonical_views", "bad_input", **REGION)
    run("left_over", "many_starts", **REGION)


@RELEASES
def test_processes_that_are_switched_in_part(release: str) -> None:
    """Neither hangs nor shares: the second one fails at once, whichever it is."""
    run("half_switched", release=release)
