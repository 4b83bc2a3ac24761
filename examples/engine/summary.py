"""Prints the demo's results, with or without a live view."""

import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memlane import QueueStatistics, StoreStatistics

from .backing import BackingStatistics
from .batching import Finds
from .batching import Sequence as Generated
from .image_store import ImageWriter
from .images import PLACEHOLDERS
from .offload import RegionPlan, RegionStart
from .paging import BLOCK_SIZE, BlockTables
from .progress import Progress
from .worker import Report
from .workload import SYSTEM

SHOWN_TEXTS = 4
"""Continuations that `--verbose` prints; the first one is always shown."""

LABEL, WIDTH = 22, 100  # columns


def print_line(label: str, text: str) -> None:
    """Print a line, broken at the width, at once even into a pipe."""
    lines = textwrap.wrap(text, WIDTH - LABEL, break_long_words=False, break_on_hyphens=False)
    shown = ("\n" + " " * LABEL).join(lines)
    print(f"  {label:<{LABEL - 2}}{shown}", flush=True)


def print_texts(sequences: Sequence[Generated], count: int = 1) -> None:
    """Print some prompts, first those without an image, of which the model knows nothing; each with
    the beginning of its continuation, one line each. Bytes that are no text are dots."""
    texts = sorted(sequences, key=lambda sequence: sequence.request.image is not None)
    for sequence in texts[:count]:
        prompt = sequence.request.prompt.removeprefix(PLACEHOLDERS).removeprefix(SYSTEM.encode())
        generated = _readable(sequence.tokens[len(sequence.request.prompt) :])
        line = (
            f'"{_readable(prompt)}" ->{generated if generated[:1] in " ,.:;" else " " + generated}'
        )
        room = WIDTH - LABEL
        print_line("continued", line if len(line) <= room else line[: room - 4].rstrip() + " ...")


