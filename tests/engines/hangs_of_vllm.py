"""Tries what `memlane stuck` prints about each hang of a real vLLM: `python -m
tests.engines.hangs_of_vllm` prints the table of the manual. Twelve engines with vLLM's own queues
and twelve with memlane's are started one after another: half an hour; arguments choose some.
Nothing else that waits may run in this pid namespace and /dev/shm: `unshare --pid --fork
--mount-proc tests/own_shm.sh python -m ...`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines import environment

from memlane._base.processes import holders_in
from tests.engines.hanging_vllm import SCENES
from tests.engines.running import ROOT

AFTER = 3.0  # seconds
SETTLES = 4.0  # seconds that an engine needs to come to a rest
STARTS = 240.0  # seconds that an engine may take to start
QUEUES = {"own": "", "memlane's": "queue"}  # and MEMLANE_VLLM for them
_PLUGIN = "[vllm.general_plugins]\nhanging = hanging_vllm:break_it\n"

# Who hangs. Of two in collectives both may be the cause, and that is the right answer.
CULPRITS = {
    **{scene: {"Worker_TP1"} for scene in SCENES},
    "a lock, worker 0": {"Worker_TP0"},
    "both in collectives": {"Worker_TP0", "Worker_TP1"},
    "EngineCore's output": {"EngineCore"},
    "EngineCore's scheduler": {"EngineCore"},
    "the API server": {"client"},
    "no workers": {"EngineCore"},
}


@contextmanager
def hanging(scene: str, queue: str) -> Iterator[dict[str, int]]:
    """The pids of its processes, by name, while it hangs."""
    with tempfile.TemporaryDirectory(prefix="hang") as place:
        folder = Path(place)
        (folder / "hanging_vllm.py").symlink_to(ROOT / "tests/engines/hanging_vllm.py")
        plugin = folder / "hanging-1.dist-info"
        plugin.mkdir()
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: hanging\nVersion: 1\n")
        (plugin / "entry_points.txt").write_text(_PLUGIN)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "MEMLANE_"))}
        own = {
            "PYTHONPATH": f"{folder}:{ROOT / 'benchmarks/engines'}",
            "HANG": scene,
            "HANG_WHEN": str(folder / "now"),
            "MEMLANE_VLLM": QUEUES[queue],
            "TMPDIR": place,
        }
        script = str(folder / "hanging_vllm.py")
        with (folder / "output").open("w+") as output:
            process = subprocess.Popen(
                [str(environment.PYTHON), script, str(environment.MODEL)],
                env={**clean, **environment.VARIABLES, **own},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            left: set[str] = set()
            try:
                pids = _reported(process, Path(output.name))
                left = {path for path, who in holders_in("/dev/shm") if who.pid in pids.values()}
                yield pids
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                for path in left:
                    Path(path).unlink(missing_ok=True)


def _reported(process: subprocess.Popen[bytes], output: Path) -> dict[str, int]:
    end = time.monotonic() + STARTS
    while time.monotonic() < end and process.poll() is None:
        for line in output.read_text().splitlines():
            if line.startswith("pids: "):
                time.sleep(SETTLES)
                pairs = (word.split("=") for word in line.split()[1:])
                return {name: int(pid) for name, pid in pairs}
        time.sleep(0.5)
    raise RuntimeError(f"it has not started:\n{output.read_text()[-4000:]}")


@dataclass(frozen=True)
class Said:
    """The output of `memlane stuck`.

    Attributes:
        text: in words for the table.
        names: who hangs, or may hang.
        code: its exit code.
        seconds: that it took beyond `--after`.
        output: all of it.
    """

    text: str
    names: set[str]
    code: int
    seconds: float
    output: str

    def is_right(self, scene: str) -> bool:
        """It names the culprit, or says that it is one of several with the culprit among them."""
        culprits = CULPRITS[scene]
        if self.code == 1:
            return self.names == culprits and len(culprits) == 1
        return self.code == 3 and culprits <= self.names


def stuck(pids: Mapping[str, int], *words: str) -> Said:
    command = [str(environment.PYTHON), "-m", "memlane", "stuck", "--after", str(AFTER), "--json"]
    began = time.monotonic()
    done = subprocess.run([*command, *words], capture_output=True, text=True)
    seconds = time.monotonic() - began - AFTER
    if done.returncode not in (0, 1, 3):
        raise RuntimeError(done.stderr)
    names = {pid: name for name, pid in pids.items()}
    answer = json.loads(done.stdout)
    text, found = _told(answer, names)
    return Said(text, found, done.returncode, seconds, done.stdout)


def _told(answer: Mapping[str, Any], names: Mapping[int, str]) -> tuple[str, set[str]]:
    for wait in answer["stuck"]:
        awaited = [names.get(who["pid"], str(who["pid"])) for who in wait["awaited"]]
        if wait.get("decided", wait.get("is_decided")):
            return f"names {awaited[0]}", {awaited[0]}
        return f"undecided: {' or '.join(awaited)}", set(awaited)
    for silence in answer["silent"]:
        active = [who for who in silence["processes"] if who["at_rest"] is not True]
        found = {names.get(who["pid"], str(who["pid"])) for who in active}
        return f"no queue has moved: {', '.join(sorted(found)) or 'all rest'}", found
    if answer["starting"]:
        return "starting", set()
    return "nobody", set()


def main() -> None:
    """Prints a row for each hang as soon as it is seen, and says whether it is right."""
    environment.set_up("0.32")
    scenes = [each for each in SCENES if each in sys.argv] or SCENES
    queues = [each for each in QUEUES if each in sys.argv] or QUEUES
    print("| hang | queues | with stacks | code | `--no-stacks` | code |")
    print("|---|---|---|---|---|---|", flush=True)
    wrong = 0
    for queue in queues:
        for scene in scenes:
            with hanging(scene, queue) as pids:
                full, bare = stuck(pids), stuck(pids, "--no-stacks")
            print(f"| {scene} | {queue} | {full.text} | {full.code} | {bare.text} | {bare.code} |")
            for said in (full, bare):
                is_right = said.is_right(scene)
                wrong += not is_right
                word = "right" if is_right else "WRONG"
                print(f"{word}, {said.seconds:+.1f} s", file=sys.stderr)
                if not is_right:
                    print(said.output, file=sys.stderr)
            sys.stdout.flush()
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
