"""Views of stored objects, in another process."""

import sys

import pytest

from memlane import (
    Unsupported,
)
from tests.support import Link, start
from tests.support.missing import package
from tests.support.queues import refuses
from tests.support.stores import is_evicted, store_of

pytestmark = pytest.mark.wheel


def ask_for_release_after(_link: Link, what: str) -> str:
    """Role: hand the end of a view to a GPU that is not there; what that said."""
    if what == "torch":
        assert "torch" in sys.modules
    else:
        sys.modules["torch"] = None  # type: ignore[assignment]  # not installed
    with store_of() as (writer, (reader,)):
        block = reader.view(*writer.put("k", b"x"))
        with block as view:
            with refuses(Unsupported) as caught:
                block.release_after(object())
            assert bytes(view) == b"x"
            del view
        assert writer.statistics().readers[0].outstanding == 0
        assert is_evicted(writer)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"), [("torch", "torch finds none here"), ("nothing", "has not imported torch")]
)
def test_release_after_without_a_gpu_names_what_is_missing(what: str, text: str) -> None:
    """The error says what is missing, torch or the GPU; the block ends as usual."""
    if what == "torch" and package("torch").cuda.is_available():
        pytest.skip("there is a GPU")
    method = "fork" if what == "torch" else "spawn"
    assert text in start(ask_for_release_after, what, method=method).result()
