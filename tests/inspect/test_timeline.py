"""The spans of `memlane trace`, from samples."""

import os
import stat
from pathlib import Path

import pytest

from memlane.cli.trace import Track, doing
from memlane.cli.writing import replacing

pytestmark = pytest.mark.unit

ATTACHED, CLOSED = 1, 2
LEFT = 1 << 31  # a mark above the count of views


@pytest.mark.parametrize(
    ("seen", "what"),
    [
        ((ATTACHED, 0, 0), None),
        ((ATTACHED, 1, 0), "waiting"),
        ((ATTACHED, 2, 0), "waiting for all to attach"),
        ((ATTACHED, 3, 0), "holding"),
        ((ATTACHED, 4, 1), "copying"),
        ((ATTACHED, 5, 1), "decoding"),
        ((ATTACHED, 0, 2), "holding"),
        ((ATTACHED, 0, LEFT), None),
        ((ATTACHED, 99, 0), None),
        ((CLOSED, 1, 0), None),
        ((0, 1, 0), None),
    ],
)
def test_what_a_sample_shows(seen: tuple[int, int, int], what: str | None) -> None:
    assert doing(*seen) == what


def test_equal_samples_are_one_span() -> None:
    """It lasts until the first sample that differs, and says what went by."""
    track = Track(7, 1, "writer")
    samples = [("waiting", 5), ("waiting", 5), ("copying", 5), (None, 6), (None, 7), ("waiting", 9)]
    for number, (what, position) in enumerate(samples):
        track.sample(number / 1000, what, position)
    track.end(0.010, 9)
    track.end(0.020, 9)
    assert [(e["name"], e["ts"], e["dur"], e["args"]["messages"]) for e in track.events] == [
        ("waiting", pytest.approx(0), pytest.approx(2000), 0),
        ("copying", pytest.approx(2000), pytest.approx(1000), 1),
        ("waiting", pytest.approx(5000), pytest.approx(5000), 0),
    ]
    assert {(event["pid"], event["tid"], event["ph"]) for event in track.events} == {(7, 1, "X")}


def test_the_file_is_not_written_through_links(tmp_path: Path) -> None:
    """Others who may write to the folder can put links there, to files of the command's user."""
    precious, output = tmp_path / "precious", tmp_path / "trace.json"
    precious.write_text("precious")
    (tmp_path / f".trace.json.{os.getpid()}").symlink_to(precious)
    output.symlink_to(precious)
    with replacing(output) as file:
        file.write("{}")
        assert output.read_text() == "precious"
    assert precious.read_text() == "precious"
    assert (output.read_text(), output.is_symlink()) == ("{}", False)
    assert stat.S_IMODE(output.stat().st_mode) == 0o600


def test_a_file_that_was_not_finished_does_not_stay(tmp_path: Path) -> None:
    output = tmp_path / "trace.json"
    with pytest.raises(ZeroDivisionError), replacing(output):
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []
