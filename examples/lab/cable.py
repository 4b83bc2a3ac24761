"""A cable between two hosts, and what may be done to it."""

import json
import sys
from typing import Any, NamedTuple

from . import carrier
from .carrier import Conditions
from .helper import Helper


class Counts(NamedTuple):
    """Frames in both directions since the beginning."""

    carried: int
    lost: int


class Cable(Helper):
    """Connects the hosts of two processes until the end of the `with` block; close it before them.

    Frames go one after the other, none lost and none late, until something is done to the cable.
    """

    def __init__(self, one: Helper | None, other: Helper | None, *, seed: int = 0) -> None:
        """Plug it in; None is for the host of this process. Raises `Refused`.

        What is lost, and how late the rest is, is drawn from `seed`.
        """
        networks = [f"/proc/{'self' if end is None else end.pid}/ns/net" for end in (one, other)]
        super().__init__(sys.executable, "-I", "-S", carrier.__file__, *networks, str(seed))
        self.addresses: tuple[str, str] = tuple(self.greeting.split())  # type: ignore[assignment]
        """Of the two ends."""
        self._conditions = Conditions()

    def set(
        self, *, delay_ms: float = 0.0, jitter_ms: float = 0.0, loss_percent: float = 0.0
    ) -> None:
        """From now on each frame arrives so late, or, with that chance, not at all."""
        self._change(delay=delay_ms / 1e3, jitter=jitter_ms / 1e3, loss=loss_percent / 1e2)

    def pull(self) -> None:
        """From now on nothing arrives, nor what is on its way; neither side is told."""
        self._change(is_pulled=True)

    def plug(self) -> None:
        """Let frames arrive again, as they did before."""
        self._change(is_pulled=False)

    def counts(self) -> Counts:
        """Return what has been carried and what was lost, so far."""
        return self._change()

    def _change(self, **changes: Any) -> Counts:
        self._conditions = self._conditions._replace(**changes)
        return Counts(*map(int, self.ask(json.dumps(self._conditions._asdict())).split()))
