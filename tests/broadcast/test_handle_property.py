"""Handles as text: any input gives a handle or a ValueError."""

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlane import Handle, MessageQueue

pytestmark = pytest.mark.property

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


def genuine() -> dict[str, Any]:
    with MessageQueue(2, 2, [4, 7], 64, 2) as writer:
        facts: dict[str, Any] = json.loads(writer.export_handle().to_json())
    return facts


FACTS = genuine()


def is_refused(text: str) -> bool:
    try:
        handle = Handle.from_json(text)
    except ValueError:
        return True
    # What is taken is a handle that can be passed on.
    assert Handle.from_json(handle.to_json()) == handle
    assert pickle.loads(pickle.dumps(handle)) == handle
    return False


@given(text=st.text())
def test_any_other_text_is_refused(text: str) -> None:
    """Arbitrary text is refused as a ValueError."""
    assert is_refused(text)


@given(value=JSON)
def test_any_other_json_is_refused(value: object) -> None:
    """Arbitrary JSON is refused as a ValueError: a handle has a version."""
    assert is_refused(json.dumps(value))


@given(name=st.sampled_from(sorted(FACTS)), value=JSON)
def test_any_value_in_any_field_is_taken_or_refused(name: str, value: object) -> None:
    """A handle with one field replaced is still a handle, or a ValueError."""
    is_refused(json.dumps({**FACTS, name: value}))


@given(name=st.sampled_from(sorted(FACTS)))
def test_fields_may_not_be_doubled_or_lost_silently(name: str) -> None:
    """A handle without a field gets that field's default, or is refused."""
    is_refused(json.dumps({key: value for key, value in FACTS.items() if key != name}))
    assert not is_refused(json.dumps(FACTS))


@given(
    ranks=st.lists(st.integers(0, 2**31 - 1), max_size=4),
    ring=st.none()
    | st.tuples(
        st.integers(1, 100), st.integers(1, 2**40), st.integers(1, 2**20), st.text(max_size=30)
    ),
)
def test_round_trip(ranks: list[int], ring: tuple[int, int, int, str] | None) -> None:
    """A handle that was made by hand comes back equal, or is refused: it never changes."""
    handle = Handle(ranks, ring)
    try:
        again = Handle.from_json(handle.to_json())
    except ValueError:
        return
    assert again == handle
