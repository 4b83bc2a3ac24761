"""The suite for tiers finds a tier that lies: each lie fails the test that is about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane.tiers import DiskTier, Done, TierPin, conformance
from memlane.tiers.conformance import TierConformance
from tests.support.disk_tiers import capacity_of


class FindsEverything(DiskTier):
    """Reports loads of keys that it has not."""

    def poll(self) -> list[Done]:
        return [dataclasses.replace(d, ok=np.ones_like(d.ok)) for d in super().poll()]


class ReportsTwice(DiskTier):
    """Reports whatever it has reported before."""

    def poll(self) -> list[Done]:
        self.before = [*getattr(self, "before", []), *super().poll()]
        return self.before


class Loses(DiskTier):
    """Reports nothing of every other call that is done at once."""

    def poll(self) -> list[Done]:
        return super().poll()[::2]


class ForgetsNothing(DiskTier):
    def forget(self, keys: Sequence[bytes]) -> None:
        """As if."""


class ClearsNothing(DiskTier):
    def clear(self) -> None:
        """As if."""


class Claims(DiskTier):
    """Says that it has what it has not."""

    def has(self, keys: Sequence[bytes]) -> list[bool | None]:
        super().has(keys)
        return [True] * len(keys)


class HoldsNothing(DiskTier):
    def hold(self, keys: Sequence[bytes]) -> TierPin:
        held = super().hold(keys)
        held.release()
        return held


class Shares(DiskTier):
    """Mixes namespaces."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **{**options, "namespace": b""})


class Scribbles(DiskTier):
    """Writes to every row of a load that it reports as failed."""

    def load(self, keys: Any, ids: Any, timeout: float | None = None) -> Any:
        self.late = np.asarray(ids)
        return super().load(keys, ids, timeout)

    def drain(self, timeout: float | None = None) -> bool:
        if getattr(self, "late", None) is not None:
            self.rows[self.late] = 9
        return super().drain(timeout)


class TellsNobody(DiskTier):
    """Knows whether it has a key, but not at once, and wakes nobody once it does."""

    def has(self, keys: Sequence[bytes]) -> list[bool | None]:
        found = super().has(keys)
        first, self.was_asked = not getattr(self, "was_asked", False), True
        return [None] * len(keys) if first else found


class HasOneEpoch(DiskTier):
    def set_epoch(self, epoch: str | bytes | int) -> None:
        """As if."""


LIES: list[tuple[type[DiskTier], Callable[..., None]]] = [
    (FindsEverything, TierConformance.test_a_missing_key_is_a_miss_alone),
    (ReportsTwice, TierConformance.test_each_call_is_reported_once),
    (Loses, TierConformance.test_each_call_is_reported_once),
    (ForgetsNothing, TierConformance.test_a_forgotten_key_is_a_miss),
    (ClearsNothing, TierConformance.test_nothing_is_there_after_clear),
    (Claims, TierConformance.test_has_tells_what_is_there),
    (HoldsNothing, TierConformance.test_held_blocks_stay),
    (TellsNobody, TierConformance.test_an_answer_that_is_awaited_makes_the_descriptor_readable),
    (HasOneEpoch, TierConformance.test_blocks_of_another_epoch_are_misses),
    (Shares, TierConformance.test_namespaces_do_not_mix),
    (Scribbles, TierConformance.test_a_deadline_that_has_passed_is_a_miss),
]


@pytest.mark.parametrize(("lying", "test"), LIES, ids=lambda each: each.__name__)
def test_a_lie_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lying: type[DiskTier],
    test: Callable[..., None],
) -> None:
    if lying is TellsNobody:  # an end without which the test would wait for two minutes
        monkeypatch.setattr(conformance, "_PATIENCE", 1.0)

    class Suite(TierConformance):
        is_local = True

        def open(self, place: Path, rows: Any, capacity: int = 100, **options: Any) -> DiskTier:
            tier = lying(place, rows, capacity_of(capacity, 4096), policy="lru", **options)
            tier.rows = rows  # type: ignore[attr-defined]
            return tier

    with pytest.raises(AssertionError):
        test(Suite(), tmp_path)
