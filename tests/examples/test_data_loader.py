"""The data loader, run as it stands."""

import re
import subprocess
import sys
from pathlib import Path

from tests.examples.demo import RUN
from tests.support.queues import segments

EXAMPLE = Path(__file__).parents[2] / "examples" / "data_loader.py"


def test_every_sample_arrives_once() -> None:
    """Every sample arrives once, although a worker was killed."""
    before = segments()
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--samples", "128"],
        capture_output=True,
        text=True,
        timeout=RUN,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"worker 2 \(pid \d+\) died and owed \d+ samples; replaced by", done.stdout)
    assert "128 samples in 8 batches, 0 missing, 0 twice" in done.stdout
    assert "Traceback" not in done.stderr
    assert segments() == before
