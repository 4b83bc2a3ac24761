"""vLLM on memlane: the plugin that vLLM finds by itself, and one module for each system.

`MEMLANE_VLLM=queue` switches the queue on, `store` the object store, `region` the offload region,
`all` every system that there is for this vLLM; unset or empty, nothing is changed and nothing
imported. Where versions of vLLM differ, `VLLM` says so; names and callers are the same in all of
them, but for arguments of the region (`region.py`).
"""

import hashlib
import os
import re

from memlane._segments import NAME_PREFIX
from memlane.engines._switching import SYSTEMS, Engine, switch_on

VLLM = Engine(
    name="vLLM",
    package="vllm",
    variable="MEMLANE_VLLM",
    tested={"0.32": SYSTEMS, "0.33": SYSTEMS},
    own_address="vllm.utils.network_utils:get_ip",  # which VLLM_HOST_IP decides
    same_node="vllm.distributed.parallel_state:in_the_same_node_as",
)


def register() -> None:
    """The entry point of `vllm.general_plugins`: called in the client, EngineCore and each worker,
    more than once in a process if need be.

    Raises:
        InvalidArgument: the variable names something that is no system, or one that is not there;
            or the engine's object store is memlane's, and this process would look for vLLM's own.
    """
    switch_on(VLLM)
    # Workers know the store by its name alone, so this is how they learn of its writer.
    name = os.environ.get("VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME")
    if name and os.path.exists(f"/dev/shm/{store_name(name)}"):
        VLLM.check_arrival("store")


def store_name(name: str) -> str:
    """Of the segment behind a name that vLLM has chosen; one that memlane has chosen stays."""
    if re.fullmatch(f"{NAME_PREFIX}[0-9a-f]{{32}}", name):
        return name
    return NAME_PREFIX + hashlib.sha256(name.encode()).hexdigest()[:32]
