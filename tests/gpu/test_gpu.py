"""memlane on a GPU (`make gpu`); skipped where torch finds none."""

from collections.abc import Callable

import pytest
from benchmarks.gpu.device import Device

from tests.gpu.scenes import SCENES, SIZED_SCENES, pinned_region
from tests.support.regions import PAGE


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_each_scene_goes_well(gpu: Device, scene: Callable[..., None]) -> None:
    scene(gpu)


@pytest.mark.parametrize(
    ("scene", "nbytes"),
    [(scene, nbytes) for scene, sizes in SIZED_SCENES.items() for nbytes in sizes],
    ids=lambda one: one if isinstance(one, int) else one.__name__,
)
def test_each_sized_scene_goes_well(gpu: Device, scene: Callable[..., None], nbytes: int) -> None:
    scene(gpu, nbytes)


def test_views_are_pinned_to_torch(gpu: Device) -> None:
    """So that torch's own copies of them need not block."""
    with pinned_region() as region:
        view = region.create_next_view(PAGE)
        assert view.is_pinned()
        assert view.to("cuda", non_blocking=True).cpu().equal(view)
        region.unpin()
        assert not view.is_pinned()
        del view
