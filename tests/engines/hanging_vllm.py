"""A real vLLM that hangs on purpose, run in its environment: `hanging_vllm.py MODEL SCENE`.

It is a plug-in of vLLM, too, which the test installs: it reads SCENE from `HANG` in every process
of the engine, and breaks the place in which that scene hangs. The hang begins once the engine has
answered, which is when the file exists that `HANG_WHEN` names. Prints the pids of the processes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PORT = 18477  # of the API server
# By its name: vLLM turns "uni" into a worker process where it runs on a CPU.
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_LOCK = threading.Lock()
_LOCK.acquire()

Call = Callable[..., Any]


def wait_for_a_lock() -> None:
    _LOCK.acquire()


def hang_in_c() -> None:
    """The GIL is free."""
    ctypes.CDLL(None).pause()


def hang_in_c_with_the_gil() -> None:
    ctypes.PyDLL(None).pause()


def enter_a_barrier() -> None:
    """A collective that not all of the others enter."""
    import torch.distributed as dist

    dist.barrier()


def enter_another_collective() -> None:
    """Enters a collective that the peer is not in."""
    import torch
    import torch.distributed as dist

    dist.recv(torch.zeros(1), src=1)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


# Of a worker, before it runs the model: by scene and rank.
WORKERS: dict[str, dict[int, Call]] = {
    "C with the GIL": {1: hang_in_c_with_the_gil},
    "C without the GIL": {1: hang_in_c},
    "a lock, worker 1": {1: wait_for_a_lock},
    "a lock, worker 0": {0: wait_for_a_lock},
    "both in collectives": {0: enter_another_collective, 1: enter_a_barrier},
    "a worker stopped": {1: stop},
}
# Elsewhere: by scene the module, the class, the method, and who hangs in it.
OTHERS = {
    "EngineCore's output": ("vllm.v1.engine.core", "MsgpackEncoder", "encode_into"),
    "EngineCore's scheduler": ("vllm.v1.core.sched.scheduler", "Scheduler", "schedule"),
    "loading of the model": ("vllm.v1.worker.gpu_worker", "Worker", "load_model"),
    "one in a collective": ("vllm.v1.worker.gpu_worker", "Worker", "check_health"),
    "the API server": ("starlette.routing", "Route", "handle"),
    "no workers": ("vllm.v1.executor.uniproc_executor", "UniProcExecutor", "execute_model"),
}
SCENES = [*WORKERS, *OTHERS]


def _is_time() -> bool:
    return Path(os.environ["HANG_WHEN"]).exists()


def break_it() -> None:
    """The plug-in."""
    import importlib

    scene = os.environ["HANG"]
    if scene in WORKERS:
        names, act = ("vllm.v1.worker.worker_base", "WorkerWrapperBase", "execute_model"), None
    else:
        names, act = OTHERS[scene], wait_for_a_lock
    with suppress(ImportError):  # circular, in a process that does not come there
        owner = getattr(importlib.import_module(names[0]), names[1])
        original = getattr(owner, names[2])

        def hanging(self: Any, *words: Any, **more: Any) -> Any:
            if scene == "loading of the model":
                if self.rank == 1:
                    wait_for_a_lock()
            elif scene == "one in a collective":
                if self.rank == 1 and _is_time():
                    enter_a_barrier()
            elif _is_time():
                (act or WORKERS[scene].get(self.global_rank, lambda: None))()
            return original(self, *words, **more)

        setattr(owner, names[2], hanging)


# The engine ---------------------------------------------------------------------------------------


def pids() -> dict[str, int]:
    """Returns the pids of vLLM's processes of this session, by their own names."""
    from client import processes

    found = {title.strip().removeprefix("VLLM::"): pid for pid, (title, _) in processes().items()}
    return {title: pid for title, pid in found.items() if title.startswith(("Engine", "Worker"))}


def report() -> None:
    known = {"client": os.getpid(), **pids()}
    print("pids:", *(f"{name}={pid}" for name, pid in known.items()), flush=True)
    Path(os.environ["HANG_WHEN"]).touch()


def until(is_so: Callable[[], Any]) -> None:
    while not is_so():
        time.sleep(0.2)


def load(model: str) -> None:
    """Its second worker never ends loading."""
    from client import Engine

    threading.Thread(target=Engine, args=(model,), daemon=True).start()
    until(lambda: "Worker_TP0" in pids() and "Worker_TP1" in pids())
    time.sleep(10)  # so far it goes
    report()


def serve(model: str) -> None:
    """With vLLM's own server."""
    words = f"-m vllm.entrypoints.openai.api_server --model {model} --skip-tokenizer-init "
    words += "--load-format dummy --max-model-len 4096 --enforce-eager "
    words += f"--dtype float32 --tensor-parallel-size 2 --host 127.0.0.1 --port {PORT}"
    server = subprocess.Popen([sys.executable, *words.split()])
    url = f"http://127.0.0.1:{PORT}/health"

    def is_up() -> bool:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return True
        return False

    until(is_up)
    known = {"client": server.pid, **pids()}
    print("pids:", *(f"{name}={pid}" for name, pid in known.items()), flush=True)
    Path(os.environ["HANG_WHEN"]).touch()
    with suppress(OSError):
        urllib.request.urlopen(url, timeout=5)


def main() -> None:
    model, scene = sys.argv[1], os.environ["HANG"]
    if scene == "loading of the model":
        load(model)
    elif scene == "the API server":
        serve(model)
    else:
        from client import Engine

        alone = {"tensor_parallel_size": 1, "distributed_executor_backend": UNIPROC}
        engine = Engine(model, **(alone if scene == "no workers" else {}))
        engine.generate(1, 4, temperature=0)
        report()
        if scene == "one in a collective":
            engine._llm.collective_rpc("check_health")
        engine.generate(1, 20, temperature=0)
    threading.Event().wait()


if __name__ == "__main__":
    main()
