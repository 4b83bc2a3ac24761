"""Plain models of the eviction policies, as their papers have them: slow, and easy to check."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

Keys = OrderedDict[int, None]  # the oldest first


class Lru:
    def __init__(self, blocks: int) -> None:
        self.blocks, self.keys = blocks, Keys()

    def __contains__(self, key: int) -> bool:
        return key in self.keys

    def access(self, key: int) -> bool:
        """Returns whether the key was stored now; it was not there, or this is a hit."""
        if key in self.keys:
            self.keys.move_to_end(key)
            return False
        if len(self.keys) == self.blocks:
            self.keys.popitem(last=False)
        self.keys[key] = None
        return True


class Arc:
    """Figure 4 of Megiddo and Modha, FAST '03."""

    def __init__(self, blocks: int) -> None:
        self.c, self.p = blocks, 0.0
        self.t1, self.t2, self.b1, self.b2 = Keys(), Keys(), Keys(), Keys()

    def __contains__(self, key: int) -> bool:
        return key in self.t1 or key in self.t2

    def _replace(self, key: int) -> None:
        if len(self.t1) + len(self.t2) < self.c:
            return
        if self.t1 and (len(self.t1) > self.p or (key in self.b2 and len(self.t1) == self.p)):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None

    def access(self, key: int) -> bool:
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        if key in self:
            (t1 if key in t1 else t2).pop(key)
            t2[key] = None
            return False
        if key in b1:
            self.p = min(self.p + max(len(b2) / len(b1), 1), c)
            self._replace(key)
            del b1[key]
            t2[key] = None
            return True
        if key in b2:
            self.p = max(self.p - max(len(b1) / len(b2), 1), 0)
            self._replace(key)
            del b2[key]
            t2[key] = None
            return True
        if len(t1) + len(b1) == c:
            if len(t1) < c:
                b1.popitem(last=False)
                self._replace(key)
            else:
                t1.popitem(last=False)
        elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
            if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                b2.popitem(last=False)
            self._replace(key)
        t1[key] = None
        return True


class S3Fifo:
    """Yang et al., SOSP '23: a tenth of the blocks in the small queue."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self.small_blocks = blocks, max(blocks // 10, 1)
        self.ghost_keys = blocks - blocks // 10
        self.small, self.main, self.ghost = Keys(), Keys(), Keys()
        self.uses: dict[int, int] = {}

    def __contains__(self, key: int) -> bool:
        return key in self.small or key in self.main

    def _evict(self) -> None:
        if len(self.small) >= self.small_blocks and self._evict_small():
            return
        if not self._evict_main():
            self._evict_small()

    def _evict_small(self) -> bool:
        while self.small:
            key, _ = self.small.popitem(last=False)
            if self.uses[key] > 1:
                self.main[key] = None
                continue
            self.ghost[key] = None
            if len(self.ghost) > self.ghost_keys:
                self.ghost.popitem(last=False)
            return True
        return False

    def _evict_main(self) -> bool:
        while self.main:
            key, _ = self.main.popitem(last=False)
            if self.uses[key] == 0:
                return True
            self.uses[key] -= 1
            self.main[key] = None
        return False

    def access(self, key: int) -> bool:
        if key in self:
            self.uses[key] = min(self.uses[key] + 1, 3)
            return False
        comes_back = key in self.ghost
        self.ghost.pop(key, None)
        if len(self.small) + len(self.main) == self.blocks:
            self._evict()
        (self.main if comes_back else self.small)[key] = None
        self.uses[key] = 0
        return True


class TwoSegment:
    """A FIFO on probation, a protected LRU, and a FIFO of `ghosts` keys that were evicted."""

    def __init__(self, blocks: int, share: float, ghosts: int) -> None:
        self.blocks, self.share, self.ghosts = blocks, share, ghosts
        self.probation, self.protected, self.ghost = Keys(), Keys(), Keys()

    def __contains__(self, key: int) -> bool:
        return key in self.probation or key in self.protected

    def _haunt(self, key: int) -> None:
        self.ghost[key] = None
        if len(self.ghost) > self.ghosts:
            self.ghost.popitem(last=False)

    def access(self, key: int) -> bool:
        if key in self:
            self.probation.pop(key, None)
            self.protected[key] = None
            self.protected.move_to_end(key)
            return False
        comes_back = key in self.ghost
        self.ghost.pop(key, None)
        if not comes_back and self.share == 0:
            self._haunt(key)
            return False
        if len(self.probation) + len(self.protected) == self.blocks:
            is_enough = len(self.probation) >= int(self.share * self.blocks)
            first = self.probation and (is_enough or not self.protected)
            self._haunt((self.probation if first else self.protected).popitem(last=False)[0])
        (self.protected if comes_back else self.probation)[key] = None
        return True


Model = Lru | Arc | S3Fifo | TwoSegment


def counts(model: Model, trace: Iterable[Sequence[int]]) -> dict[str, int]:
    """As `memlane.tiers.replay` counts."""
    made = dict.fromkeys(("requests", "accesses", "hits", "prefix_hits", "stores"), 0)
    for ids in trace:
        made["requests"] += 1
        for key in ids:
            if key not in model:
                break
            made["prefix_hits"] += 1
        for key in reversed(ids):
            made["accesses"] += 1
            made["hits"] += key in model
            made["stores"] += model.access(key)
    return made
