"""The same model in one process, to check the engine against.

It uses the same shards and the same order of additions, but nothing else of the engine: no queues,
no store (it takes the images from the requests), and a cache with room for all sequences, so that
no block is ever moved. Its steps may differ, because results do not depend on what runs beside a
sequence (see `model.py`). So if the tokens differ, the engine has lost or corrupted data.
"""

import math

from .batching import Batcher
from .model import Batch, ModelConfig, Shard, combine, elect


def run_reference(
    config: ModelConfig, workers: int, batcher: Batcher, most_steps: int | None = None
) -> None:
    """Run all requests to their end, or for `most_steps` steps."""
    shards = [Shard(config, rank, workers, batcher.blocks.pools.device) for rank in range(workers)]
    steps = 0
    while steps != most_steps:
        first_new = batcher.joined
        decision = batcher.decide(math.inf)
        if decision is None:
            return
        for number in range(first_new, batcher.joined):
            image = batcher.sequences[number].request.image
            if image is not None:
                shards[0].see(number, image.pixels)  # shard 0 embeds for all
        for shard in shards:
            shard.drop(decision["drop"])
        batch = Batch(decision, config)
        hidden = shards[0].embed(batch)
        for layer in range(config.layers):
            hidden = hidden + combine([shard.block(layer, hidden, batch) for shard in shards])
        batcher.accept(decision, elect([shard.vote(hidden, batch) for shard in shards]))
        steps += 1
