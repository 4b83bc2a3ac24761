"""A real vLLM with or without tiers, run in its environment: `tiered_vllm.py MODEL ROUNDS OPTIONS`.

OPTIONS is JSON: `tensor_parallel_size`, `tier` (the configuration of the disk tier, or null),
`policy` (of the primary tier). Prints `@@` and JSON: the tokens of each round, and how many of each
prompt's tokens were cached. Then it waits for a line on standard input, and ends as vLLM does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS, TOKENS = 6, 480
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


def main() -> None:
    here = str(Path(__file__).parent)
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    model, rounds, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    from vllm import LLM, SamplingParams

    workers = options.get("tensor_parallel_size", 1)
    layers, heads, size = 4, 4, 64
    bytes_per_block = 2 * layers * heads * size * 4 * 32
    more: dict[str, Any] = {}
    if options.get("tier") is not None:
        more["kv_transfer_config"] = connector(options, bytes_per_block)
    engine = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        enforce_eager=True,
        dtype="float32",
        seed=1,
        tensor_parallel_size=workers,
        distributed_executor_backend="mp",
        disable_log_stats=False,
        enable_prefix_caching=True,
        block_size=32,
        num_gpu_blocks_override=BLOCKS,
        max_num_seqs=1,
        **more,
    )
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    prompts = [
        {"prompt_token_ids": [(7 * at + 13 * number) % 2000 + 3 for at in range(TOKENS)]}
        for number in range(PROMPTS)
    ]
    for _ in range(rounds):
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        tell(
            tokens=[list(each.outputs[0].token_ids) for each in outputs],
            cached=[each.num_cached_tokens for each in outputs],
        )
    figures = [
        (metric.name, getattr(metric, "value", None))
        for metric in engine.get_metrics()
        if "memlane" in metric.name
    ]
    tell(metrics=dict(figures))
    sys.stdin.readline()


if __name__ == "__main__":
    main()
