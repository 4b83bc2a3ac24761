"""vLLM on memlane: the plugin that vLLM discovers, and one module for each system.

`MEMLANE_VLLM=queue` switches the queue on, `store` the object store, `region` the offload region,
`all` every system that memlane has for this vLLM; unset or empty changes and imports nothing: every
process of vLLM imports this file, so it imports nothing either. `MEMLANE_METRICS_PORT` starts
`memlane export` beside the first of them.
Names and callers are the same in 0.24 to 0.33, except for the store's signatures (`store.py`) and
names of the region's arguments (`region.py`).
"""

import os

from memlane._importing import fork_waits

VARIABLE = "MEMLANE_VLLM"
STORE_NAME = "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"  # set by vLLM in processes that use a store


def register() -> None:
    """The entry point of `vllm.general_plugins`: called in the client, EngineCore and each worker,
    possibly more than once in a process.

    Raises:
        InvalidArgument: the variable names an unknown system, or one that this vLLM lacks; or the
            engine's object store is memlane's, but this process would look for vLLM's own.
    """
    if os.environ.get("MEMLANE_METRICS_PORT"):
        with fork_waits:
            from memlane.engines._metrics import start_if_asked

        start_if_asked()
    if os.environ.get(VARIABLE, "").strip() or os.environ.get(STORE_NAME):
        with fork_waits:
            from memlane.engines.vllm._engine import switch

        switch()
