"""Workers' output, with a prefix for each line."""

import os
import signal

import pytest

from memlane import InvalidArgument, WorkerDied, WorkerGroup
from tests.support import PATIENCE, Link, start
from tests.workers.roles import Model
from tests.workers.test_calls import group_of

LINES = 200


def printing(_link: Link, start_method: str) -> None:
    """Role: has a group whose workers print, and of which one is killed."""
    with WorkerGroup(
        Model, 2, start_method=start_method, prefix="<{rank}> ", timeout=PATIENCE
    ) as group:
        group.call(Model.prints, LINES)
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            group.check(PATIENCE)


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_each_line_has_its_prefix(start_method: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever has printed it, also a line without an end of a worker that is killed; no line is
    split, and none is lost."""
    start(printing, start_method).result()
    out, error = capfd.readouterr()
    assert [line for line in error.splitlines() if "an error" in line] in (
        ["<0> an error", "<1> an error"],
        ["<1> an error", "<0> an error"],
    )
    for rank in range(2):
        mine = [line for line in out.splitlines() if line.startswith(f"<{rank}> ")]
        expected = [f"line {number}" for number in range(LINES)]
        assert mine == [
            f"<{rank}> {line}" for line in [*expected, "half a line", "of a child", "no end"]
        ]
    assert len(out.splitlines()) == 2 * (LINES + 3)


def test_a_prefix_that_is_none() -> None:
    """It is refused before a worker starts, as is one for workers of another program."""
    for wrong in ("{name}", "{", "{0}"):
        with pytest.raises(InvalidArgument, match="prefix may have"):
            group_of(1, prefix=wrong)
    with pytest.raises(InvalidArgument, match="no prefix"):
        WorkerGroup(None, 1, start=lambda ticket: None, prefix="{rank}")
