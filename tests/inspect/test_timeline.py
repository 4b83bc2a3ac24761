"""The spans of `memlane trace`, from samples."""

import pytest

from memlane.cli.trace import Track, doing

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
