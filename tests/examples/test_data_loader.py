"""The data loader, run as it stands."""

import re
import subprocess
import sys
from pathlib import Path

from tests.examples.demo import RUN
from tests.support.queues import segments

EXAMPLE = Path(__file__).parents[2] / "examples" / "data_loader.py"


def test_data_loader() -> None:
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


KILLED = """
import os, signal, sys, tempfile
sys.path[:0] = sys.argv[1:]
import numpy as np
from data_loader import Loader
from tests.support import until
with tempfile.TemporaryDirectory() as folder:
    for number in range(40):
        np.save(f"{folder}/{number}.npy", np.full((3, 8, 8), number, np.uint8))
    loader = Loader(folder, 2)
    loader.want(list(range(20)))
    # All are sent, and none is read.
    until(lambda: sum(writer.behind for writer in loader._samples.statistics().writers) == 20)
    os.kill(loader.processes[1].pid, signal.SIGKILL)
    loader.processes[1].join()
    # The next plan finds it dead.
    until(lambda: loader._plans.statistics().readers[1].state == "dead")
    loader.want(list(range(20, 40)))
    print(sorted(loader.take()[0] for _ in range(40)) == list(range(40)))
    loader.close()
"""


def test_a_worker_whose_samples_are_not_read() -> None:
    """Dies before the next plan is sent: what it had sent counts, and it is replaced."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(EXAMPLE.parent), str(EXAMPLE.parents[1])],
        capture_output=True,
        text=True,
        timeout=RUN,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["True"]), done.stderr
