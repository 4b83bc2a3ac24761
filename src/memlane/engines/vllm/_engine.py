"""What is tested with which vLLM. Where versions differ, they differ here.

The queue's callers and names are the same in all of them.
"""

from memlane.engines._switching import Engine

VLLM = Engine(
    name="vLLM",
    package="vllm",
    variable="MEMLANE_VLLM",
    tested={"0.32": ("queue",), "0.33": ("queue",)},
)
