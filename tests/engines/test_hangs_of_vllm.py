"""`memlane stuck` beside a real vLLM that hangs on purpose, with its own queues and with memlane's.

Runs with MEMLANE_REAL_HANGS=1 after `make engines`: half an hour. The table of the manual is from
`python -m tests.engines.hangs_of_vllm`.
"""

import os

import pytest
from benchmarks.engines import environment

from tests.engines.hanging_vllm import SCENES
from tests.engines.hangs_of_vllm import QUEUES, hanging, stuck
from tests.support.missing import needed

pytestmark = needed(
    "a real vLLM",
    (environment.HERE / "venv/vllm-0.32.0").exists() and "MEMLANE_REAL_HANGS" in os.environ,
)


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("queue", QUEUES)
def test_the_process_that_hangs_is_named_or_among_those_that_may(queue: str, scene: str) -> None:
    with hanging(scene, queue) as pids:
        for words in ((), ("--no-stacks",)):
            said = stuck(pids, *words)
            assert said.is_right(scene), said.output
