"""Throughput over the size of a message, to one reader and to four; peers take turns."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.broadcast.peers import PEERS
from benchmarks.command import say
from memlane.cli.bench.measure import PAUSE, Cell, run_cell
from memlane.cli.bench.payloads import KIB, MIB, Payload
from memlane.cli.bench.session import Workspace

SIZES = (256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
READERS = (1, 4)
ROUNDS = 5


def _payload(nbytes: int) -> Payload:
    def make() -> object:
        return np.arange(nbytes // 8, dtype=np.float64)

    return Payload(f"array-{nbytes}", f"{nbytes} bytes", nbytes, make, is_array=True)


def measure() -> dict[str, Any]:
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    with Workspace() as workspace:
        for readers in READERS:
            for nbytes in SIZES:
                say(f"  {readers} readers, {nbytes} bytes")
                cell = Cell(_payload(nbytes), readers, 2, 0, 0.1, 0.0, PAUSE)
                result = run_cell(cell, ROUNDS, PEERS, workspace, say)
                for name, figures in result.peers.items():
                    rates = found.setdefault(str(readers), {}).setdefault(name, {})
                    rates[nbytes] = [round(rate, 1) for rate in figures.rounds["messages_s"]]
    return {
        "rounds": ROUNDS,
        "sleeps": {peer.name: peer.sleeps for peer in PEERS},
        "messages_s": found,
    }
