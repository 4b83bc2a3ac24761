"""SGLang on memlane: `MEMLANE_SGLANG=queue`, as for vLLM (`memlane.engines.vllm`)."""

from memlane.engines._switching import Engine, switch_on
from memlane.errors import InvalidArgument

SGLANG = Engine(
    name="SGLang",
    package="sglang",
    variable="MEMLANE_SGLANG",
    tested={"0.5": ("queue",)},
    own_address="sglang.srt.utils.network:get_local_ip_auto",  # which SGLANG_HOST_IP decides
    same_node="sglang.srt.distributed.parallel_state:in_the_same_node_as",
)


def register() -> None:
    """The entry point of `sglang.srt.plugins`, called early in every process.

    SGLang logs a plugin's exception and continues, so a wrong variable ends the process instead.
    """
    try:
        switch_on(SGLANG)
    except InvalidArgument as error:
        raise SystemExit(str(error)) from None
