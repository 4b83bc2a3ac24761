"""What is tested with which vLLM. Where versions differ, they differ here.

Callers and names are the same in all of them, but for arguments of the region (`region.py`).
"""

import hashlib
import os
import re

from memlane._segments import NAME_PREFIX
from memlane.engines._handles import arrives_where
from memlane.engines._switching import SYSTEMS, Engine

VLLM = Engine(
    name="vLLM",
    package="vllm",
    variable="MEMLANE_VLLM",
    tested={"0.32": SYSTEMS, "0.33": SYSTEMS},
)


def store_name(name: str) -> str:
    """Of the segment behind a name that vLLM has chosen; one that memlane has chosen stays."""
    if re.fullmatch(f"{NAME_PREFIX}[0-9a-f]{{32}}", name):
        return name
    return NAME_PREFIX + hashlib.sha256(name.encode()).hexdigest()[:32]


def check_store(name: str) -> None:
    """Workers know the store by its name alone, so this is how they learn of its writer.

    Raises:
        InvalidArgument: it is memlane's, but this process would look for vLLM's own.
    """
    if os.path.exists(f"/dev/shm/{store_name(name)}"):
        arrives_where(VLLM.variable, "store")
