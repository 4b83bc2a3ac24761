"""The scenes of `tests/gpu`, against the stand-in for CUDA's runtime.

This shows that the scenes are right, and that memlane keeps CUDA's rules; not that a GPU does.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.scenes import SCENES, SIZED_SCENES
from tests.support.cuda import stand_in, with_runtime
from tests.support.gpus import StandIn
from tests.support.regions import PAGE


@pytest.fixture(scope="module")
def library() -> Path:
    return stand_in()


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_each_scene_goes_well(library: Path, scene: Callable[..., None]) -> None:
    with_runtime(library, lambda _fake: scene(StandIn(library)))


@pytest.mark.parametrize("scene", SIZED_SCENES, ids=lambda scene: scene.__name__)
def test_each_sized_scene_goes_well(library: Path, scene: Callable[..., None]) -> None:
    with_runtime(library, lambda _fake: scene(StandIn(library), 64 * PAGE))
