"""`python -m benchmarks.figures.replaced`: records a moving picture of a death.

A scheduler calls four workers; one is killed, named and replaced, while `memlane top` runs beside
it. Three real terminals (tmux), looked at twice a second; written as docs/figures/replaced.svg.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.figures.terminal import Screen, moving_picture

SECONDS, LOOKS, COLUMNS = 12, 2, 84
KILL_AT = 4.0
PROGRAM = """\
import time
from memlane import WorkerDied, WorkerGroup

class Model:
    def __init__(self, rank, world):
        self.rank = rank
    def step(self, number):
        time.sleep(0.01)
        return number + self.rank

if __name__ == "__main__":
    with WorkerGroup(Model, 4, name="model") as workers:
        for step in range(10_000):
            if step % 100 == 0:
                print(f"step {step}: {len(workers.call(Model.step, step))} answers", flush=True)
            try:
                workers.call(Model.step, step)
            except WorkerDied as death:
                print(f"worker {death.rank} died: pid {death.pid}, exit code {death.exitcode}")
                workers.replace(death.rank)
                print(f"worker {death.rank} is replaced", flush=True)
"""


class Terminal:
    """A terminal in which a command runs."""

    def __init__(self, socket: str, title: str, rows: int, command: str) -> None:
        self.title, self.rows = title, rows
        self._name = title.split()[-1].partition(".")[0]
        self._tmux = ["tmux", "-L", socket]
        size = ["-x", str(COLUMNS), "-y", str(rows)]
        start = ["-f", "/dev/null", "new-session", "-d", "-s", self._name, *size, command]
        subprocess.run([*self._tmux, *start], check=True)

    def look(self, *options: str) -> list[str]:
        """Its lines now; with the option -e with colours, as ANSI codes."""
        shown = subprocess.run(
            [*self._tmux, "capture-pane", "-p", *options, "-t", self._name],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return (shown.stdout.splitlines() + [""] * self.rows)[: self.rows]

    def type(self, text: str) -> None:
        subprocess.run([*self._tmux, "send-keys", "-t", self._name, text, "Enter"], check=True)


@contextmanager
def _terminals(program: Path) -> Iterator[list[Terminal]]:
    socket = f"memlane-figure-{program.parent.name}"
    commands = {
        "python scheduler.py": (7, f"exec {sys.executable} {program}"),
        "another terminal": (2, "exec env PS1='$ ' bash --norc"),
        "memlane top": (10, f"exec {sys.executable} -m memlane top --interval 0.5"),
    }
    try:
        yield [Terminal(socket, name, *how) for name, how in commands.items()]
    finally:
        subprocess.run(["tmux", "-L", socket, "kill-server"], check=False)


def _pid_of_worker(rank: int, top: Terminal) -> str:
    """Waits until the worker is shown."""
    while True:
        for line in top.look():
            if line.startswith(f"model.answers[{rank}] "):
                return line.split()[2]
        time.sleep(0.1)


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.figures.replaced", description=__doc__
    ).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "scheduler.py"
        program.write_text(PROGRAM)
        with _terminals(program) as terminals:
            _, shell, top = terminals
            victim, begun, is_killed = _pid_of_worker(2, top), time.monotonic(), False
            looks: list[list[list[str]]] = []
            for number in range(SECONDS * LOOKS):
                time.sleep(max(0.0, begun + number / LOOKS - time.monotonic()))
                if not is_killed and number / LOOKS >= KILL_AT:
                    shell.type(f"kill -9 {victim}")
                    is_killed = True
                    time.sleep(0.1)
                looks.append([terminal.look("-e") for terminal in terminals])
    screens = [
        Screen(terminal.title, [look[place] for look in looks])
        for place, terminal in enumerate(terminals)
    ]
    print(moving_picture("replaced", screens, COLUMNS, SECONDS))


if __name__ == "__main__":
    main()
