"""A client of vLLM, run in its environment: `client.py MODEL COMMAND [ROLE]` (see the end).

Prints what it measures as lines of JSON after `@@`; everything else is vLLM's log.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def tell(**facts: object) -> None:
    print("@@" + json.dumps(facts), flush=True)


def processes() -> dict[int, tuple[str, float]]:
    """Command line and CPU seconds of each live process of this session, by pid."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            name = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if int(fields[3]) == os.getsid(0) and fields[0] != "Z":
            ticks = int(fields[11]) + int(fields[12])
            found[int(entry.name)] = (name, ticks / os.sysconf("SC_CLK_TCK"))
    return found


def options(model: str) -> dict[str, Any]:
    """Two workers, a tiny model."""
    return {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "enforce_eager": True,
        "dtype": "float32",
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "disable_log_stats": True,
    }


SEES = {
    "load_format": "auto",
    "skip_tokenizer_init": False,
    "max_model_len": 256,
    "mm_processor_cache_type": "shm",
}
BIND = "VLLM_CPU_OMP_THREADS_BIND"
NODES = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": 29517}


@contextmanager
def second_node(model: str) -> Iterator[None]:
    """Runs the second node in a process of its own; each node has one core."""
    environment = {**os.environ, BIND: "1"}
    node = subprocess.Popen([sys.executable, __file__, model, "second node"], env=environment)
    os.environ[BIND] = "0"
    try:
        yield
    finally:
        node.kill()


def be_second_node(model: str) -> None:
    """A node without an engine, with one worker."""
    from vllm import AsyncEngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    arguments = AsyncEngineArgs(**options(model), **NODES, node_rank=1)
    executor = MultiprocExecutor(
        arguments.create_engine_config(headless=True), monitor_workers=False
    )
    executor.start_worker_monitor(inline=True)


class Engine:
    """A synchronous engine: the client waits for each call."""

    def __init__(self, model: str, **more: Any) -> None:
        from vllm import LLM

        self._llm = LLM(**{**options(model), **more})

    def generate(
        self, prompts: int, tokens: int, images: Sequence[Any] = (), **sampling: Any
    ) -> list[list[int]]:
        """Returns the tokens for each prompt, which has an image if there are `images`."""
        from vllm import SamplingParams

        given: list[Any] = [{"prompt_token_ids": [5, 6, 7, 8 + i]} for i in range(prompts)]
        for prompt, image in zip(given, images, strict=False):
            prompt["multi_modal_data"] = {"image": image}
        same = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling)
        outputs = self._llm.generate(given, same, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def text(engine: Engine) -> list[list[list[int]]]:
    """Greedy and seeded tokens."""
    greedy = engine.generate(20, 32, temperature=0)
    return [greedy, engine.generate(20, 32, temperature=0.8, seed=7)]


def speed(engine: Engine) -> None:
    """Measures tokens, throughput, steps, and the CPU time of a trickle of requests."""
    tokens = text(engine)
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
    tell(tokens=tokens, tokens_per_s=rate, steps_per_s=steps, trickle_cpu_s=cpu)


def speed_of_nodes(engine: Engine) -> None:
    """Measures tokens, throughput and steps."""
    greedy = engine.generate(20, 32, temperature=0)
    began = time.monotonic()
    engine.generate(20, 100, temperature=0)
    rate = 20 * 100 / (time.monotonic() - began)
    began = time.monotonic()
    engine.generate(1, 200, temperature=0)
    tell(tokens=greedy, tokens_per_s=rate, steps_per_s=200 / (time.monotonic() - began))


def sight(engine: Engine) -> None:
    """Measures tokens for 64 new images, and for the same images from the cache."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(3)
    pictures = [
        Image.fromarray(noise.integers(0, 256, (300, 400, 3), dtype=np.uint8)) for _ in range(64)
    ]
    engine.generate(1, 4, temperature=0)
    tokens, rates = [], []
    for _ in ("new", "cached"):
        began = time.monotonic()
        tokens.append(engine.generate(64, 8, pictures, temperature=0))
        rates.append(64 / (time.monotonic() - began))
    if tokens[0] != tokens[1] or len({str(each) for each in tokens[0]}) < 60:
        raise SystemExit(f"tokens do not tell images apart, or cached ones differ: {tokens}")
    tell(tokens=tokens, new_images_per_s=rates[0], cached_images_per_s=rates[1])


async def strike(model: str, what: str, role: str) -> None:
    """Kills or stops one process during a long request, and reports what the client gets."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options(model)))
    found = {name: pid for pid, (name, _) in processes().items() if name.startswith(role)}
    if len(found) != 1:
        raise SystemExit(f"no single {role} in {processes()}")
    (victim,) = found.values()

    def hit() -> None:
        os.kill(victim, SIGNALS[what])
        tell(victim=victim)

    sampling = SamplingParams(max_tokens=4000, ignore_eos=True, detokenize=False, temperature=0)
    try:
        async with asyncio.timeout(24 if what == "stop" else 40):
            steps = engine.generate({"prompt_token_ids": [5, 6, 7]}, sampling, "long")
            await anext(steps)  # the first takes seconds
            asyncio.get_running_loop().call_later(1, hit)
            async for _ in steps:
                pass
    except TimeoutError:  # after a stop, nothing ends by itself
        tell(left=[])
        os._exit(0)
    except Exception as error:
        tell(error=f"{type(error).__name__}: {error}")
    await asyncio.sleep(8)
    left = [name for pid, (name, _) in processes().items() if pid != os.getpid()]
    tell(left=[name for name in left if "resource_tracker" not in name])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    model, what, *role = sys.argv[1:]
    if what == "text":
        tell(tokens=text(Engine(model)))
    elif what == "speed":
        speed(Engine(model))
    elif what == "images":
        sight(Engine(model, **SEES))
    elif what == "second node":
        be_second_node(model)
    elif what == "nodes":
        with second_node(model):
            speed_of_nodes(Engine(model, node_rank=0, **NODES))
    else:
        asyncio.run(strike(model, what, role[0]))
