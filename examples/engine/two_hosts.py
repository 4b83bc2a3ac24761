"""The program `python -m engine.hosts`, for root.

Host 1 is this machine, with the scheduler and two workers. Host 2 has two more workers; it has its
own network stack and /dev/shm, behind a cable with a delay (`lab`). One engine answers the same
prompts three times: undisturbed; with the cable pulled for a second; with the cable pulled for
longer than any process waits.
"""

import argparse
import os
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import lab
from memlane import MemlaneError, MessageQueue, ReaderDied

from .arguments import add_prompts, positive
from .batching import Batcher
from .crew import WorkerDied
from .ending import check, complain, interruptible, say
from .model import ModelConfig
from .progress import Progress
from .reference import run_reference
from .remote import Place, RemoteCrew
from .scheduler import Engine
from .summary import print_line, print_segments, quantiles
from .workload import Workload, prompts_workload

HERE, THERE = (1, 2), (3, 4)
"""The ranks of the workers on host 1 and host 2."""

MAX_BATCH = 8
MAX_STEP_TOKENS = 128
PULLED_SECONDS = 1.0
NOTICED_SECONDS = 20.0
"""A silent host counts as dead soon after the queue's bound (`remote_liveness`); this is more than
that takes on a busy machine."""


def main() -> int:
    """Run it; returns the exit code."""
    with interruptible():
        arguments = _parser().parse_args()
    if refusal := lab.refusal():
        say(f"no two hosts on this machine: {refusal}")
        return 1
    workload = prompts_workload(arguments.prompts, arguments.tokens)
    try:
        with lab.Host() as host, lab.Cable(None, host) as cable:
            cable.set(delay_ms=arguments.delay_ms, jitter_ms=0.1 * arguments.delay_ms)
            network = os.stat(f"/proc/{host.pid}/ns/net").st_ino
            is_right = _show(workload, host, cable, arguments.delay_ms)
    except (WorkerDied, MemlaneError, OSError, MemoryError) as error:
        return complain(error)
    left = _processes_in(network)
    print_line("host 2", f"LEFT: processes {left}" if left else "gone, with its cable")
    return 0 if is_right and not left else 1


def _show(workload: Workload, host: lab.Host, cable: lab.Cable, delay_ms: float) -> bool:
    """Run all three; True if everything went as expected."""
    expected = _batcher(workload)
    with interruptible():
        run_reference(ModelConfig(), len(HERE + THERE), expected)
    here, there = cable.addresses
    places = [*(Place(here) for _ in HERE), *(Place(there, host.command) for _ in THERE)]
    with RemoteCrew(here, places, expected.blocks.pools.device) as crew, interruptible():
        print(f"memlane engine on two hosts: {workload.title}")
        pids = {rank: f"{rank} (pid {crew.pid(rank)})" for rank in crew.processes}
        for number, address, ranks, way in (
            (1, here, HERE, "through shared memory"),
            (2, there, THERE, "over TCP, which one of them relays to the other"),
        ):
            names = ", ".join(pids[rank] for rank in ranks)
            print_line(f"host {number}", f"{address}: workers {names}, {way}")
        print_line("scheduler", f"pid {os.getpid()}, on host 1")
        print_line("cable", f"{delay_ms:g} ms each way, up to a tenth more")
        segments = [
            queue.handle.buffer_handle[3]
            for queue in (crew.broadcast, *crew.answers.values())
            if queue.handle.buffer_handle is not None
        ]
        rights = [
            _undisturbed(crew, workload, expected),
            _pulled_for_a_while(crew, workload, expected, cable),
            _pulled_for_good(crew, workload, cable, there),
        ]
    rights.append(_print_ends(crew))
    rights.append(print_segments(segments))
    files = subprocess.run([*host.command, "ls", "-A", "/dev/shm"], capture_output=True, text=True)
    print_line("/dev/shm of host 2", f"LEFT: {files.stdout.split()}" if files.stdout else "empty")
    return all(rights) and not files.stdout


def _undisturbed(crew: RemoteCrew, workload: Workload, expected: Batcher) -> bool:
    print("undisturbed")
    batcher, progress = _run(crew, workload)
    seconds, steps = progress.elapsed(), progress.steps
    print_line("generated", f"{progress.tokens} tokens in {seconds:.2f} s")
    print_line("steps", f"{len(steps)}; each {quantiles(steps, 1e3, 'ms')}")
    for number, ranks in ((1, HERE), (2, THERE)):
        samples = [
            latency
            for rank in ranks
            for latency in progress.latencies[rank - 1 :: len(HERE + THERE)]
        ]
        print_line(f"decision to host {number}", f"one way {quantiles(samples, 1e6, 'us')}")
    return _compare(batcher, expected)


