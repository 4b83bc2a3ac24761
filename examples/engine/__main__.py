"""The demo's command line: `PYTHONPATH=examples python -m engine --help`."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from memlane import MemlaneError

from .batching import Batcher
from .model import ModelConfig
from .reference import run_reference
from .scheduler import Engine, WorkerDied
from .summary import print_line, print_segments, print_summary

MAX_STEP_TOKENS = 128
PROMISED_SECONDS = 1.0
"""Within this time memlane tells of a death."""


def main() -> int:
    """Run what the command line asks for; returns the exit code."""
    config = ModelConfig()
    arguments = _parse(config)
    demo = _kill_a_worker if arguments.kill_worker else _generate
    try:
        return demo(config, arguments)
    except (WorkerDied, MemlaneError, TimeoutError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _generate(config: ModelConfig, arguments: argparse.Namespace) -> int:
    """Generate for all prompts, print a summary, and compare with a single process."""
    batcher = _batcher(arguments)
    with Engine(config, arguments.workers) as engine:
        _print_start(engine, arguments)
        started = time.monotonic()
        new_tokens = list(engine.generate(batcher))
        seconds = time.monotonic() - started
    if any(engine.exit_codes):
        print(f"engine: the workers left with exit codes {engine.exit_codes}", file=sys.stderr)
        return 1
    print_summary(new_tokens, seconds, engine.reports)
    clean = print_segments(engine.segments)

    reference = _batcher(arguments)
    run_reference(config, arguments.workers, reference)
    pairs = zip(batcher.sequences, reference.sequences, strict=True)
    differing = [ours.prompt for ours, theirs in pairs if ours.tokens != theirs.tokens]
    print_line("single process", f"differs for {differing}" if differing else "the same tokens")
    return 0 if clean and not differing else 1


def _kill_a_worker(config: ModelConfig, arguments: argparse.Namespace) -> int:
    """Kill a worker in the middle, and show what the user of such an engine sees."""
    batcher = _batcher(arguments)
    victim = arguments.workers // 2
    killed = None
    with Engine(config, arguments.workers) as engine:
        _print_start(engine, arguments)
        pid = engine.pid(victim)
        try:
            for step, _ in enumerate(engine.generate(batcher)):
                if step == arguments.tokens // 2:
                    print_line("kill -9", f"worker {victim} (pid {pid}) after step {step}")
                    killed = time.monotonic()
                    os.kill(pid, signal.SIGKILL)
        except WorkerDied as death:
            if killed is None:
                raise
            seconds = time.monotonic() - killed
            named = (death.rank, death.pid) == (victim, pid)
            print_line("what the user sees", str(death))
        else:
            print("engine: it finished before the kill", file=sys.stderr)
            return 1
    print_line("from kill to error", f"{1e3 * seconds:.1f} ms (promised: {PROMISED_SECONDS:.0f} s)")
    others = [code for rank, code in enumerate(engine.exit_codes) if rank != victim]
    print_line("the other workers", f"left with exit codes {others}")
    clean = print_segments(engine.segments)
    return 0 if named and seconds < PROMISED_SECONDS and not any(others) and clean else 1


def _print_start(engine: Engine, arguments: argparse.Namespace) -> None:
    print(f"memlane engine: {len(arguments.prompts)} prompts, up to {arguments.tokens} tokens each")
    pids = ", ".join(str(engine.pid(rank)) for rank in range(arguments.workers))
    print_line("workers", f"{arguments.workers} ready (pids {pids}; scheduler {os.getpid()})")


def _batcher(arguments: argparse.Namespace) -> Batcher:
    return Batcher(
        arguments.prompts,
        new_tokens=arguments.tokens,
        max_batch=arguments.batch,
        max_step_tokens=MAX_STEP_TOKENS,
    )


def _parse(config: ModelConfig) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="engine",
        description="A tensor-parallel inference engine in miniature, with memlane as data plane.",
    )
    parser.add_argument(
        "--workers",
        type=int,
        choices=range(1, config.heads + 1),
        default=4,
        metavar=f"1..{config.heads}",
        help="worker processes that share the model (default: %(default)s)",
    )
    parser.add_argument(
        "--prompts",
        type=_read_prompts,
        default=str(Path(__file__).with_name("prompts.txt")),
        metavar="FILE",
        help="text file with one prompt per line (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=_positive,
        default=96,
        metavar="N",
        help="tokens to generate per prompt, at most (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=_positive,
        default=8,
        metavar="N",
        help="sequences in a step, at most (default: %(default)s)",
    )
    parser.add_argument(
        "--kill-worker",
        action="store_true",
        help="kill one worker with SIGKILL in the middle, and show what happens",
    )
    return parser.parse_args()


def _read_prompts(path: str) -> list[bytes]:
    """Return the lines that are not empty; their bytes are the tokens."""
    try:
        prompts = [line for line in Path(path).read_bytes().splitlines() if line]
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror}") from None
    if not prompts:
        raise argparse.ArgumentTypeError(f"no prompts in {path}")
    return prompts


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
