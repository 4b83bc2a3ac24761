"""Throughput over the size of a message, to one reader and to four; peers take turns."""

from __future__ import annotations

from typing import Any

from benchmarks.broadcast.peers import PEERS
from benchmarks.command import say
from memlane.cli.bench.channel import KIB, MIB, array
from memlane.cli.bench.measure import Cell, run_cell
from memlane.cli.bench.processes import Workspace

SIZES = (256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
READERS = (1, 4)
ROUNDS = 5


def measure() -> dict[str, Any]:
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    with Workspace() as workspace:
        for readers in READERS:
            for nbytes in SIZES:
                say(f"  {readers} readers, {nbytes} bytes")
                payload = array(f"array-{nbytes}", f"{nbytes} bytes", nbytes)
                cell = Cell(payload, readers, paced=2, seconds=0.1)
                result = run_cell(cell, ROUNDS, PEERS, workspace, say)
                for name, figures in result.peers.items():
                    rates = found.setdefault(str(readers), {}).setdefault(name, {})
                    rates[nbytes] = [round(rate, 1) for rate in figures.rounds["messages_s"]]
    return {
        "rounds": ROUNDS,
        "sleeps": {peer.name: peer.sleeps for peer in PEERS},
        "messages_s": found,
    }
