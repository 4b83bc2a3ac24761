"""The image server, run as it stands, and a death at one moment of it."""

import asyncio
import gc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memlane import PeerDied
from tests.examples.demo import RUN
from tests.support.missing import needs
from tests.support.queues import segments

pytest.importorskip("fastapi", reason=needs("fastapi"))
pytest.importorskip("httpx", reason=needs("httpx"))

EXAMPLE = Path(__file__).parents[2] / "examples" / "image_server.py"


def test_image_server() -> None:
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


class Died(PeerDied):
    """Without what it says."""

    def __init__(self) -> None:
        Exception.__init__(self)


def test_a_worker_that_dies_while_it_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    """What failed is the sending; asyncio has nothing to say of an answer that nobody awaited."""
    from image_server import Worker

    async def die() -> Any:
        raise Died
        yield

    async def scene() -> None:
        worker: Any = Worker(1, *3 * [None])  # type: ignore[arg-type]
        worker._answers, sends = die(), asyncio.Event()

        async def send(*_: object) -> None:
            await sends.wait()
            raise Died

        worker._send = send
        asked = asyncio.create_task(worker.mean_of(None))
        await asyncio.sleep(0)
        await worker.deliver()
        sends.set()
        with pytest.raises(Died):
            await asked

    asyncio.run(scene())
    gc.collect()
    assert not caplog.records
