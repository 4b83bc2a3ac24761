"""Workers on several hosts: each is a program started there that connects to the scheduler.

    scheduler (rank 0)                                worker (its rank, from 1 on)
      how many blocks  ─────── broadcast_obj ──────▶    make the shard
      write  ◀───── create_from_process_group ─────▶    read the broadcast
      who sees my memory?  ── in_the_same_node_as ──    do I?
      read   ◀─────────── broadcast_obj ────────────    write answers: its handle

Workers that share the scheduler's memory read from it. On each other host one worker reads over
TCP, and relays everything to the others there; their answers come back over TCP. Hosts matter only
during this start: `scheduler.py` and `worker.py` know nothing about them.

There are no images and no paused sequences: a store and an offload region exist on one host only.
"""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from memlane import Handle, MemlaneError, MessageQueue, in_the_same_node_as
from memlane.groups import TcpGroup

from .crew import Crew
from .ending import interruptible, kept_from_children
from .model import ModelConfig, Shard
from .worker import CHUNK_BYTES, START_SECONDS, work

CHUNKS = 10
SECRET = "ENGINE_SECRET"
"""The environment variable with the group's secret."""


class Place(NamedTuple):
    """The place of a worker: how to run it, and where."""

    address: str
    """The address of its host."""
    command: tuple[str, ...] = ()
    """Prefix of a command that runs there."""


class Program:
    """A worker that was started as a program; implements the crew's `Process`."""

    def __init__(self, command: Sequence[str], secret: str) -> None:
        """Start it."""
        self._popen = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, SECRET: secret},
        )
        assert self._popen.stdout is not None
        self.sentinel = self._popen.stdout.fileno()
        """The program's stdout. It writes nothing there, so this is ready when it ends."""
        self.last_words = ""
        """Its output to stderr; complete after `join`."""

    @property
    def pid(self) -> int:
        """Its id on any host: the command that starts it there execs it."""
        return self._popen.pid

    @property
    def exitcode(self) -> int | None:
        """The exit code; None while it runs."""
        return self._popen.poll()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most `timeout` seconds."""
        with suppress(subprocess.TimeoutExpired):
            _, self.last_words = self._popen.communicate(timeout=timeout)

    def kill(self) -> None:
        """Kill it."""
        self._popen.kill()


class RemoteCrew(Crew):
    """One worker at each of the given places, on any hosts."""

    def __init__(self, address: str, places: Sequence[Place], blocks: int) -> None:
        """Start the workers and wait until all are connected.

        `address` is this host's, as reachable from the places; each worker gets `blocks` blocks.
        """
        secret, size = secrets.token_hex(), len(places) + 1
        programs: dict[int, Program] = {}
        with (
            TcpGroup(address, 0, 0, size, secret=secret, timeout=START_SECONDS) as group,
            ExitStack() as failing,
        ):
            with kept_from_children():
                for rank, place in enumerate(places, start=1):
                    words = (address, str(group.port), str(rank), str(size), place.address)
                    command = [*place.command, sys.executable, "-m", "engine.remote", *words]
                    programs[rank] = Program(command, secret)
                    failing.callback(programs[rank].join)
                    failing.callback(programs[rank].kill)
            with interruptible():
                group.broadcast_obj(blocks, 0)
                broadcast = _broadcast(group, connect_ip=address)
            super().__init__(broadcast)
            self.programs = programs
            self.processes.update(programs)
            failing.pop_all()
            failing.callback(self.close, in_order=False)
            with interruptible():
                in_the_same_node_as(group, 0, timeout=START_SECONDS)
                for rank in programs:
                    handle = Handle.from_json(group.broadcast_obj(None, rank))
                    self.answers[rank] = MessageQueue.create_from_handle(handle, 0)
                self.wait_until_ready()
            failing.pop_all()


def run_member(scheduler: str, port: int, rank: int, size: int, address: str) -> None:
    """Run worker `rank` on the host with that address."""
    secret = os.environ.pop(SECRET)
    try:
        with TcpGroup(scheduler, port, rank, size, secret=secret, timeout=START_SECONDS) as group:
            config = ModelConfig()
            shard = Shard(config, rank - 1, size - 1, group.broadcast_obj(None, 0))
            broadcast = _broadcast(group)
            is_here = in_the_same_node_as(group, 0, timeout=START_SECONDS)[rank]
            answers = MessageQueue(1, int(is_here), None, CHUNK_BYTES, CHUNKS, connect_ip=address)
            for writer in range(1, size):
                group.broadcast_obj(answers.export_handle(0).to_json(), writer)
        with broadcast, answers:
            work(config, shard, broadcast, answers)
    except MemlaneError as error:
        raise SystemExit(f"worker {rank} leaves: {error}") from None


def _broadcast(group: TcpGroup, connect_ip: str | None = None) -> MessageQueue:
    """Build the queue from the scheduler to all workers; returns this rank's end."""
    return MessageQueue.create_from_process_group(
        group, CHUNK_BYTES, CHUNKS, 0, timeout=START_SECONDS, connect_ip=connect_ip
    )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the scheduler, and that ends us
    run_member(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
