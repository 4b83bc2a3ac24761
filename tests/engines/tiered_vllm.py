"""A real vLLM with or without tiers, run in its environment: `tiered_vllm.py MODEL ROUNDS OPTIONS`.

MODEL is a folder with a `config.json`; it gets weights if it has none. OPTIONS is JSON:
`tensor_parallel_size`, `data_parallel_size` (each replica gets every prompt), `tier` (the
configuration of the tier, by default a disk tier, or null), `policy` (of the primary tier),
`events` (the endpoint of vLLM's KV events), `resets` (the rounds before which its caches are
reset). Prints `@@` and JSON: the tokens of each round, and how many of each prompt's tokens were
cached; at last the tier's metrics, and how many of its blocks the events tell of. It waits for a
line on standard input between rounds and at the end, and ends as vLLM does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS, TOKENS, TAIL = 6, 480, 32
BLOCKS = 40  # of 32 tokens, on the device and in memory each: the prompts need 90
LAYERS, HEADS, SIZE = 4, 4, 64
BLOCK_BYTES = 2 * LAYERS * HEADS * SIZE * 4 * 32
MODULE = "memlane.engines.vllm.tiers"


def tell(**facts: object) -> None:
    print("@@" + json.dumps(facts), flush=True)


def connector(options: dict[str, Any]) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`, as the manual gives it but for the worker."""
    tier = options["tier"]
    if "type" not in tier:
        tier = {"type": "DiskTier", "module_path": "draining_tier", **tier}
    extra: dict[str, Any] = {
        "spec_name": "CpuTiering",
        "spec_module_path": "cpu_offloading",
        "cpu_bytes_to_use": BLOCKS * BLOCK_BYTES,
        "secondary_tiers": [{"module_path": MODULE, **tier}],
    }
    if policy := options.get("policy"):
        extra |= {"eviction_policy": policy, "cache_policy_module_path": MODULE}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def add_weights(model: Path) -> None:
    """Random ones, so large that the next token depends on all before it: vLLM's dummy weights
    repeat the last one, whatever the cache has."""
    import torch
    from safetensors.torch import save_file

    facts = json.loads((model / "config.json").read_text())
    size, inner, vocabulary = (
        facts[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    shapes = {"model.embed_tokens": (vocabulary, size), "lm_head": (vocabulary, size)}
    for layer in range(facts["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{each}_proj": (size, size) for each in "qkvo"}
        shapes |= {f"{name}.mlp.{each}_proj": (inner, size) for each in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj": (size, inner)}
        shapes |= {f"{name}.{each}_layernorm": (size,) for each in ("input", "post_attention")}
    shapes["model.norm"] = (size,)
    torch.manual_seed(1)
    weights = {
        f"{name}.weight": 0.08 * torch.randn(shape) if len(shape) == 2 else torch.ones(shape)
        for name, shape in shapes.items()
    }
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def main() -> None:
    here = str(Path(__file__).parent)
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    model, rounds, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    if not (Path(model) / "model.safetensors").exists():
        add_weights(Path(model))
    arguments: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "enforce_eager": True,
        "dtype": "float32",
        "seed": 1,
        "tensor_parallel_size": options.get("tensor_parallel_size", 1),
        "data_parallel_size": options.get("data_parallel_size", 1),
        "distributed_executor_backend": "mp",
        "disable_log_stats": False,
        "enable_prefix_caching": True,
        "block_size": 32,
        "num_gpu_blocks_override": BLOCKS,
        "max_num_seqs": 1,
    }
    if options.get("tier") is not None:
        arguments["kv_transfer_config"] = connector(options)
    asyncio.run(answer(arguments, rounds, options.get("events"), options.get("resets", [])))


class Router:
    """The blocks of a tier, as vLLM's events report them."""

    def __init__(self, endpoint: str) -> None:
        import msgspec
        import zmq
        from vllm.distributed.kv_events import KVEventBatch

        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self.there: set[bytes] = set()

    def read(self) -> None:
        while self._socket.poll(100):
            for event in self._decoder.decode(self._socket.recv_multipart()[-1]).events:
                match type(event).__name__, getattr(event, "medium", None):
                    case "AllBlocksCleared", _:
                        self.there.clear()
                    case "BlockStored", "STORAGE":
                        assert self.there.isdisjoint(event.block_hashes)
                        self.there.update(event.block_hashes)
                    case "BlockRemoved", "STORAGE":
                        self.there.difference_update(event.block_hashes)


async def answer(
    arguments: dict[str, Any], rounds: int, events: str | None, resets: list[int]
) -> None:
    """As `vllm serve` makes its engine."""
    from vllm import SamplingParams
    from vllm.config import KVEventsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.reader import get_metrics_snapshot

    router = None
    if events is not None:
        router = Router(events)
        arguments["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=events
        )
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    sampling = SamplingParams(
        max_tokens=8, temperature=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    # They end alike: that their tokens differ is due to the cache.
    tail = list(range(3, 3 + TAIL))
    prompts = [
        [(7 * at + 13 * number) % 2000 + 3 for at in range(TOKENS - TAIL)] + tail
        for number in range(PROMPTS)
    ]
    for number in range(rounds):
        if number > 0:
            sys.stdin.readline()
        if number in resets:
            assert await engine.reset_prefix_cache(reset_connector=True)
        # One at a time: of those that wait together, vLLM promotes as many as fit in memory.
        outputs = [
            output
            for replica in range(arguments["data_parallel_size"])
            for at, prompt in enumerate(prompts)
            async for output in engine.generate(
                {"prompt_token_ids": prompt},
                sampling,
                f"{number}-{replica}-{at}",
                data_parallel_rank=replica,
            )
        ]
        tell(
            tokens=[list(each.outputs[0].token_ids) for each in outputs],
            cached=[each.num_cached_tokens for each in outputs],
        )
    figures: dict[str, float] = {}
    for step in range(20):  # a step publishes what the one before it has changed
        await engine.do_log_stats()
        figures.clear()
        for metric in get_metrics_snapshot():
            if "memlane" in metric.name:  # of each replica
                figures[metric.name] = figures.get(metric.name, 0) + metric.value
        if router is None:
            break
        router.read()
        if len(router.there) * BLOCK_BYTES == figures.get("vllm:memlane_disk_tier_used"):
            break
        async for _ in engine.generate({"prompt_token_ids": tail[:8]}, sampling, f"step-{step}"):
            pass
    tell(metrics=figures, routed=len(router.there) if router else None)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
