"""vLLM's own image caches on memlane's store."""

from functools import partial

import pytest

from tests.engines import running
from tests.engines.running import EVERY_RELEASE, replacements_in
from tests.support import private_shm, unshare_refusal

STORE = {"MEMLANE_VLLM": "store"}
run = partial(running.run, file="vllm_stores")


@EVERY_RELEASE
def test_every_importer_is_rebound(release: str) -> None:
    """By vLLM's plugins; each replacement is one line, and the queue is not touched."""
    log = run("through_plugins", release=release, **STORE)
    home = "vllm.distributed.device_communicators.shm_object_storage"
    importer = "vllm.multimodal.cache" + (".shm" if int(release[2:]) > 30 else "")
    assert replacements_in(log) == [
        f"{home}.SingleWriterShmRingBuffer is memlane's, also in {importer}",
        f"{home}.SingleWriterShmObjectStorage is memlane's, also in an_early_importer, {importer}",
    ]


@EVERY_RELEASE
def test_images_reach_the_workers(release: str) -> None:
    """Through vLLM's own caches, bit for bit, also when the cache is full; and the name is gone."""
    switch = "all" if release == "0.33" else "store"
    assert "Warning" not in run("caches", release=release, MEMLANE_VLLM=switch)


def test_the_cache_survives_the_death_of_a_worker() -> None:
    """The cache works on for the others."""
    run("worker_dies", **STORE)


def test_clear_is_the_writers() -> None:
    """Readers' does nothing; older handles are good until their space is used again."""
    run("cleared", **STORE)


def test_forged_signatures_are_refused() -> None:
    """Made as vLLM makes them, and refused if anything is forged."""
    run("documented_signature", "forged", **STORE)


def test_switching_in_part_names_the_variable() -> None:
    """The side that differs says which variable to set, before it gets anything."""
    run("half_switched", **STORE)
    run("half_switched_the_other_way")


def test_no_handle_carries_the_secret() -> None:
    """No handle carries the secret. vLLM sends none: its workers know the store by its name."""
    run("handles", **STORE)


def test_the_name_of_a_killed_client_is_swept() -> None:
    """It is swept by the next one."""
    run("killed", **STORE)


@pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
def test_a_full_shm_costs_cached_objects_only() -> None:
    """It costs what is cached, and is no SIGBUS when others take the space."""
    run("full_shm", interpreter=private_shm("128m"), **STORE)