def _readable(text: bytes | bytearray) -> str:
    decoded = text.decode(errors="replace")
    shown = "".join(c if c.isprintable() and c != "\ufffd" else "." for c in decoded)
    speaks_unicode = (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")
    return shown if speaks_unicode else shown.encode("ascii", "replace").decode()


def print_outcome(progress: Progress, seconds: float, reports: list[Report]) -> None:
    """Print how fast it was, and what it cost the workers to wait."""
    print_line(
        "speed",
        f"{progress.tokens / seconds:.0f} tokens/s: {progress.tokens} tokens in {seconds:.2f} s",
    )
    waiting_cpu_ns = sum(report.waiting_cpu_ns for report in reports)
    waiting_ns = sum(report.waiting_ns for report in reports)
    print_line(
        "waiting workers",
        f"{100 * waiting_cpu_ns / waiting_ns:.1f} % of one core each, unpickling included"
        " (a busy wait: 100 %)",
    )


def print_summary(
    progress: Progress,
    seconds: float,
    queue_cpu_ns: int,
    cpu_ns: int,
    broadcast: QueueStatistics,
    reports: list[Report],
) -> None:
    """Print what scheduler and workers measured.

    `queue_cpu_ns` and `cpu_ns` are the scheduler's CPU time in its queues, and in all.
    """
    steps = len(progress.steps)
    print_line(
        "steps",
        f"{steps}, {steps / seconds:.0f} per second;"
        f" each {quantiles(progress.steps, 1e3, 'ms')} from decision to tokens",
    )
    in_queues = queue_cpu_ns + sum(r.waiting_cpu_ns + r.answering_cpu_ns for r in reports)
    in_all = cpu_ns + sum(report.cpu_ns for report in reports)
    print_line(
        "memlane's share",
        f"{100 * in_queues / in_all:.1f} % of all CPU time: enqueue, dequeue and pickling, also of"
        " the layers' sums, which GPUs exchange themselves",
    )
    crowd = f"{len(reports) + 1} processes on {len(os.sched_getaffinity(0))} cores"
    print_line(
        "decision broadcast",
        f"one way {quantiles(progress.latencies, 1e6, 'us')}"
        f" ({len(progress.latencies)} samples; {crowd})",
    )
    print_line(
        "broadcast queue",
        f"{broadcast.bytes / 1e6:.2f} MB in {broadcast.messages} messages,"
        f" each to {len(broadcast.readers)} workers (the sums of the layers are most of it)",
    )


def print_images(images: ImageWriter, store: StoreStatistics, reports: list[Report]) -> None:
    """Print what was put into the store, what it saved, and how fast workers got the pixels."""
    print_line(
        "object store",
        f"{store.puts} puts, {store.hits} hits, {store.evictions} evictions;"
        f" {images.postponed} requests delayed by a step for lack of room",
    )
    inline = images.referred_bytes * len(reports)
    print_line(
        "image bytes",
        f"{images.put_bytes / 1e6:.1f} MB put, {(inline - images.put_bytes) / 1e6:.1f} MB saved"
        f" (with every request inline to every worker: {inline / 1e6:.1f} MB)",
    )
    views = [view_ns / 1e9 for report in reports for view_ns in report.view_ns]
    print_line(
        "image reads",
        f"{len(views)} views, {quantiles(views, 1e6, 'us')} to have the pixels, none copied",
    )


def print_moved(reports: list[Report]) -> None:
    """Print how many bytes of blocks went between device and region."""
    out, back = (sum(nbytes for nbytes, _ in calls) / 1e9 for calls in _moves(reports))
    print_line(
        "blocks moved", f"{out + back:.3f} GB by all workers ({out:.3f} out, {back:.3f} back)"
    )


def _moves(reports: list[Report]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (bytes, ns) of each call that moved blocks out, and back."""
    out = [call for report in reports for call in report.moved.swap_out]
    return out, [call for report in reports for call in report.moved.swap_in]


def print_offload(
    plan: RegionPlan, starts: list[RegionStart], blocks: BlockTables, reports: list[Report]
) -> None:
    """Print how fast blocks were moved between device and region, and how the region started."""
    device, region = blocks.pools
    print_line(
        "KV cache",
        f"{device} blocks of {BLOCK_SIZE} tokens on each device, {region} rows in the region;"
        f" sequences paused {blocks.pauses} times",
    )
    out, back = _moves(reports)
    out_bytes, in_bytes = (sum(nbytes for nbytes, _ in calls) for calls in (out, back))
    if calls := out + back:
        rate = np.median([nbytes / ns for nbytes, ns in calls])
        overall = (out_bytes + in_bytes) / sum(ns for _, ns in calls)
        print_line(
            "copy_blocks",
            f"{len(calls)} calls of {(out_bytes + in_bytes) / len(calls) / 1e3:.0f} kB on average:"
            f" p50 {rate:.2f} GB/s, {overall:.2f} GB/s over all",
        )
    seconds = max(start.seconds for start in starts)
    print_line(
        "offload region",
        f"{plan.total_bytes / 1e6:.2f} MB in cells of {plan.cell_bytes} bytes,"
        f" started in {seconds:.3f} s (the slowest worker)",
    )


def print_backing(backing: BackingStatistics, finds: Finds, place: str | None) -> None:
    """Print what sequences found in the region and behind it, and what that moved."""
    (use,) = backing.chain.tiers
    print_line(
        "blocks found",
        f"{finds.returned} by resumed sequences, {finds.prefix} by requests that begin as others"
        f" did; {finds.lost} lost, and computed again",
    )
    pool = backing.pool
    print_line(
        "region as a cache",
        f"{pool.hits} hits of {pool.accesses} accesses; {pool.evicted} blocks evicted,"
        f" {backing.chain.dropped} of them to nowhere",
    )
    name = "a disk" if place is None else place.partition(":")[0]
    stored = _moved(use.bytes_stored, use.storing_seconds)
    loaded = _moved(use.bytes_loaded, use.loading_seconds)
    print_line("tier behind it", f"{name}: {stored} out, {loaded} back")


def _moved(nbytes: int, seconds: float) -> str:
    return f"{nbytes / 1e9:.3f} GB" + (f" at {nbytes / seconds / 1e9:.2f} GB/s" if seconds else "")


def print_requests(progress: Progress) -> None:
    """Print how long the requests of a trace waited."""
    print_line(
        "requests",
        f"{len(progress.queued)} answered,"
        f" {progress.computed_tokens} tokens run through the model, prompts included",
    )
    print_line("queueing delay", f"{quantiles(progress.queued, 1e3, 'ms')} to the first step")
    print_line(
        "first token", f"{quantiles(progress.first_tokens, 1e3, 'ms')} after the request's arrival"
    )


def quantiles(samples: Sequence[float], scale: float, unit: str) -> str:
    """Return median and 99th percentile as text, with dashes if there are no samples yet."""
    if not samples:
        return "p50 -, p99 -"
    p50, p99 = np.percentile(np.array(samples) * scale, [50, 99])
    digits = 1 if unit == "ms" else 0
    return f"p50 {p50:.{digits}f} {unit}, p99 {p99:.{digits}f} {unit}"


def print_segments(names: list[str]) -> bool:
    """Print whether any of these segments is still in /dev/shm; True if none is."""
    left = [name for name in names if (Path("/dev/shm") / name.lstrip("/")).exists()]
    print_line("/dev/shm", f"LEFT: {left}" if left else f"nothing left of {len(names)} segments")
    return not left
