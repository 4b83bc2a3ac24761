"""A real vLLM with two workers, run in its environment: `real_vllm.py MODEL stopped|killed|hung`.

Prints the pids of EngineCore and the workers, then generates while something happens to worker 1.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/engines"))
TITLES = ("VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1")


def hang_in_model(*_: object, **__: object) -> None:
    """In the place of a layer's computation."""
    threading.Event().wait()


def break_model(worker: Any) -> None:
    """Runs in every worker."""
    if worker.rank == 1:
        worker.model_runner.model.forward = hang_in_model


def main() -> None:
    from client import Engine, processes

    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    what = sys.argv[2]
    engine = Engine(sys.argv[1])
    by_title = {title.strip(): pid for pid, (title, _) in processes().items()}
    pids = [by_title[title] for title in TITLES]
    if what == "hung":
        engine._llm.collective_rpc(break_model)
    else:
        wanted = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}[what]
        threading.Timer(1.0, os.kill, (pids[2], wanted)).start()
    print("pids:", *pids, flush=True)
    engine.generate(1, 4000, temperature=0)
    time.sleep(60)


if __name__ == "__main__":
    main()
