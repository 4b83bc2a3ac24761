"""The latest message: 6 MiB frames at 30 Hz, three readers, of which one may be slow.

`python -m benchmarks.latest`: four minutes. The writer's calls and the age of frames (from before
the writer's call to the reader's having it) beside iceoryx2's overflowing queue; ways alternate.
The writer has a core of its own, because a reader that runs beside it would delay it, whatever the
queue; `--share` lets all run where they like.

memlane: `mode="latest"`, frames are lent
iceoryx2: a buffer of one sample that overflows, woken by events; frames are copied into the loaned
    sample without a serializer, and aliased by the readers
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks import needs
from benchmarks.machine import describe
from benchmarks.turns import Aside, aside, in_turns
from memlane import Handle, MessageQueue, WriterClosed
from memlane.cli.bench.processes import FORK

Frame = np.ndarray[Any, np.dtype[np.uint8]]
Send = Callable[[Frame], object]
Start = Callable[..., None]
"""Starts a process with a kind of reader and its arguments."""
SIZE = 6 << 20
RATE = 30
READERS = 3
SLOW = 0.15
"""Seconds that a slow reader works on a frame: four and a half come meanwhile."""
END = 255
READER_CORES: set[int] = set()
"""The cores on which readers run; empty: any."""


class Reader:
    """A reader of frames, which takes their age and looks at every page."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self.ages: list[float] = []

    def see(self, frame: Frame) -> bool:
        """Returns whether there are more."""
        now = time.monotonic_ns()
        self.ages.append((now - int(frame[:8].view(np.int64)[0])) / 1e6)
        frame[8::4096].max()
        if self._pause:
            time.sleep(self._pause)
        return bool(frame[8] != END)


def read_all(pipe: Connection, kind: Callable[..., None], pause: float, *arguments: Any) -> None:
    """A reader's process: sends the ages of its frames."""
    if READER_CORES:
        os.sched_setaffinity(0, READER_CORES)
    reader = Reader(pause)
    kind(reader, *arguments)
    pipe.send(reader.ages)


def memlane_reader(reader: Reader, handle: Handle, rank: int) -> None:
    with MessageQueue[Frame].create_from_handle(handle, rank) as queue:
        queue.wait_until_ready(30)
        try:
            while reader.see(queue.dequeue()):
                pass
        except WriterClosed:
            pass


@contextmanager
def memlane(start: Start) -> Iterator[Send]:
    with MessageQueue[Frame](READERS, READERS, mode="latest") as queue:
        for rank in range(READERS):
            start(memlane_reader, queue.export_handle(rank), rank)
        queue.wait_until_ready(30)
        yield queue.enqueue


def service_of(folder: str) -> tuple[Any, Any, Any]:
    """iceoryx2's node, its queue that overflows, and its event."""
    iox = import_module("iceoryx2")
    iox.set_log_level(iox.LogLevel.Fatal)
    config = iox.config.default()
    config.global_cfg.root_path = iox.Path.new(folder)
    node = iox.NodeBuilder.new().config(config).create(iox.ServiceType.Ipc)
    queue = (
        node.service_builder(iox.ServiceName.new("frames"))
        .publish_subscribe(iox.Slice[ctypes.c_uint8])
        .max_publishers(1)
        .max_subscribers(READERS)
        .history_size(0)
        .subscriber_max_buffer_size(1)
        .enable_safe_overflow(True)
        .open_or_create()
    )
    event = node.service_builder(iox.ServiceName.new("frames-event")).event().open_or_create()
    return node, queue, event


def memory(address: int) -> Frame:
    return np.frombuffer(memoryview((ctypes.c_uint8 * SIZE).from_address(address)), np.uint8)


def iceoryx_reader(reader: Reader, folder: str, gate: Any) -> None:
    _node, queue, event = service_of(folder)
    subscriber = queue.subscriber_builder().buffer_size(1).create()
    listener = event.listener_builder().create()
    gate.wait()
    goes_on = True
    while goes_on:
        while (sample := subscriber.receive()) is None:
            listener.blocking_wait()
        goes_on = reader.see(memory(sample.payload().as_ptr()))
        sample.delete()


@contextmanager
def iceoryx(start: Start) -> Iterator[Send]:
    with tempfile.TemporaryDirectory() as folder:
        gate = FORK.Barrier(READERS + 1)
        for _ in range(READERS):
            start(iceoryx_reader, folder, gate)
        _node, queue, event = service_of(folder)
        publisher = queue.publisher_builder().initial_max_slice_len(SIZE).create()
        notifier = event.notifier_builder().create()
        gate.wait()
        publisher.update_connections()

        def send(frame: Frame) -> None:
            sample = publisher.loan_slice_uninit(SIZE)
            np.copyto(memory(sample.payload_ptr), frame)
            sample.assume_init().send()
            notifier.notify()

        yield send


PEERS: dict[str, Callable[[Start], AbstractContextManager[Send]]] = {
    "memlane": memlane,
    "iceoryx2": iceoryx,
}


def run(name: str, is_one_slow: bool, frames: int) -> tuple[float, float, float, float]:
    """Milliseconds: p50 and p99 of the writer's calls, and of the age of the frames of the readers
    that are fast."""
    pauses = iter([0.0] * (READERS - 1) + [SLOW if is_one_slow else 0.0])
    readers: list[Aside] = []
    frame = np.zeros(SIZE, np.uint8)
    calls = []
    with ExitStack() as stack:

        def start(kind: Callable[..., None], *arguments: Any) -> None:
            readers.append(stack.enter_context(aside(read_all, kind, next(pauses), *arguments)))

        send = stack.enter_context(PEERS[name](start))
        begun = time.monotonic()
        for number in range(frames):
            time.sleep(max(0.0, begun + number / RATE - time.monotonic()))
            frame[8:] = number % END
            before = time.monotonic_ns()
            frame[:8].view(np.int64)[0] = before
            send(frame)
            calls.append((time.monotonic_ns() - before) / 1e6)
        frame[8:] = END
        send(frame)
        fast = [reader.hear()[5:] for reader in readers][: READERS - 1]
    ages = [age for each in fast for age in each]
    return (*both(calls[5:]), *both(ages))


def both(values: list[float]) -> tuple[float, float]:
    """p50 and p99."""
    return statistics.median(values), sorted(values)[int(len(values) * 0.99)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", action="store_true", help="all processes run on all cores")
    arguments = parser.parse_args()
    needs.package("iceoryx2", "the comparison with iceoryx2")
    print(
        f"{SIZE >> 20} MiB at {RATE} Hz, {READERS} readers, {arguments.frames} frames; {describe()}"
    )
    cores = os.sched_getaffinity(0)
    if not arguments.share and len(cores) > 1:
        os.sched_setaffinity(0, {min(cores)})
        READER_CORES.update(cores - {min(cores)})
    ways = [(name, is_one_slow) for is_one_slow in (False, True) for name in PEERS]
    found = in_turns(arguments.rounds, ways, lambda way: run(*way, arguments.frames))
    print("ms: medians of the rounds      send p50  p99    age p50  p99    send p99 from, to")
    for (name, is_one_slow), rows in found.items():
        each = [statistics.median(column) for column in zip(*rows, strict=True)]
        who = "one slow" if is_one_slow else "all fast"
        each += [min(row[1] for row in rows), max(row[1] for row in rows)]
        print(f"{name:10} {who:10}      " + "  ".join(f"{value:7.2f}" for value in each))


if __name__ == "__main__":
    main()
