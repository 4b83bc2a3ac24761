"""The camera, run as it stands."""

import re
import subprocess
import sys
from pathlib import Path

from tests.examples.demo import RUN
from tests.support.queues import segments

EXAMPLE = Path(__file__).parents[2] / "examples" / "camera.py"


def test_all_viewers_see_the_latest_frame() -> None:
    """All see the latest frame, however slow they are; one that dies is replaced."""
    before = segments()
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--frames", "60", "--rate", "30"],
        capture_output=True,
        text=True,
        timeout=RUN,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = {
        name: (int(frames), int(skipped), int(kept), int(last))
        for name, frames, skipped, kept, last in re.findall(
            r"(\w+) +saw (\d+) frames, skipped (\d+); .* keeps (\d+), the last is (\d+)\n",
            done.stdout,
        )
    }
    assert seen.keys() == {"controller", "viewer", "recorder"}
    for name in ("controller", "recorder"):  # they skip what comes while they do not run
        assert sum(seen[name][:2]) == 61
    assert seen["recorder"][2] == min(seen["recorder"][0], 10)
    assert {last for *_, last in seen.values()} == {60}
    assert re.search(r"viewer \(pid \d+\) died; another takes its place", done.stdout)
    assert "torn" not in done.stdout
    assert "Traceback" not in done.stderr
    assert segments() == before
