"""SGLang's own modules on memlane."""

import re

from tests.engines.running import run


def test_every_importer_is_rebound() -> None:
    """By SGLang's plugins, once; the replacement is one line."""
    log = run("through_plugins", release="0.5", MEMLANE_SGLANG="queue")
    assert re.findall(r"INFO (.* is memlane's.*)", log) == [
        "sglang.srt.distributed.device_communicators.shm_broadcast.MessageQueue is memlane's, also "
        "in an_early_importer"
    ]


def test_objects_reach_all_ranks_of_a_group() -> None:
    """One rank's objects to all others."""
    run("group", release="0.5")


def test_groups_that_are_switched_in_part() -> None:
    """An error that names the variable, whichever side the writer is on."""
    log = run("half_switched", release="0.5")
    assert len(re.findall(r"errors.Invalid.*MEMLANE_SGLANG=queue in every process", log)) == 2, log


def test_words_that_lead_nowhere_are_refused() -> None:
    """SGLang goes on when a plugin raises; it does not start with these."""
    assert "memlane has no 'quue' for SGLang 0.5" in run(
        "switched", release="0.5", fails=True, MEMLANE_SGLANG="quue"
    )
    assert "memlane has no 'store' for SGLang 0.5; choose from queue" in run(
        "switched", release="0.5", fails=True, MEMLANE_SGLANG="store"
    )


def test_newer_versions_are_tried_and_older_ones_declined() -> None:
    """Each with one warning."""
    log = run("switched", release="0.5", MEMLANE_SGLANG="all", TEST_VERSION="0.6.1")
    assert log.count("memlane is tested with SGLang 0.5, and tries 0.6.1") == 1
    assert "MessageQueue is memlane's" in log
    log = run("switched", release="0.5", MEMLANE_SGLANG="all", TEST_VERSION="0.4.9")
    assert log.count("memlane is tested with SGLang 0.5, and this is 0.4.9") == 1
