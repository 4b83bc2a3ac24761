"""Workers are programs of their own, which get their tickets as arguments."""

import subprocess
import sys
from typing import Any

from memlane import Ticket, WorkerGroup

WORKER = """
import sys
from memlane import Ticket, serve

class Model:
    def __init__(self, rank, world):
        self.rank = rank

    def step(self, number):
        return self.rank + number

serve(Ticket.from_json(sys.argv[1]), Model)
"""


def start(ticket: Ticket) -> None:
    programs.append(subprocess.Popen([sys.executable, "-c", WORKER, ticket.to_json()]))


if __name__ == "__main__":
    programs: list[subprocess.Popen[bytes]] = []
    with WorkerGroup[Any](None, 2, start=start) as group:
        print(group.call("step", 10))  # [10, 11]
    raise SystemExit(any(program.wait() for program in programs))
