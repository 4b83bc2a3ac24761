"""The live view of a run on a terminal, drawn with rich; the only module that needs it.

A separate thread draws it, so it continues while the scheduler is blocked: it shows that a worker
is stopped, or dead, while the scheduler still waits for it.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal

from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from memlane import QueueStatistics, ReaderStatistics

from .batching import Batcher
from .crew import Crew
from .progress import Progress
from .summary import quantiles

REFRESHES_PER_SECOND = 4
"""Each refresh costs some system calls per worker, and holds the GIL for one or two ms. With rich's
tables that would be six ms, so the view consists of plain lines."""

RATE_REFRESHES = 8
"""Rates are averages over this many refreshes: two seconds."""

RECENT_STEPS = 1000
"""Percentiles are over this many steps."""

BAR_WIDTH = 40
LABEL_WIDTH = 12
FRAME = 2
"""Rows that the panel's frame takes, and twice as many columns."""

WIDE = 49
"""Columns that a worker's full row takes; narrower terminals show a shorter row."""

SHOW_CURSOR = b"\x1b[?25h"

STATE_STYLES = {"running": "green", "stopped": "bold yellow", "dead": "bold red"}


class LiveView(Live):
    """Shows a running engine from the start of its `with` block to the end.

    The last picture stays on the terminal. It shows the workers as they are when the block ends,
    with or without an exception.
    """

    def __init__(self, crew: Crew, batcher: Batcher, progress: Progress) -> None:
        """Observe the three; the view changes none of them."""
        self._crew = crew
        self._batcher = batcher
        self._progress = progress
        self._counted: deque[tuple[float, int, int, int]] = deque(maxlen=RATE_REFRESHES + 1)
        super().__init__(get_renderable=self._draw, refresh_per_second=REFRESHES_PER_SECOND)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Draw for the last time; show the cursor again even if rich fails."""
        try:
            super().__exit__(kind, error, traceback)
        finally:
            with suppress(OSError):  # the terminal is gone, and its cursor with it
                os.write(self.console.file.fileno(), SHOW_CURSOR)

    def refresh(self) -> None:
        """Draw. If the terminal is gone, do nothing: a signal tells the engine."""
        with suppress(OSError):
            super().refresh()

    def _draw(self) -> Panel:
        width, height = (
            room - FRAME * sides for room, sides in zip(self.console.size, (2, 1), strict=True)
        )
        broadcast = self._crew.broadcast.statistics()
        workers = _workers(broadcast.readers, width, height - 1)
        run = self._run(broadcast, width)[: max(1, height - len(workers))]
        text = Text("\n", no_wrap=True, overflow=self._overflow).join([*run, *workers])
        return Panel(text, title="memlane engine")

    def _run(self, broadcast: QueueStatistics, width: int) -> list[Text]:
        """Return the lines, the most important first: a small terminal cuts off the last ones."""
        progress = self._progress
        counts = self._batcher.counts(progress.elapsed())
        steps = progress.steps[-RECENT_STEPS:]
        latencies = progress.latencies[-RECENT_STEPS * len(broadcast.readers) :]
        blocks = self._batcher.blocks
        lines = [
            _line("requests", self._bar(counts.finished, sum(counts), width)),
            _line(
                "",
                f"{counts.finished} finished, {counts.running} running, {counts.paused} paused,"
                f" {counts.waiting} waiting, {counts.to_come} to come",
            ),
            _line("per second", self._rates()),
            _line("step", f"{quantiles(steps, 1e3, 'ms')} from decision to tokens"),
            _line("one way", f"{quantiles(latencies, 1e6, 'us')} from enqueue to dequeued"),
            _line("sent", f"{broadcast.messages} messages, {broadcast.bytes / 1e6:.2f} MB"),
            _line(
                "KV cache",
                f"{blocks.used} of {blocks.pools.device} blocks used on each device;"
                f" sequences paused {blocks.pauses} times",
            ),
        ]
        if self._crew.images is not None:
            store = self._crew.images.statistics()
            lines.append(
                _line(
                    "images",
                    f"{store.objects} stored, {store.bytes / 1e6:.2f} MB;"
                    f" {store.puts} puts, {store.hits} hits, {store.evictions} evictions",
                )
            )
        return [*lines, Text()]

    def _bar(self, finished: int, requests: int, width: int) -> Text:
        full, empty = "━━" if self._speaks_unicode else "#-"
        width = max(1, min(BAR_WIDTH, width - LABEL_WIDTH))
        done = width * finished // requests
        return Text.assemble((full * done, "green"), (empty * (width - done), "dim"))

    @property
    def _speaks_unicode(self) -> bool:
        return self.console.encoding.startswith("utf")

    @property
    def _overflow(self) -> Literal["ellipsis", "crop"]:
        return "ellipsis" if self._speaks_unicode else "crop"

    def _rates(self) -> str:
        progress = self._progress
        now = time.monotonic()
        self._counted.append((now, len(progress.steps), progress.tokens, progress.computed_tokens))
        seconds, *counts = (
            new - old for new, old in zip(self._counted[-1], self._counted[0], strict=True)
        )
        steps, tokens, computed = (count / seconds if seconds > 0 else 0.0 for count in counts)
        return f"{steps:.0f} steps, {tokens:.0f} tokens generated, {computed:.0f} tokens run"


def _line(label: str, content: str | Text) -> Text:
    return Text.assemble((f"{label:<{LABEL_WIDTH}}", "bold"), content)


def _workers(readers: Sequence[ReaderStatistics], width: int, height: int) -> list[Text]:
    """Return a heading and a row per worker; if they do not fit, rows only, running ones last."""
    heading = f"{'worker':>6}{'pid':>10}  {'state':<9}"
    if width >= WIDE:
        heading += f"{'behind':>6}{'last progress':>16}"
    if len(readers) >= height:
        readers = sorted(readers, key=lambda reader: reader.state == "running")[: max(1, height)]
        return [_row(reader, width) for reader in readers]
    return [Text(heading, "bold"), *(_row(reader, width) for reader in readers)]


def _row(reader: ReaderStatistics, width: int) -> Text:
    row = Text(f"{reader.rank:>6}{reader.pid or '-':>10}  ")
    row.append(f"{reader.state:<9}", STATE_STYLES.get(reader.state, ""))
    if width >= WIDE:
        age = "never"
        if reader.last_progress is not None:
            age = f"{max(0.0, time.monotonic() - reader.last_progress):.1f} s ago"
        row.append(f"{reader.behind:>6}{age:>16}")
    return row
