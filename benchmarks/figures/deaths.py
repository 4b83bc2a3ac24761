"""From kill -9 of a writer to the error of a reader that waits for its next message."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.command import say
from benchmarks.figures.peers import dict_peers
from benchmarks.figures.victims import Victims
from memlane import MessageQueue
from memlane.cli.bench.channel import DICT, Channel, Peer, Setting
from memlane.cli.bench.peers.memlane_queue import Copy
from memlane.cli.bench.processes import Workspace

KILLS = 200
MOST_SECONDS = 5.0
"""A peer that is silent for so long after one kill is called silent."""
ASLEEP = 0.02


class OverTcp(Copy):
    """memlane's queue to a reader that shares no memory with its writer."""

    def open_writer(self) -> object:
        self.queue = MessageQueue(self.setting.readers, 0, connect_ip="127.0.0.1")
        return self.queue.export_handle(0)


TCP = Peer("memlane over TCP", OverTcp, is_memlane=True)


def _wait(channel: Channel) -> tuple[float, str]:
    """Returns when the next message turned out to be an error, and its text."""
    try:
        channel.recv()
    except BaseException as error:
        return time.monotonic(), f"{type(error).__name__}: {error}"
    return time.monotonic(), "a message"


def _kill(peer: Peer, workspace: Workspace) -> tuple[float, str, int] | None:
    """Seconds until the reader's error, its text and the writer's pid; None: there was none."""
    setting = Setting(DICT, 1, workspace.folder, workspace.prefix, workspace.new_name())
    victims = Victims(lambda: peer.channel(setting), _wait)
    try:
        victims.next("ready")
        time.sleep(ASLEEP)
        killed = time.monotonic()
        victims.kill_writer()
        try:
            noticed, text = victims.next("result", MOST_SECONDS)
        except TimeoutError:
            return None
        return noticed - killed, text, victims.pid
    finally:
        victims.kill_all()


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with Workspace() as workspace:
        peers = [peer for peer in dict_peers() if not peer.is_view]
        for peer in [peers[0], TCP, *peers[1:]]:
            seconds: list[float] = []
            text, is_named = "", True
            for _ in range(KILLS):
                one = _kill(peer, workspace)
                if one is None:
                    break
                seconds.append(round(one[0], 5))
                text = one[1]
                is_named &= str(one[2]) in text
            say(f"  {peer.name}: {len(seconds)} errors; {text[:100]}")
            found[peer.name] = {
                "sleeps": peer.sleeps,
                "seconds": seconds,
                "names_the_pid": bool(seconds) and is_named,
                "text": text,
            }
    return {"kills": KILLS, "limit": MOST_SECONDS, "peers": found}
