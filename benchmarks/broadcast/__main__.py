"""`python -m benchmarks.broadcast [--quick] [--only PAYLOAD] [--readers N] [--peer NAME]`."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import command
from benchmarks.broadcast import bars, measure, plan
from benchmarks.broadcast.payloads import BY_NAME
from benchmarks.broadcast.peers import PEERS
from benchmarks.broadcast.shown import COLUMNS, PANELS
from memlane.cli.bench.measure import CellResult
from memlane.cli.bench.processes import Workspace


def main() -> None:
    parser = command.parser(
        "broadcast",
        "Broadcast by memlane and by what one would take instead, in one run.",
        BY_NAME,
        [peer.name for peer in PEERS],
    )
    parser.add_argument("--quick", action="store_true", help="about a minute, fewer cells")
    asked = parser.parse_args()
    peers = [peer for peer in PEERS if not asked.peer or peer.name in asked.peer]
    chosen = plan.make(asked.quick, asked.only, asked.readers, asked.rounds)

    def run(workspace: Workspace) -> Iterator[CellResult]:
        return measure.run(chosen, peers, workspace, command.say)

    is_whole = not (asked.quick or asked.only or asked.readers or asked.peer)
    folder = asked.output or (command.RESULTS if is_whole else None)
    results = command.results_of("quick" if asked.quick else "default", chosen.rounds)
    command.run("broadcast", results, run, COLUMNS, bars.bars, PANELS, folder)


if __name__ == "__main__":
    main()
