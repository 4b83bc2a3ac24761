"""The same model in one process, to check the engine against.

It uses the same shards, the same batches and the same order of additions, and none of the queues.
So the tokens are equal to the last bit, or something went wrong between the processes.
"""

from collections.abc import Iterable

from .batching import Batcher
from .model import Batch, ModelConfig, Shard, combine, elect


def run_reference(
    config: ModelConfig, workers: int, batcher: Batcher, decided: Iterable[float]
) -> None:
    """Run the steps that the engine decided at these times, in seconds from the start.

    Ends early if there is nothing to run at one of them: the tokens differ by then.
    """
    shards = [Shard(config, rank, workers) for rank in range(workers)]
    for elapsed in decided:
        decision = batcher.decide(elapsed)
        if decision is None:
            return
        for shard in shards:
            shard.drop(decision["drop"])
        batch = Batch(decision, config)
        hidden = shards[0].embed(batch)
        for layer in range(config.layers):
            hidden = hidden + combine([shard.block(layer, hidden, batch) for shard in shards])
        batcher.accept(decision, elect([shard.vote(hidden, batch) for shard in shards]))
