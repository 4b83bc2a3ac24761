"""vLLM on memlane: the plugin that vLLM discovers, and one module for each system.

`MEMLANE_VLLM=queue` switches the queue on, `store` the object store, `region` the offload region,
`all` every system that memlane has for this vLLM; unset or empty changes and imports nothing.
`VLLM` holds what differs between versions; names and callers are the same in all of them, except
for arguments of the region (`region.py`).
"""

import hashlib
import os
import re

from memlane._base.segments import NAME_PREFIX
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
    possibly more than once in a process.

    Raises:
        InvalidArgument: the variable names an unknown system, or one that this vLLM lacks; or the
            engine's object store is memlane's, but this process would look for vLLM's own.
    """
    switch_on(VLLM)
    # Workers know the store only by its name, so the name must tell whose it is.
    name = os.environ.get("VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME")
    if name and os.path.exists(f"/dev/shm/{store_name(name)}"):
        VLLM.check_arrival("store")


def store_name(name: str) -> str:
    """The segment's name for a name that vLLM chose; a name that memlane chose is kept."""
    if re.fullmatch(f"{NAME_PREFIX}[0-9a-f]{{32}}", name):
        return name
    return NAME_PREFIX + hashlib.sha256(name.encode()).hexdigest()[:32]
