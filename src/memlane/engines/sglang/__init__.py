"""SGLang on memlane: `MEMLANE_SGLANG=queue`, as for vLLM (`memlane.engines.vllm`).

Every process of SGLang imports this file, so it imports nothing unless the variable is set.
"""

import os

from memlane._importing import fork_waits

VARIABLE = "MEMLANE_SGLANG"


def register() -> None:
    """The entry point of `sglang.srt.plugins`, called early in every process.

    SGLang logs a plugin's exception and continues, so a wrong variable ends the process instead.
    """
    if not os.environ.get(VARIABLE, "").strip():
        return
    with fork_waits:
        from memlane.engines._switching import switch_on
        from memlane.engines.sglang._engine import SGLANG
        from memlane.errors import InvalidArgument

    try:
        switch_on(SGLANG)
    except InvalidArgument as error:
        raise SystemExit(str(error)) from None
