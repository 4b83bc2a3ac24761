"""vLLM on memlane: the plugin that vLLM finds by itself, and one module for each system.

`MEMLANE_VLLM=queue` switches the queue on, `store` the object store, `region` the offload region,
`all` every system that there is for this vLLM; unset or empty, nothing is changed and nothing
imported.
"""

from __future__ import annotations

import os


def register() -> None:
    """The entry point of `vllm.general_plugins`: called in the client, EngineCore and each worker,
    more than once in a process if need be.

    Raises:
        InvalidArgument: the variable names something that is no system, or one that is not there;
            or the engine's object store is memlane's, and this process would look for vLLM's own.
    """
    text = os.environ.get("MEMLANE_VLLM", "").strip()
    if text:
        from memlane.engines._switching import switch_on
        from memlane.engines.vllm._engine import VLLM

        switch_on(VLLM, text)
    name = os.environ.get("VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME")
    if name:
        from memlane.engines.vllm._engine import check_store

        check_store(name)
