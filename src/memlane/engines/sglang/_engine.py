"""The adapter's knowledge of SGLang."""

from memlane.engines._switching import Engine
from memlane.engines.sglang import VARIABLE

SGLANG = Engine(
    name="SGLang",
    package="sglang",
    variable=VARIABLE,
    tested={"0.5": ("queue",)},
    own_address="sglang.srt.utils.network:get_local_ip_auto",  # which SGLANG_HOST_IP decides
    same_node="sglang.srt.distributed.parallel_state:in_the_same_node_as",
)
