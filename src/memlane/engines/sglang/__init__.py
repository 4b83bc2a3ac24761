"""SGLang on memlane: `MEMLANE_SGLANG=queue`, as for vLLM (`memlane.engines.vllm`)."""

from __future__ import annotations

import os


def register() -> None:
    """The entry point of `sglang.srt.plugins`: called early in every process.

    SGLang logs what a plugin raises, and goes on; a variable that leads nowhere ends the process.
    """
    text = os.environ.get("MEMLANE_SGLANG", "").strip()
    if not text:
        return
    from memlane.engines._switching import switch_on
    from memlane.engines.sglang._engine import SGLANG
    from memlane.errors import InvalidArgument

    try:
        switch_on(SGLANG, text)
    except InvalidArgument as error:
        raise SystemExit(str(error)) from None
