"""The same model in one process, to check the engine against.

It uses the same shards, the same batches and the same order of additions, and none of the queues.
It sees the images as the requests brought them, and not in the store. So the tokens are equal to
the last bit, or something went wrong between the processes.
"""

import math
from collections.abc import Iterable
from functools import partial

from .batching import Batcher, Request
from .model import Batch, ModelConfig, Shard, combine, elect


def run_reference(
    config: ModelConfig, workers: int, batcher: Batcher, joined: Iterable[int]
) -> None:
    """Run the engine's steps; for each of them it is said how many requests had joined.

    Ends early if there is nothing to run in one of them: the tokens differ by then.
    """
    shards = [Shard(config, rank, workers) for rank in range(workers)]
    for count in joined:
        first_new = batcher.joined
        decision = batcher.decide(math.inf, partial(_has_joined, count))
        if decision is None:
            return
        for number in range(first_new, batcher.joined):
            image = batcher.sequences[number].request.image
            if image is not None:
                shards[0].see(number, image.pixels)  # its embeddings are everybody's
        for shard in shards:
            shard.drop(decision["drop"])
        batch = Batch(decision, config)
        hidden = shards[0].embed(batch)
        for layer in range(config.layers):
            hidden = hidden + combine([shard.block(layer, hidden, batch) for shard in shards])
        batcher.accept(decision, elect([shard.vote(hidden, batch) for shard in shards]))


def _has_joined(count: int, number: int, _request: Request) -> bool:
    return number < count
