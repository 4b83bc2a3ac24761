"""Runs a scenario in its own process."""

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from memlane.engines.vllm._engine import VLLM
from tests.engines import sources
from tests.engines.warm import server
from tests.support import PATIENCE
from tests.support.missing import needed

RELEASES = pytest.mark.parametrize("release", ["0.32", "0.33"])
# `make engines` fetches those that `make test` does without.
EVERY_RELEASE = pytest.mark.parametrize(
    "release",
    [
        pytest.param(
            release,
            marks=needed(
                "other releases of vLLM",
                release in sources.USUAL or (sources.HERE / release).exists(),
            ),
        )
        for release in VLLM.tested
    ],
)
ROOT = Path(__file__).parents[2]


def replacements_in(log: str) -> list[str]:
    """Returns what the plugin's lines say; those of older releases begin with a time and a
    place."""
    return re.findall(r"INFO (?:\S+ \S+ \[\S+\] )?(.* is memlane's.*)", log)


def run(
    *names: str,
    release: str = "0.33",
    file: str | None = None,
    interpreter: Sequence[str] | None = None,
    fails: bool = False,
    **environment: str,
) -> str:
    """Returns what the scenarios wrote to both streams; they must end well, or badly if it `fails`.

    `interpreter`: the command of a new one, in place of a fork of one that has imported torch.
    """
    sources.engine(release)
    file = file or f"{sources.PACKAGES[release]}_scenarios"
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "SGLANG_", "MEMLANE_"))
    }
    environment = {**clean, "VLLM_HOST_IP": "127.0.0.1", **environment}
    if interpreter is None:
        status, output = server().run([release, file, *names], environment, 5 * PATIENCE)
        assert (status != 0) == fails, output
        return output
    process = subprocess.Popen(
        [*interpreter, "-m", "tests.engines", release, file, *names],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=5 * PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert (process.returncode != 0) == fails, output
    return output
