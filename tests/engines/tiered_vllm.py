"""A real vLLM with or without tiers, run in its environment: `tiered_vllm.py MODEL ROUNDS OPTIONS`.

MODEL is a folder with a `config.json`; it gets weights if it has none. OPTIONS is JSON:
`tensor_parallel_size`, `data_parallel_size` (each replica gets every prompt), `tier` (the
configuration of the tier, by default a disk tier, or null), `policy` (of the primary tier). Prints
`@@` and JSON: the tokens of each round, and how many of each prompt's tokens were cached; at last
the tier's metrics. It waits for a line on standard input between rounds and at the end, and ends as
vLLM does.
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
MODULE = "memlane.engines.vllm.tiers"


def tell(**facts: object) -> None:
    print("@@" + json.dumps(facts), flush=True)


def connector(options: dict[str, Any], bytes_per_block: int) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`, as the manual gives it but for the worker."""
    extra: dict[str, Any] = {
        "spec_name": "CpuTiering",
        "spec_module_path": "cpu_offloading",
        "cpu_bytes_to_use": BLOCKS * bytes_per_block,
        "secondary_tiers": [{"type": "DiskTier", "module_path": MODULE, **options["tier"]}],
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
    layers, heads, size = 4, 4, 64
    bytes_per_block = 2 * layers * heads * size * 4 * 32
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
        arguments["kv_transfer_config"] = connector(options, bytes_per_block)
    asyncio.run(answer(arguments, rounds))


async def answer(arguments: dict[str, Any], rounds: int) -> None:
    """As `vllm serve` makes its engine."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.reader import get_metrics_snapshot

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
    await engine.do_log_stats()
    figures: dict[str, float] = {}
    for metric in get_metrics_snapshot():
        if "memlane" in metric.name:  # of each replica
            figures[metric.name] = figures.get(metric.name, 0) + metric.value
    tell(metrics=figures)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
