"""Runs all broadcast peers of a figure, each alone, and says which were left out and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.broadcast.peers import PEERS
from benchmarks.command import say
from memlane.cli.bench.channel import DICT, Peer, Setting
from memlane.cli.bench.processes import Session, Workspace
from memlane.cli.bench.worker import Writer, writer_main


def dict_peers() -> Iterator[Peer]:
    """The peers that carry a scheduler's step."""
    for peer in PEERS:
        if why := peer.missing(DICT):
            say(f"  {peer.name} is left out: {why}")
        else:
            yield peer


def by_peer(
    readers: int, measure: Callable[[Session], object], writer: type[Writer] = Writer
) -> dict[str, object]:
    """Returns what `measure` returns for each peer with `readers` readers of a scheduler's step."""
    found: dict[str, object] = {}
    with Workspace() as workspace:
        for peer in dict_peers():
            name = workspace.new_name()
            setting = Setting(DICT, readers, workspace.folder, workspace.prefix, name)
            say(f"  {peer.name}")
            with Session(writer_main, writer, peer, setting) as session:
                session.ask("warm_up")
                found[peer.name] = {"sleeps": peer.sleeps, "samples": measure(session)}
    return found
