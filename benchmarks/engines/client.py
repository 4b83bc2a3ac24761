"""A client of vLLM, run in vLLM's environment: `python client.py MODEL speed`, or `... kill ROLE`.

What it measures it prints as one line of JSON behind `@@`; everything else is vLLM's log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def tell(**facts: object) -> None:
    print("@@" + json.dumps(facts), flush=True)


def processes() -> dict[int, tuple[str, float]]:
    """Of this session: command line and CPU seconds of each that is alive."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            name = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # gone meanwhile
            continue
        if int(fields[3]) == os.getsid(0) and fields[0] != "Z":
            ticks = int(fields[11]) + int(fields[12])
            found[int(entry.name)] = (name, ticks / os.sysconf("SC_CLK_TCK"))
    return found


class Engine:
    """Two workers, a tiny model."""

    def __init__(self, model: str) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            max_model_len=4096,
            disable_log_stats=True,
        )

    def generate(self, prompts: int, tokens: int, **sampling: Any) -> list[list[int]]:
        """The tokens of each prompt."""
        from vllm import SamplingParams

        outputs = self._llm.generate(
            [{"prompt_token_ids": [5, 6, 7, 8 + i]} for i in range(prompts)],
            [
                SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling)
                for _ in range(prompts)
            ],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


def speed(engine: Engine) -> None:
    """Tokens, throughput, steps, and what a trickle of requests costs."""
    greedy = engine.generate(20, 32, temperature=0)
    seeded = engine.generate(20, 32, temperature=0.8, seed=7)
    began = time.monotonic()
    engine.generate(20, 100, temperature=0)
    rate = 20 * 100 / (time.monotonic() - began)
    began = time.monotonic()
    engine.generate(1, 200, temperature=0)
    steps = 200 / (time.monotonic() - began)
    before = sum(cpu for _, cpu in processes().values())
    began = time.monotonic()
    for turn in range(40):
        engine.generate(1, 4, temperature=0)
        time.sleep(max(0.0, began + (turn + 1) / 2 - time.monotonic()))
    cpu = sum(cpu for _, cpu in processes().values()) - before
    tell(tokens=[greedy, seeded], tokens_per_s=rate, steps_per_s=steps, trickle_cpu_s=cpu)


def strike(engine: Engine, what: str, role: str) -> None:
    """Does it to one process in the middle of a long request, and tells what the client gets."""
    found = {name: pid for pid, (name, _) in processes().items() if name.startswith(role)}
    if len(found) != 1:
        raise SystemExit(f"no single {role} in {processes()}")
    (victim,) = found.values()

    def do() -> None:
        tell(victim=victim)
        os.kill(victim, SIGNALS[what])

    threading.Timer(2, do).start()

    def end() -> None:
        tell(left=[])
        os._exit(0)

    # Nothing ends by itself: after a stop, and in a client of this kind when EngineCore is killed.
    patience = threading.Timer(22 if what == "stop" else 40, end)
    patience.start()
    try:
        engine.generate(1, 4000, temperature=0)
    except BaseException as error:
        patience.cancel()
        tell(error=f"{type(error).__name__}: {error}")
    time.sleep(8)
    left = [name for pid, (name, _) in processes().items() if pid != os.getpid()]
    tell(left=[name for name in left if "resource_tracker" not in name])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    model, what, *role = sys.argv[1:]
    if what == "speed":
        speed(Engine(model))
    else:
        strike(Engine(model), what, role[0])
