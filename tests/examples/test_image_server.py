"""The image server, run as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.demo import RUN
from tests.support.missing import needs
from tests.support.queues import segments

pytest.importorskip("fastapi", reason=needs("fastapi"))
pytest.importorskip("httpx", reason=needs("httpx"))

EXAMPLE = Path(__file__).parents[2] / "examples" / "image_server.py"


def test_every_answer_of_the_image_server_is_right() -> None:
    """Every answer is right, also after a worker was killed, and nothing is left behind."""
    before = segments()
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=RUN,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "80 right answers, 40 images" in done.stdout
    assert re.search(r"40 right answers after worker \d+ was killed", done.stdout)
    assert "1 bytes are no 3 x 5 RGB image" in done.stdout
    assert "Traceback" not in done.stderr
    assert segments() == before
