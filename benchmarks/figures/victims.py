"""Processes that are killed on purpose: a writer and its reader, in their own process group."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from memlane.cli.bench.channel import Channel
from memlane.cli.bench.processes import FORK

SECONDS = 30.0


class Victims:
    """`told` receives what happened: "ready", and "result" with what `read` has returned.

    Args:
        open_channel: makes the channel, in the writer's process.
        read: runs in the reader once it has got a first message; what it returns is told.
    """

    def __init__(
        self, open_channel: Callable[[], Channel], read: Callable[[Channel], Any] | None = None
    ) -> None:
        self.told, self._there = FORK.Pipe(duplex=False)
        self._writer = FORK.Process(target=self._write, args=(open_channel, read))
        self._writer.start()
        self.pid = self._writer.pid or 0
        self._there.close()

    def _write(
        self, open_channel: Callable[[], Channel], read: Callable[[Channel], Any] | None
    ) -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        channel = open_channel()
        channel.prepare()
        there, here = FORK.Pipe()
        FORK.Process(target=self._read, args=(channel, there, read)).start()
        here.send(channel.open_writer())
        here.recv()  # it has opened its end
        channel.ready()
        channel.send(channel.setting.payload.make())
        signal.pause()

    def _read(
        self, channel: Channel, writer: Connection, read: Callable[[Channel], Any] | None
    ) -> None:
        channel.open_reader(0, writer.recv())
        writer.send(None)
        channel.recv()
        channel.release()
        self._tell("ready", None)
        if read is not None:
            self._tell("result", read(channel))
        signal.pause()

    def _tell(self, what: str, value: object) -> None:
        self._there.send((what, value))

    def next(self, what: str, seconds: float = SECONDS) -> Any:
        """Returns what was reported as `what`; raises TimeoutError after so many seconds."""
        while self.told.poll(seconds):
            name, value = self.told.recv()
            if name == what:
                return value
        raise TimeoutError(what)

    def kill_writer(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """The writer, its reader, and whatever else they have started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # before it had a group
        self._writer.join()
        self.told.close()
