"""An engine with its own ring that is stuck, or idle: a core and two workers, forked from it.

They are called as vLLM's are, so that their stacks look alike.
"""

from __future__ import annotations

import gc
import os
import pickle
import queue
import signal
import sys
import threading
from importlib import import_module
from typing import Any

import tests.engines.scenario  # noqa: F401
from tests.engines import sources

MIB = 1 << 20
PACKAGE = sources.PACKAGES[os.environ["TEST_RELEASE"]]
MODULE = {
    "vllm": "vllm.distributed.device_communicators.shm_broadcast",
    "sglang": "sglang.srt.distributed.device_communicators.shm_broadcast",
}[PACKAGE]
CHUNK, CHUNKS = {"vllm": (16 * MIB, 10), "sglang": (4 * MIB, 6)}[PACKAGE]


def forward() -> None:
    """Computes for ever."""
    while True:
        sum(range(1000))


def hang() -> None:
    """As in a collective whose other ranks are gone."""
    signal.pause()


def worker_busy_loop(rank: int, steps: Any, answers: Any) -> None:
    while True:
        word = steps.dequeue()
        if word == "answer":
            answers.enqueue(word)
        elif word in ("compute", "hang") and rank == 1:
            {"compute": forward, "hang": hang}[word]()


def get_response(answers: Any) -> None:
    answers.dequeue()


class Engine:
    """The core, after every worker has answered once."""

    def __init__(self) -> None:
        kind = import_module(MODULE).MessageQueue
        self.steps = kind(2, 2, max_chunk_bytes=CHUNK, max_chunks=CHUNKS)
        handle = self.steps.export_handle()
        self.pids: list[int] = []
        self.answers: list[Any] = []
        for rank in range(2):
            mine, theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._work(kind, handle, rank, theirs)
            self.pids.append(pid)
            with os.fdopen(mine, "rb") as file:
                os.close(theirs)
                self.answers.append(kind.create_from_handle(pickle.load(file), 0))
        self.steps.wait_until_ready()
        for answers in self.answers:
            answers.wait_until_ready()
        self.steps.enqueue("answer")
        for answers in self.answers:
            answers.dequeue()

    def _work(self, kind: Any, handle: Any, rank: int, to_engine: int) -> None:
        steps = kind.create_from_handle(handle, rank)
        answers = kind(1, 1)
        with os.fdopen(to_engine, "wb") as file:
            pickle.dump(answers.export_handle(), file)
        steps.wait_until_ready()
        answers.wait_until_ready()
        worker_busy_loop(rank, steps, answers)

    def report(self) -> None:
        """Returns what the test waits for, before the core does something that does not end."""
        print("pids:", os.getpid(), *self.pids, flush=True)

    def fill(self) -> None:
        self.report()
        while True:
            self.steps.enqueue("step")


def stopped() -> None:
    engine = Engine()
    os.kill(engine.pids[1], signal.SIGSTOP)
    engine.fill()


def killed() -> None:
    engine = Engine()
    os.kill(engine.pids[1], signal.SIGKILL)
    os.waitpid(engine.pids[1], 0)
    engine.fill()


def computing() -> None:
    engine = Engine()
    engine.steps.enqueue("compute")
    engine.fill()


def hung() -> None:
    """Everything is read; the second worker does not answer."""
    engine = Engine()
    engine.steps.enqueue("hang")
    engine.report()
    get_response(engine.answers[1])


def asked_while_stopped() -> None:
    """The ring is not full."""
    engine = Engine()
    os.kill(engine.pids[1], signal.SIGSTOP)
    engine.steps.enqueue("answer")
    engine.report()
    for answers in engine.answers:
        get_response(answers)


def idle() -> None:
    """Its core waits for requests, as vLLM's does."""
    engine = Engine()
    engine.report()
    queue.Queue().get()


def scheduling() -> None:
    """No ring shows that its core hangs."""
    engine = Engine()
    engine.report()
    hang()


def sending() -> None:
    """As in `idle`, but for a thread that hangs."""
    engine = Engine()
    threading.Thread(target=hang_beside, daemon=True).start()
    engine.report()
    queue.Queue().get()


def hang_beside() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def one_after_another() -> None:
    """For each name on standard input a fork that does as it says, until it is killed: importing
    torch takes longer than all else."""
    import_module(MODULE)
    gc.freeze()  # forks that collect would copy all of its objects
    while name := sys.stdin.readline().strip():
        child = os.fork()
        if child == 0:
            os.setsid()
            globals()[name]()
            os._exit(1)
        os.waitpid(child, 0)
