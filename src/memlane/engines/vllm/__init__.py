"""vLLM on memlane: the plugin that vLLM finds by itself, and one module for each system.

`MEMLANE_VLLM=queue` switches the queue on, `all` every system that this vLLM has; unset or empty,
nothing is changed and nothing imported.
"""

from __future__ import annotations

import os


def register() -> None:
    """The entry point of `vllm.general_plugins`: called in the client, EngineCore and each worker,
    more than once in a process if need be.

    Raises:
        InvalidArgument: the variable names something that is no system, or one that is not there.
    """
    text = os.environ.get("MEMLANE_VLLM", "").strip()
    if text:
        from memlane.engines._switching import switch_on
        from memlane.engines.vllm._engine import VLLM

        switch_on(VLLM, text)
