"""Ray actors on two nodes, which are hosts connected by a cable."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from examples.lab import Cable, Host

from tests.support import PATIENCE, assert_in_time
from tests.support.missing import needed
from tests.support.queues import segments

DRIVER = Path(__file__).parent / "ray_driver.py"
RAY = Path(sys.executable).parent / "ray"
LIVENESS = 2.0  # of the driver's queues, in seconds

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.soak(seconds=300),
    needed("ray", find_spec("ray") is not None),
]


@contextmanager
def node(folder: str, *words: str, on: tuple[str, ...] = ()) -> Iterator[None]:
    """A raylet, and with `--head` what a cluster has once; all of it ends."""
    command = [*on, "setsid", str(RAY), "start", "--block", "--disable-usage-stats", *words]
    with (Path(folder) / "raylets").open("a") as log:
        process = subprocess.Popen(command, env=environment(folder), stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


def environment(folder: str, **more: str) -> dict[str, str]:
    own = {"RAY_TMPDIR": folder, "HOME": folder, "RAY_AUTH_MODE": "disabled"}
    return {**os.environ, **own, **more}


def totals(*ranks: int) -> dict[str, int]:
    """Returns what these answer."""
    return {str(rank): sum(range(10)) + rank for rank in ranks}


def test_an_actor_and_a_node_are_lost() -> None:
    """They are named in time, and all others go on."""
    before = segments()
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="ray-"))  # sockets want short paths
        other = stack.enter_context(Host())
        cable = stack.enter_context(Cable(None, other))
        here, there = cable.addresses
        head = f"{here}:6379"
        common = ("--num-cpus=1", "--object-store-memory=80000000")
        near, far = '--resources={"near": 2}', '--resources={"far": 3}'
        stack.enter_context(
            node(
                folder,
                "--head",
                f"--node-ip-address={here}",
                "--include-dashboard=0",
                near,
                *common,
            )
        )
        stack.enter_context(
            node(
                folder,
                *(f"--address={head}", f"--node-ip-address={there}", far, *common),
                on=other.command,
            )
        )
        driver = stack.enter_context(
            subprocess.Popen(
                [sys.executable, str(DRIVER)],
                env=environment(folder, RAY_ADDRESS=head),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        said: list[dict[str, Any]] = []
        for line in driver.stdout:
            if not line.startswith("{"):
                continue  # Ray speaks there, too
            said.append(json.loads(line))
            if "take" in said[-1]:
                cable.pull()
                print(file=driver.stdin, flush=True)
            if "named" in said[-1]:
                assert_in_time(1.0, *said[-1]["named"][1:])
            if "lost" in said[-1]:
                assert_in_time(LIVENESS + 1.0, *said[-1]["lost"][1:])
        cable.plug()  # or the far node would wait for the head, and not end
        assert driver.wait(PATIENCE) == 0, said
    assert said[0] == {"local": [0, 1]}
    assert said[1] == {"step": totals(0, 1, 2, 3, 4)}
    assert (said[2]["named"][0], said[3]) == (1, {"step": totals(0, 2, 3, 4)})
    assert (said[4]["named"][0], said[5]) == (2, {"step": totals(0, 3, 4)})
    assert {said[7]["lost"][0], said[8]["lost"][0]} == {3, 4}
    assert said[9:] == [{"step": totals(0)}, {"ended": 0}]
    assert segments() == before
