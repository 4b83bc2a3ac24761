"""`python -m benchmarks.store [--only PAYLOAD] [--readers N] [--rounds N] [--peer NAME]`."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import command, needs
from benchmarks.store import bars
from benchmarks.store.measure import run_cell
from benchmarks.store.payloads import BY_NAME, PAYLOADS
from benchmarks.store.peers import PEERS
from benchmarks.store.shown import COLUMNS, PANELS
from memlane.cli.bench.measure import CellResult
from memlane.cli.bench.processes import Workspace

READERS = (1, 4)
ROUNDS = 5


def main() -> None:
    asked = command.parser(
        "store",
        "The object store by memlane and by what one would take instead, in one run.",
        BY_NAME,
        [peer.name for peer in PEERS],
    ).parse_args()
    peers = [peer for peer in PEERS if not asked.peer or peer.name in asked.peer]
    payloads = [payload for payload in PAYLOADS if not asked.only or payload.name in asked.only]
    rounds = asked.rounds or ROUNDS
    if any(payload.name == "tensors" for payload in payloads):
        needs.package("torch", "the payload `tensors` (others: --only array-1m, ...)")

    def measure(workspace: Workspace) -> Iterator[CellResult]:
        for payload in payloads:
            for readers in asked.readers or READERS:
                yield run_cell(payload, readers, rounds, peers, workspace, command.say)

    is_whole = not (asked.only or asked.readers or asked.peer)
    folder = asked.output or (command.RESULTS if is_whole else None)
    results = command.results_of("default", rounds)
    command.run("store", results, measure, COLUMNS, bars.bars, PANELS, folder)


if __name__ == "__main__":
    main()
