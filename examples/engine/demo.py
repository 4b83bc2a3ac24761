"""The program `python -m engine`."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from memlane import MemlaneError

from .arguments import parse_arguments
from .backing import check_tier
from .batching import Batcher
from .crew import WorkerDied
from .ending import check, complain, interruptible, say
from .local import CannotStart, LocalCrew
from .model import ModelConfig
from .paging import Pools
from .progress import Progress
from .reference import run_reference
from .scheduler import Engine
from .summary import (
    SHOWN_TEXTS,
    print_backing,
    print_images,
    print_line,
    print_moved,
    print_offload,
    print_outcome,
    print_requests,
    print_segments,
    print_summary,
    print_texts,
)

MAX_STEP_TOKENS = 128
MOST_CHECKED_STEPS = 1000
"""The most steps that the single process computes to compare: half a minute at worst."""
PROMISED_SECONDS = 1.0
"""memlane reports a death within this time."""


def main() -> int:
    """Run what the command line asks for; returns the exit code."""
    config = ModelConfig()
    try:
        with interruptible():
            arguments = parse_arguments(config)
        if arguments.kill_worker and not arguments.restart:
            return _kill_a_worker(config, arguments)
        return _generate(config, arguments)
    except (WorkerDied, CannotStart, MemlaneError, OSError, MemoryError) as error:
        return complain(error)


def _generate(config: ModelConfig, arguments: argparse.Namespace) -> int:
    """Answer all requests, print a summary, and compare with a single process.

    With `--restart`, one worker is killed and replaced.
    """
    batcher, progress = _batcher(arguments, arguments.pools), Progress()
    murder = _Murder(arguments.workers // 2) if arguments.restart else None
    with _crew(config, arguments) as crew:
        batcher.cache = crew.backing
        with interruptible():
            _print_start(crew, arguments)
        with _view(crew, batcher, progress, arguments), interruptible():
            cpu_ns = time.process_time_ns()
            crew.queue_cpu_ns = 0
            replace = None if murder is None else murder.replacing(crew)
            for _ in Engine(config, crew).generate(batcher, progress, replace):
                check()
                if murder is not None:
                    murder.note_step(crew, batcher, progress)
            seconds, cpu_ns = progress.elapsed(), time.process_time_ns() - cpu_ns
        broadcast = crew.broadcast.statistics()
        store = None if crew.images is None else crew.images.statistics()
        backing = None if crew.backing is None else crew.backing.statistics()
    if any(crew.exit_codes):
        say(f"the workers left with exit codes {crew.exit_codes}")
        return 1
    with interruptible():
        if murder is not None and not murder.report():
            return 1
        if murder is None or arguments.verbose:
            print_texts(batcher.sequences, SHOWN_TEXTS if arguments.verbose else 1)
            print_outcome(progress, seconds, crew.reports)
        if arguments.verbose:
            if crew.region is not None:
                print_moved(crew.reports)
            print_summary(progress, seconds, crew.queue_cpu_ns, cpu_ns, broadcast, crew.reports)
            if crew.images is not None and store is not None:
                print_images(crew.images, store, crew.reports)
            if crew.region is not None and backing is not None:
                print_offload(crew.region, crew.region_starts, batcher.blocks, crew.reports)
                print_backing(backing, batcher.finds, arguments.tier)
        if arguments.workload.scaled is not None:
            print_requests(progress)
        clean = print_segments(crew.segments)
        right = _compare(config, arguments, batcher)
    return 0 if clean and right else 1


class _Murder:
    """Kills a worker in the middle: when half of the requests have been started."""

    def __init__(self, victim: int) -> None:
        """Choose the rank."""
        self.victim = victim
        self.pid = 0
        self.killed: float | None = None
        self.named: float | None = None
        self._told = ""
        self._new_pid = 0
        self._own_start = 0.0
        self._runs_again: float | None = None

    def note_step(self, crew: LocalCrew, batcher: Batcher, progress: Progress) -> None:
        """Call it after each step; kills in the middle, and notes when steps go on."""
        if self.killed is None and 2 * len(progress.queued) >= len(batcher.sequences):
            self.pid, step = crew.pid(self.victim), len(progress.steps) - 1
            print_line("kill -9", f"worker {self.victim} (pid {self.pid}) after step {step}")
            self.killed = time.monotonic()
            os.kill(self.pid, signal.SIGKILL)
        elif self.named is not None and self._runs_again is None:
            self._runs_again = time.monotonic()

    def note_death(self, death: WorkerDied) -> None:
        """It was reported."""
        is_victim = (death.rank, death.pid) == (self.victim, self.pid)
        if self.killed is None or self.named is not None or not is_victim:
            raise death
        self.named, self._told = time.monotonic(), str(death)

    def replacing(self, crew: LocalCrew) -> Callable[[WorkerDied], None]:
        """Return what an `Engine` calls when a worker has died."""

        def replace(death: WorkerDied) -> None:
            self.note_death(death)
            self._own_start = crew.replace(death.rank)
            self._new_pid = crew.pid(death.rank)

        return replace

    def report(self) -> bool:
        """Print what happened; returns whether it was what should happen."""
        if self.killed is None or self.named is None or self._runs_again is None:
            say("it finished before the kill")
            return False
        named, whole = self.named - self.killed, self._runs_again - self.killed
        _print_named(named, self._told)
        print_line(
            "replaced",
            f"by pid {self._new_pid}; steps go on after {whole:.2f} s, "
            f"{whole - self._own_start:.2f} s of them besides its own start",
        )
        return named < PROMISED_SECONDS


def _kill_a_worker(config: ModelConfig, arguments: argparse.Namespace) -> int:
    """Kill a worker in the middle, and show what the user of such an engine sees."""
    batcher, progress = _batcher(arguments, arguments.pools), Progress()
    murder = _Murder(arguments.workers // 2)
    with _crew(config, arguments) as crew:
        batcher.cache = crew.backing
        with interruptible():
            _print_start(crew, arguments)
        try:
            with _view(crew, batcher, progress, arguments), interruptible():
                for _ in Engine(config, crew).generate(batcher, progress):
                    check()
                    murder.note_step(crew, batcher, progress)
        except WorkerDied as death:
            if murder.killed is None:
                raise
            seconds = time.monotonic() - murder.killed
            named = (death.rank, death.pid) == (murder.victim, murder.pid)
            told = str(death)
        else:
            say("it finished before the kill")
            return 1
    others = [code for rank, code in enumerate(crew.exit_codes) if rank != murder.victim]
    with interruptible():
        _print_named(seconds, told)
        cleanly = "cleanly, " if not any(others) else ""
        print_line("survivors", f"left {cleanly}with exit codes {others}")
        clean = print_segments(crew.segments)
    return 0 if named and seconds < PROMISED_SECONDS and not any(others) and clean else 1


def _print_named(seconds: float, told: str) -> None:
    """Print when and how the user of the engine was told of the death."""
    print_line("named after", f"{seconds:.3f} s (promised: {PROMISED_SECONDS:.0f} s): {told}")


def _view(
    crew: LocalCrew, batcher: Batcher, progress: Progress, arguments: argparse.Namespace
) -> AbstractContextManager[object]:
    """Return a live view if it is wanted and possible, otherwise a context without effect."""
    if arguments.plain or sys.stdout is None or not sys.stdout.isatty():
        return nullcontext()
    try:
        from .live import LiveView
    except ImportError as error:
        print_line("live view", f"none ({error}); `make demo` or pip install rich, or --plain")
        return nullcontext()
    return LiveView(crew, batcher, progress)


def _compare(config: ModelConfig, arguments: argparse.Namespace, batcher: Batcher) -> bool:
    """Print whether a single process, which moves no blocks, elects the same tokens; True if so."""
    reference = _batcher(arguments, None)
    run_reference(config, arguments.workers, reference, MOST_CHECKED_STEPS)
    differing, generated, compared = [], 0, 0
    for number, (theirs, ours) in enumerate(
        zip(reference.sequences, batcher.sequences, strict=True)
    ):
        # If the reference was cut short, compare as far as it got.
        as_far = None if theirs.is_finished else len(theirs.tokens)
        if theirs.tokens != ours.tokens[:as_far]:
            differing.append(number)
        generated += ours.new_tokens
        compared += theirs.new_tokens
    same = "the same tokens"
    if compared < generated:
        same += f", as far as compared: {compared} of {generated}"
    print_line("single process", f"differs for requests {differing}" if differing else same)
    return not differing


def _print_start(crew: LocalCrew, arguments: argparse.Namespace) -> None:
    workload = arguments.workload
    print(f"memlane engine: {_story(arguments)}; {workload.title}")
    pids = ", ".join(str(crew.pid(rank)) for rank in range(arguments.workers))
    print_line("workers", f"{arguments.workers} ready (pids {pids}; scheduler {os.getpid()})")
    if workload.scaled is not None:
        print_line("scaled", workload.scaled)
    if workload.images is not None and arguments.verbose:
        print_line("images", f"{workload.images}, in a store of {arguments.store_mib} MiB")


def _story(arguments: argparse.Namespace) -> str:
    """Return what to look for in this run."""
    if not arguments.kill_worker:
        return f"{arguments.workers} workers share a model"
    victim = f"worker {arguments.workers // 2} of {arguments.workers}"
    return f"{victim} is killed, {'named and replaced' if arguments.restart else 'and named'}"


def _crew(config: ModelConfig, arguments: argparse.Namespace) -> LocalCrew:
    if arguments.tier is not None:
        check_tier(arguments.tier)  # before there are workers that would have to end
    store_bytes = _store_bytes(arguments)
    return LocalCrew(config, arguments.workers, arguments.pools, store_bytes, arguments.tier)


def _store_bytes(arguments: argparse.Namespace) -> int:
    return 0 if arguments.workload.images is None else arguments.store_mib << 20


def _batcher(arguments: argparse.Namespace, pools: Pools | None) -> Batcher:
    return Batcher(
        arguments.workload.requests,
        max_batch=arguments.batch,
        max_step_tokens=MAX_STEP_TOKENS,
        pools=pools,
    )
