"""The adapters' knowledge of vLLM, and the body of its plugin."""

import hashlib
import os
import re

from memlane._base.segments import NAME_PREFIX
from memlane.engines._switching import SYSTEMS, Engine, switch_on
from memlane.engines.vllm import STORE_NAME, VARIABLE

VLLM = Engine(
    name="vLLM",
    package="vllm",
    variable=VARIABLE,
    tested={f"0.{minor}": SYSTEMS for minor in range(24, 34)},
    own_address="vllm.utils.network_utils:get_ip",  # which VLLM_HOST_IP decides
    same_node="vllm.distributed.parallel_state:in_the_same_node_as",
)


def switch() -> None:
    """Switches on what the variable asks for, and checks whose store this process will look for."""
    switch_on(VLLM)
    # Workers know the store only by its name, so the name must tell whose it is.
    name = os.environ.get(STORE_NAME)
    if name and os.path.exists(f"/dev/shm/{store_name(name)}"):
        VLLM.check_arrival("store")


def store_name(name: str) -> str:
    """The segment's name for a name that vLLM chose; a name that memlane chose is kept."""
    if re.fullmatch(f"{NAME_PREFIX}[0-9a-f]{{32}}", name):
        return name
    return NAME_PREFIX + hashlib.sha256(name.encode()).hexdigest()[:32]
