"""Handles exchanged between a process switched to memlane and one that is not."""

import os
import pickle
from typing import Any

import pytest

SYSTEMS = {"queue", "store", "region"}


def received_only_where_switched_on(sent: bytes, system: str) -> Any:
    """Returns what the pickled handle is where everything is switched on; all else says what to
    set."""
    for other in ("", *sorted(SYSTEMS - {system})):
        os.environ["MEMLANE_VLLM"] = other
        with pytest.raises(ValueError, match=f"set MEMLANE_VLLM={system} in every process"):
            pickle.loads(sent)
    os.environ["MEMLANE_VLLM"] = "all"
    return pickle.loads(sent)
