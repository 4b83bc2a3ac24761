"""The demo's command line: options, defaults, and checks before anything starts."""

import argparse
import errno
import math
import os
import sys
from pathlib import Path

from .batching import pools_for
from .image_store import MAX_OBJECT_BYTES
from .model import ModelConfig, block_bytes
from .paging import BLOCK_SIZE, LEAST_REGION, PoolTooSmall
from .trace import TOKEN_SCALES, Scale, TraceError, TraceLine, read_trace
from .workload import SYSTEM, Workload, prompts_workload, trace_workload, with_images

PROMPTS = Path(__file__).with_name("prompts.txt")

DEFAULTS = {"tokens": 96, "requests": 100, "time_scale": 0.25, "token_scale": 64}
"""Defaults of the options that apply only to prompts, or only to a trace."""

IMAGES = 8
"""The default with prompts; the default with a trace is 0."""
MOST_IMAGES = 100
LEAST_STORE_MIB = -(-MAX_OBJECT_BYTES // (1 << 20))


def parse_arguments(config: ModelConfig) -> argparse.Namespace:
    """Parse the command line; adds the `workload` and the block `pools` to the result."""
    parser = _parser(config)
    arguments = parser.parse_args()
    if arguments.restart and not arguments.kill_worker:
        parser.error("argument --restart: only with --kill-worker")
    mode, others = ("--prompts", DEFAULTS.keys() - {"tokens"})
    if arguments.trace is not None and arguments.system is not None:
        parser.error("argument --system: not with --trace")
    if arguments.trace is not None:
        mode, others = ("--trace", {"tokens"})
    for name, default in DEFAULTS.items():
        if name in others and getattr(arguments, name) is not None:
            parser.error(f"argument --{name.replace('_', '-')}: not with {mode}")
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    for name in ("region_blocks", "tier"):
        if arguments.no_offload and getattr(arguments, name) is not None:
            parser.error(f"argument --{name.replace('_', '-')}: not with --no-offload")
    if arguments.images is None:
        arguments.images = IMAGES if arguments.trace is None else 0
    arguments.workload = with_images(_workload(arguments), arguments.images)
    try:
        arguments.pools = pools_for(
            arguments.workload.requests,
            arguments.batch,
            device=arguments.device_blocks,
            region=arguments.region_blocks,
            offload=not arguments.no_offload,
        )
    except PoolTooSmall as error:
        parser.error(f"argument --device-blocks: {error}")
    need = sum(arguments.pools) * block_bytes(config, 1)
    if need > (memory := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        parser.error(
            f"the KV cache would need {need / 1e9:.0f} GB, and this machine has"
            f" {memory / 1e9:.0f} GB of memory: generate fewer --tokens, or take a smaller --batch"
        )
    return arguments


def _workload(arguments: argparse.Namespace) -> Workload:
    if arguments.trace is None:
        system = arguments.system
        if system is None:
            system = SYSTEM if arguments.prompts == read_prompts(str(PROMPTS)) else ""
        return prompts_workload(arguments.prompts, arguments.tokens, system.encode())
    path, lines = arguments.trace
    scale = Scale(arguments.time_scale, arguments.token_scale)
    return trace_workload(path, lines, arguments.requests, scale)


def _parser(config: ModelConfig) -> argparse.ArgumentParser:
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
        "--batch",
        type=positive,
        default=8,
        metavar="N",
        help="most sequences to process at a time (default: %(default)s)",
    )
    _add_pools(parser)
    parser.add_argument(
        "--store-mib",
        type=_store_mib,
        default=16,
        metavar="N",
        help="size of the image store in MiB (default: %(default)s)",
    )
    parser.add_argument(
        "--kill-worker",
        action="store_true",
        help="kill one worker with SIGKILL in the middle, and show what happens",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="with --kill-worker: another one takes its place, and the engine goes on",
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="no live view (it is also off if the output is not a terminal)",
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="all that was measured, not only the outcome",
    )
    _add_work(parser)
    return parser


def _add_pools(parser: argparse.ArgumentParser) -> None:
    pools = parser.add_mutually_exclusive_group()
    pools.add_argument(
        "--device-blocks",
        type=positive,
        metavar="N",
        help=f"blocks of {BLOCK_SIZE} tokens in the KV cache of each worker; sequences that do not "
        "fit are paused, and find them in the offload region (default: a third of those needed)",
    )
    pools.add_argument(
        "--no-offload",
        action="store_true",
        help="as many blocks as may be needed, and no offload region",
    )
    parser.add_argument(
        "--region-blocks",
        type=_region_blocks,
        metavar="N",
        help="blocks in the offload region; what does not fit goes to the tier behind it "
        "(default: twice those of the device)",
    )
    parser.add_argument(
        "--tier",
        metavar="URL",
        help="what is behind the region: redis://, rediss://, unix:// (a Redis server's socket), "
        "s3://, gs://, az:// or file:// (default: a file on disk, which ends with the run)",
    )


def add_prompts(options: "argparse._ActionsContainer") -> None:
    """Add `--prompts` to a parser or a group of options."""
    options.add_argument(
        "--prompts",
        type=read_prompts,
        default=str(PROMPTS),
        metavar="FILE",
        help="text file with one prompt per line, - for standard input (default: %(default)s)",
    )


def _add_work(parser: argparse.ArgumentParser) -> None:
    work = parser.add_mutually_exclusive_group()
    add_prompts(work)
    work.add_argument(
        "--trace",
        type=_read_trace,
        metavar="FILE",
        help="replay a request trace: JSON lines with timestamp, input_length, output_length "
        "and hash_ids",
    )
    parser.add_argument(
        "--system",
        metavar="TEXT",
        help="what all prompts begin with, after an image if there is one (default: a sentence; "
        "nothing with --prompts)",
    )
    parser.add_argument(
        "--images",
        type=_images,
        metavar="N",
        help="different images that the requests include in turn, 0 for none "
        f"(default: {IMAGES} with prompts, 0 with a trace)",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help=f"tokens to generate per prompt, at most (default: {DEFAULTS['tokens']})",
    )
    parser.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help=f"requests of the trace to replay, at most (default: {DEFAULTS['requests']})",
    )
    parser.add_argument(
        "--time-scale",
        type=_positive_float,
        metavar="X",
        help=f"seconds of the replay per second of the trace (default: {DEFAULTS['time_scale']})",
    )
    parser.add_argument(
        "--token-scale",
        type=int,
        choices=TOKEN_SCALES,
        metavar="N",
        help="tokens of the trace per token of the replay, a power of two up to "
        f"{TOKEN_SCALES[-1]} (default: {DEFAULTS['token_scale']})",
    )


def read_prompts(path: str) -> list[bytes]:
    """Return the non-empty lines; their bytes are the tokens."""
    try:
        text = _standard_input() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror}") from None
    prompts = [line for line in text.splitlines() if line]
    if not prompts:
        raise argparse.ArgumentTypeError(f"no prompts in {path}")
    return prompts


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise OSError(errno.EBADF, "standard input is closed")
    return sys.stdin.buffer.read()


def _read_trace(path: str) -> tuple[Path, list[TraceLine]]:
    try:
        return Path(path), read_trace(Path(path))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror}") from None
    except TraceError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _region_blocks(text: str) -> int:
    number = positive(text)
    if number < LEAST_REGION:
        raise argparse.ArgumentTypeError(f"a region has at least {LEAST_REGION} blocks")
    return number


def _images(text: str) -> int:
    if not text.isdecimal() or int(text) > MOST_IMAGES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number up to {MOST_IMAGES}")
    return int(text)


def _store_mib(text: str) -> int:
    number = positive(text)
    if number < LEAST_STORE_MIB:
        raise argparse.ArgumentTypeError(f"the largest image needs {LEAST_STORE_MIB} MiB")
    return number


def _positive_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number
