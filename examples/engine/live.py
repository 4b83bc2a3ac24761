"""The live view of a run on a terminal, drawn with rich; the only module that needs it.

It is drawn by a thread of its own, so it goes on when the scheduler does not: a worker that is
stopped, or dead, is seen here while the scheduler still waits for it.
"""

import time
from collections import deque

from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from memlane import QueueStatistics, ReaderStatistics

from .batching import Batcher
from .crew import Crew
from .progress import Progress
from .summary import quantiles

REFRESHES_PER_SECOND = 4
"""Each takes some system calls per worker, and the interpreter's lock for one or two ms. That is
why it is drawn as plain lines: with rich's tables it would be six."""

RATE_REFRESHES = 8
"""Rates are of this many refreshes: two seconds."""

RECENT_STEPS = 1000
"""Percentiles are of this many steps."""

BAR_WIDTH = 40

STATE_STYLES = {"running": "green", "stopped": "bold yellow", "dead": "bold red"}


class LiveView(Live):
    """Shows a running engine from the start of its `with` block to the end.

    The last picture stays on the terminal. It shows the workers as they are when the block is left,
    by an exception, too.
    """

    def __init__(self, crew: Crew, batcher: Batcher, progress: Progress) -> None:
        """Look at the three; change nothing about them."""
        self._crew = crew
        self._batcher = batcher
        self._progress = progress
        self._counted: deque[tuple[float, int, int, int]] = deque(maxlen=RATE_REFRESHES + 1)
        super().__init__(get_renderable=self._draw, refresh_per_second=REFRESHES_PER_SECOND)

    def _draw(self) -> Panel:
        broadcast = self._crew.broadcast.statistics()
        text = Text(no_wrap=True, overflow="ellipsis")
        self._add_run(text, broadcast)
        text.append(
            f"\n{'worker':>6}{'pid':>10}  {'state':<9}{'behind':>6}{'last progress':>16}", "bold"
        )
        for reader in broadcast.readers:
            _add_worker(text, reader)
        return Panel(text, title="memlane engine")

    def _add_run(self, text: Text, broadcast: QueueStatistics) -> None:
        progress = self._progress
        counts = self._batcher.counts(progress.elapsed())
        done = BAR_WIDTH * counts.finished // sum(counts)
        _add_label(text, "requests")
        text.append("━" * done, "green").append("━" * (BAR_WIDTH - done), "dim")
        _add_label(text, "")
        text.append(f"{counts.finished} finished, {counts.running} running, ")
        text.append(f"{counts.paused} paused, {counts.waiting} waiting, {counts.to_come} to come")
        _add_label(text, "per second")
        text.append(self._rates())
        _add_label(text, "step")
        steps = progress.steps[-RECENT_STEPS:]
        text.append(f"{quantiles(steps, 1e3, 'ms')} from decision to tokens")
        _add_label(text, "one way")
        latencies = progress.latencies[-RECENT_STEPS * len(broadcast.readers) :]
        text.append(f"{quantiles(latencies, 1e6, 'us')} from enqueue to dequeued")
        _add_label(text, "sent")
        text.append(f"{broadcast.messages} messages, {broadcast.bytes / 1e6:.2f} MB")
        blocks = self._batcher.blocks
        _add_label(text, "KV cache")
        text.append(f"{blocks.used} of {blocks.pools.device} blocks used on each device; ")
        text.append(f"sequences paused {blocks.pauses} times")
        if self._crew.images is not None:
            store = self._crew.images.statistics()
            _add_label(text, "images")
            text.append(f"{store.objects} stored, {store.bytes / 1e6:.2f} MB; ")
            text.append(f"{store.puts} puts, {store.hits} hits, {store.evictions} evictions")
        text.append("\n")

    def _rates(self) -> str:
        progress = self._progress
        now = time.monotonic()
        self._counted.append((now, len(progress.steps), progress.tokens, progress.computed_tokens))
        seconds, *counts = (
            new - old for new, old in zip(self._counted[-1], self._counted[0], strict=True)
        )
        steps, tokens, computed = (count / seconds if seconds > 0 else 0.0 for count in counts)
        return f"{steps:.0f} steps, {tokens:.0f} tokens generated, {computed:.0f} tokens run"


def _add_label(text: Text, label: str) -> None:
    """Begin a line."""
    text.append(("\n" if text else "") + f"{label:<12}", "bold")


def _add_worker(text: Text, reader: ReaderStatistics) -> None:
    age = "never"
    if reader.last_progress is not None:
        age = f"{max(0.0, time.monotonic() - reader.last_progress):.1f} s ago"
    text.append(f"\n{reader.rank:>6}{reader.pid or '-':>10}  ")
    text.append(f"{reader.state:<9}", STATE_STYLES.get(reader.state, ""))
    text.append(f"{reader.behind:>6}{age:>16}")
