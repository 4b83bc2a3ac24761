"""A cable between two hosts that can lose frames, delay them, or be pulled."""

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

    Frames arrive in order, without loss or delay, until you change the cable's conditions.
    """

    def __init__(self, one: Helper | None, other: Helper | None, *, seed: int = 0) -> None:
        """Plug it in; None means the host of this process. Raises `Refused`.

        Losses and jitter are drawn from `seed`.
        """
        networks = [f"/proc/{'self' if end is None else end.pid}/ns/net" for end in (one, other)]
        super().__init__(sys.executable, "-I", "-S", carrier.__file__, *networks, str(seed))
        self.addresses: tuple[str, str] = tuple(self.greeting.split())  # type: ignore[assignment]
        """The addresses of the two ends."""
        self._conditions = Conditions()

    def set(
        self, *, delay_ms: float = 0.0, jitter_ms: float = 0.0, loss_percent: float = 0.0
    ) -> None:
        """From now on, delay each frame, or lose it with the given probability."""
        self._change(delay=delay_ms / 1e3, jitter=jitter_ms / 1e3, loss=loss_percent / 1e2)

    def pull(self) -> None:
        """From now on, lose all frames, including those in flight; neither side is notified."""
        self._change(is_pulled=True)

    def plug(self) -> None:
        """Let frames arrive again, under the conditions from before."""
        self._change(is_pulled=False)

    def counts(self) -> Counts:
        """Return how many frames have been carried and lost so far."""
        return self._change()

    def _change(self, **changes: Any) -> Counts:
        self._conditions = self._conditions._replace(**changes)
        return Counts(*map(int, self.ask(json.dumps(self._conditions._asdict())).split()))
