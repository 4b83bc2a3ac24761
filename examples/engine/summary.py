"""What the demo prints."""

import os
from pathlib import Path

import numpy as np

from .worker import Report


def print_line(label: str, text: str) -> None:
    """Print one line, at once even into a pipe."""
    print(f"  {label:<20}{text}", flush=True)


def print_summary(new_tokens: list[int], seconds: float, reports: list[Report]) -> None:
    """Print how much was generated (per step), how fast, and what the workers measured."""
    steps = len(new_tokens)
    print_line("generated", f"{sum(new_tokens)} tokens in {seconds:.2f} s")
    print_line("steps", f"{steps}, {steps / seconds:.0f} per second")
    latencies_us = np.concatenate([report.latencies_ns for report in reports]) / 1e3
    p50, p99 = np.percentile(latencies_us, [50, 99])
    crowd = f"{len(reports) + 1} processes on {len(os.sched_getaffinity(0))} cores"
    print_line(
        "decision broadcast",
        f"one way p50 {p50:.0f} us, p99 {p99:.0f} us ({len(latencies_us)} samples; {crowd})",
    )
    cpu_ns = sum(report.waiting_cpu_ns for report in reports)
    waiting_ns = sum(report.waiting_ns for report in reports)
    print_line(
        "waiting readers",
        f"{100 * cpu_ns / waiting_ns:.1f} % of one core each, unpickling included"
        f" ({cpu_ns / 1e9:.2f} s CPU in {waiting_ns / 1e9:.2f} s of dequeue; a busy wait: 100 %)",
    )


def print_segments(names: list[str]) -> bool:
    """Print whether any of these segments is still in /dev/shm; True if none is."""
    left = [name for name in names if (Path("/dev/shm") / name.lstrip("/")).exists()]
    print_line("/dev/shm", f"LEFT: {left}" if left else f"nothing left of {len(names)} segments")
    return not left
