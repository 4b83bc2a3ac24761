"""Values of vLLM's shared image cache, as its processors make them."""

from __future__ import annotations

from typing import Any

import torch


def item(seed: int, nbytes: int) -> Any:
    """Returns an image: so many bytes that follow from the seed."""
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
    )

    pixels = torch.arange(seed, seed + nbytes).to(torch.uint8)
    return MultiModalKwargsItem(
        {"image": MultiModalFieldElem(data=pixels, field=MultiModalBatchedField())}
    )


def same(one: Any, other: Any) -> bool:
    """Returns whether they are equal bit for bit."""
    return set(one) == set(other) and all(torch.equal(one[k].data, other[k].data) for k in one)