def _pulled_for_a_while(
    crew: RemoteCrew, workload: Workload, expected: Batcher, cable: lab.Cable
) -> bool:
    print(f"the cable is pulled for {PULLED_SECONDS:g} s")
    plug = threading.Timer(PULLED_SECONDS, cable.plug)

    def pull() -> None:
        cable.pull()
        plug.start()

    try:
        batcher, progress = _run(crew, workload, pull)
    finally:
        plug.cancel()  # it has fired already, unless the run failed
    longest = max(progress.steps)
    print_line("recovered", f"one step took {longest:.2f} s, and no worker was given up")
    return _compare(batcher, expected) and longest >= PULLED_SECONDS


def _pulled_for_good(crew: RemoteCrew, workload: Workload, cable: lab.Cable, address: str) -> bool:
    print("the cable is pulled for good")
    pulled = 0.0

    def pull() -> None:
        nonlocal pulled
        pulled = time.monotonic()
        cable.pull()

    try:
        _run(crew, workload, pull)
    except WorkerDied as error:
        death = error
    else:
        say("it finished although the cable was pulled")
        return False
    seconds = time.monotonic() - pulled
    print_line("scheduler raises", f"after {seconds:.1f} s: {death}")
    # The broadcast to that host uses other connections, and detects the deaths by itself.
    bound = crew.broadcast.handle.remote_liveness + NOTICED_SECONDS
    while time.monotonic() < pulled + bound and not _are_dead(crew.broadcast):
        time.sleep(0.05)
    try:
        crew.broadcast.wait_until_ready(0)
    except ReaderDied as reader:
        print_line("ReaderDied", str(reader))
        return death.rank in THERE and reader.rank in THERE and address in str(reader)
    say("the broadcast still reaches all workers")
    return False


def _are_dead(broadcast: MessageQueue) -> bool:
    """Return whether the readers on host 2 count as dead."""
    return all(row.state == "dead" for row in broadcast.statistics().readers if row.rank in THERE)


def _print_ends(crew: RemoteCrew) -> bool:
    """Print how the workers ended; True if all left by themselves, those cut off with an error."""
    for rank, program in crew.programs.items():
        for line in program.last_words.splitlines():
            print_line(f"worker {rank} says", line)
    codes = crew.exit_codes
    print_line("workers", f"left by themselves, with exit codes {codes}")
    return codes == [*(0 for _ in HERE), *(1 for _ in THERE)]


def _run(
    crew: RemoteCrew, workload: Workload, halfway: Callable[[], None] | None = None
) -> tuple[Batcher, Progress]:
    """Answer all requests; calls `halfway` when half of them have been started."""
    batcher, progress = _batcher(workload), Progress()
    for _ in Engine(ModelConfig(), crew).generate(batcher, progress):
        check()
        if halfway is not None and 2 * len(progress.queued) >= len(batcher.sequences):
            print_line("pulled", f"after step {len(progress.steps) - 1}")
            halfway()
            halfway = None
    return batcher, progress


def _batcher(workload: Workload) -> Batcher:
    return Batcher(workload.requests, max_batch=MAX_BATCH, max_step_tokens=MAX_STEP_TOKENS)


def _compare(batcher: Batcher, expected: Batcher) -> bool:
    pairs = zip(batcher.sequences, expected.sequences, strict=True)
    differing = [
        number for number, (ours, theirs) in enumerate(pairs) if ours.tokens != theirs.tokens
    ]
    same = f"differs for requests {differing}" if differing else "the same tokens"
    print_line("single process", same)
    return not differing


def _processes_in(network: int) -> list[int]:
    """Return the processes that are still in that network namespace."""
    left = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or we may not look at it
            if (entry / "ns/net").stat().st_ino == network:
                left.append(int(entry.name))
    return left


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="engine.hosts",
        description="The engine on two hosts, which are on this machine; needs root.",
    )
    add_prompts(parser)
    parser.add_argument(
        "--tokens",
        type=positive,
        default=32,
        metavar="N",
        help="tokens to generate per prompt, at most (default: %(default)s)",
    )
    parser.add_argument(
        "--delay-ms",
        type=positive,
        default=1,
        metavar="N",
        help="what the cable takes, one way (default: %(default)s)",
    )
    return parser
