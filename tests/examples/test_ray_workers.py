"""The Ray example, run as it stands."""

import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.demo import RUN
from tests.support.missing import needed
from tests.support.queues import segments

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_workers.py"


@pytest.mark.slow
@needed("ray", find_spec("ray") is not None)
def test_every_step_of_ray_workers_is_answered() -> None:
    """Every step is answered; the killed worker is named, and nothing is left behind."""
    before = segments()
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # its sockets need a short path
        done = subprocess.run(
            [sys.executable, str(EXAMPLE)],
            env={**os.environ, "RAY_TMPDIR": folder, "HOME": folder},
            capture_output=True,
            text=True,
            timeout=RUN,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    totals = [sum(range(1000 * step, 1000 * step + 1000)) for step in range(3)]
    answers = re.findall(r"step \d: \{0: (\d+), 1: (\d+)\}", done.stdout)
    assert [int(one) + int(two) for one, two in answers] == totals
    assert re.search(r"worker 1: .*pid \d+\) died", done.stdout)
    assert len(re.findall(r"step \d: \{0: \d+\}", done.stdout)) == 3
    assert "worker 0 took 6 of 6 steps" in done.stdout
    assert segments() == before
