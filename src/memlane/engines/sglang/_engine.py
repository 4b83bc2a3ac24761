"""What is tested with which SGLang."""

from memlane.engines._switching import Engine

SGLANG = Engine(
    name="SGLang",
    package="sglang",
    variable="MEMLANE_SGLANG",
    tested={"0.5": ("queue",)},
)
