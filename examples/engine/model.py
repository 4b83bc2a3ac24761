"""A tensor-parallel transformer in numpy: the shard that one worker holds, and how shards combine.

Heads, MLP columns and vocabulary are split over the workers as in Megatron-LM. Attention and MLP
read the same input (the parallel block of GPT-J and PaLM) instead of one after the other, so a
layer needs one reduction and not two. The weights are those of a tiny model that was trained on
memlane's manual (`train.py`): it forms words, and knows nothing.

Matrices are multiplied run by run, because BLAS may round differently when there are more rows. So
a sequence's result is bit-identical, whatever runs beside it, in whatever steps.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .batching import Decision
from .images import GRID, TOKENS, UNIT, Pixels
from .kv_cache import Array, KVCache
from .paging import BLOCK_SIZE


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; the same in every process. A token is a byte."""

    layers: int = 3
    heads: int = 8
    head_dim: int = 16
    mlp_columns: int = 256
    vocabulary: int = 256
    seed: int = 16

    @property
    def hidden(self) -> int:
        """Width of the hidden state."""
        return self.heads * self.head_dim

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return the (inputs, outputs) of each matrix in `WEIGHTS`, by its name there."""
        shapes = {"embedding": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            shapes[f"qkv{layer}"] = (self.hidden, 3 * self.hidden)
            shapes[f"attention_out{layer}"] = (self.hidden, self.hidden)
            shapes[f"up{layer}"] = (self.hidden, self.mlp_columns)
            shapes[f"down{layer}"] = (self.mlp_columns, self.hidden)
        return shapes


WEIGHTS = Path(__file__).with_name("weights.npz")
"""Each matrix as signed bytes, with a scale for each of its columns."""

EPSILON = 1e-6
FLOAT_BYTES = 4

CELLS = UNIT // GRID
"""Every patch of an image is shrunk to CELLS x CELLS in each of three channels."""


class Votes(NamedTuple):
    """Per run, the best next token of one shard's vocabulary, and its logit."""

    tokens: npt.NDArray[np.int64]
    logits: Array


class Batch:
    """The rows of one step: the tokens of all runs, one run after the other."""

    def __init__(self, decision: Decision, config: ModelConfig) -> None:
        """Lay out the runs of a decision."""
        self.runs: list[_Rows] = []
        tokens = bytearray()
        positions: list[int] = []
        for (sequence, position, chunk), table in zip(
            decision["run"], decision["tables"], strict=True
        ):
            rows = slice(len(tokens), len(tokens) + len(chunk))
            self.runs.append(_Rows(sequence, position, rows, table))
            tokens += chunk
            positions += range(position, position + len(chunk))
        self.tokens = np.frombuffer(tokens, np.uint8)
        self.last_rows = [run.rows.stop - 1 for run in self.runs]
        # Rotary position embedding: each pair of numbers in a head rotates at its own speed.
        half = config.head_dim // 2
        angles = np.array(positions)[:, None] * 10_000.0 ** (-np.arange(half) / half)
        self.cos, self.sin = np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32)


class Shard:
    """The part of the model that worker `rank` of `world` holds; the whole model if `world` is 1.

    A step is `embed`, then `block` for each layer (add up the results of all shards, then add the
    sum to the hidden state), then `vote`. Pass a sequence's image to `see` before its first step.
    """

    def __init__(self, config: ModelConfig, rank: int, world: int, blocks: int) -> None:
        """Read the whole model and keep this shard; a real engine would load only its own.

        The cache has `blocks` blocks.
        """
        heads = _share(config.heads, rank, world)
        columns = _share(config.mlp_columns, rank, world)
        vocabulary = _share(config.vocabulary, rank, world)
        self._heads = heads.stop - heads.start
        self._head_dim = config.head_dim
        self._first_token = vocabulary.start
        self.cache = KVCache(blocks, config.layers, self._heads, config.head_dim)

        weights = _read_weights(config)
        self._embedding = weights["embedding"]
        self._head = self._embedding[vocabulary].T / np.float32(config.hidden**0.5)
        by_head = (config.heads, config.head_dim)
        self._layers: list[_Layer] = []
        for layer in range(config.layers):
            qkv = weights[f"qkv{layer}"].reshape(config.hidden, 3, *by_head)[:, :, heads]
            out = weights[f"attention_out{layer}"].reshape(*by_head, config.hidden)[heads]
            self._layers.append(
                _Layer(
                    qkv=qkv.reshape(config.hidden, -1).copy(),
                    attention_out=out.reshape(-1, config.hidden).copy(),
                    up=weights[f"up{layer}"][:, columns].copy(),
                    down=weights[f"down{layer}"][columns].copy(),
                )
            )
        # The manual has no images: what a patch looks like to the model is random.
        drawn = np.random.default_rng(config.seed).standard_normal(
            (3 * CELLS * CELLS, config.hidden), np.float32
        )
        self._patches = drawn / np.float32(len(drawn) ** 0.5)
        self._seen: dict[int, Array] = {}

    def see(self, sequence: int, pixels: Pixels) -> None:
        """Compute the embeddings of a sequence's image; nothing refers to the pixels afterwards."""
        self._seen[sequence] = _patches_of(pixels) @ self._patches

    def embed(self, batch: Batch) -> Array:
        """Return the hidden state before the first layer, (rows, hidden), equal in all shards."""
        hidden: Array = self._embedding[batch.tokens]
        for sequence, position, rows, _ in batch.runs:
            if position < TOKENS and sequence in self._seen:
                seen = self._seen[sequence][position : position + rows.stop - rows.start]
                hidden[rows.start : rows.start + len(seen)] = seen
        return hidden

    def block(self, layer: int, hidden: Array, batch: Batch) -> Array:
        """Return this shard's partial sum of a layer, (rows, hidden), and cache keys and values."""
        weights = self._layers[layer]
        normed = _rms_norm(hidden)
        qkv = _product(normed, weights.qkv, batch).reshape(-1, 3, self._heads, self._head_dim)
        qkv = qkv.transpose(1, 2, 0, 3)  # three times (heads, rows, head_dim)
        queries, keys = _rotate(qkv[:2], batch)
        values = qkv[2]
        attended = np.empty_like(queries)
        for _, position, rows, table in batch.runs:
            all_keys, all_values = self.cache.extend(
                table, layer, position, keys[:, rows], values[:, rows]
            )
            attended[:, rows] = _attend(queries[:, rows], all_keys, all_values, position)
        attended = attended.transpose(1, 0, 2).reshape(len(hidden), -1)
        attention = _product(attended, weights.attention_out, batch)
        activated = np.maximum(_product(normed, weights.up, batch), 0)
        return attention + _product(activated, weights.down, batch)

    def vote(self, hidden: Array, batch: Batch) -> Votes:
        """Choose this shard's best token to follow the last row of each run."""
        rows = _rms_norm(hidden[batch.last_rows])
        logits = (rows[:, None] @ self._head)[:, 0]  # row by row
        best = logits.argmax(axis=1)
        return Votes(best + self._first_token, logits.max(axis=1))

    def restart(self) -> None:
        """Forget everything but the weights."""
        self._seen.clear()

    def drop(self, sequences: list[int]) -> None:
        """Forget the images of finished sequences. The scheduler keeps track of their blocks."""
        for sequence in sequences:
            self._seen.pop(sequence, None)


def combine(partial_sums: list[Array]) -> Array:
    """Add partial sums in rank order: a float sum depends on the order."""
    total = partial_sums[0]
    for partial_sum in partial_sums[1:]:
        total = total + partial_sum
    return total


def elect(votes: list[Votes]) -> list[int]:
    """Choose the best token of each run over all shards; ties go to the lowest token."""
    winners = np.stack([vote.logits for vote in votes]).argmax(axis=0)
    tokens = np.stack([vote.tokens for vote in votes])
    return [int(tokens[winner, run]) for run, winner in enumerate(winners)]


class _Rows(NamedTuple):
    """The place of a run in a batch, and in the cache."""

    sequence: int
    position: int
    """Position of the first row in the sequence."""
    rows: slice
    table: list[int]


class _Layer(NamedTuple):
    """One shard's weights of a layer; input weights are split by columns, output ones by rows."""

    qkv: Array
    attention_out: Array
    up: Array
    down: Array


def _read_weights(config: ModelConfig) -> dict[str, Array]:
    with np.load(WEIGHTS) as file:
        return {name: file[name] * file[f"{name}.scales"] for name in config.shapes()}


def block_bytes(config: ModelConfig, world: int) -> int:
    """Return the size of a block in the cache of the worker that holds the most heads."""
    shares = [_share(config.heads, rank, world) for rank in range(world)]
    heads: int = max(share.stop - share.start for share in shares)
    return config.layers * 2 * heads * BLOCK_SIZE * config.head_dim * FLOAT_BYTES


def _share(total: int, rank: int, world: int) -> slice:
    return slice(total * rank // world, total * (rank + 1) // world)


def _product(rows: Array, weights: Array, batch: Batch) -> Array:
    """Multiply rows and weights, each run by itself."""
    product = np.empty((len(rows), weights.shape[1]), np.float32)
    for run in batch.runs:
        np.matmul(rows[run.rows], weights, out=product[run.rows])
    return product


def _patches_of(pixels: Pixels) -> Array:
    """Return the patches of an image of any size, (TOKENS, 3 * CELLS * CELLS), normalised.

    Pixels are added up as integers: the sum is exact, wherever they are in memory.
    """
    _, height, width = pixels.shape
    # Whole rows first: that reads memory in order, and leaves little for the second sum.
    rows = pixels.reshape(3, UNIT, height // UNIT, width).sum(axis=2, dtype=np.uint32)
    cells = rows.reshape(3, UNIT, UNIT, width // UNIT).sum(axis=3, dtype=np.uint32)
    cut = cells.reshape(3, GRID, CELLS, GRID, CELLS).transpose(1, 3, 0, 2, 4)
    patches = cut.reshape(TOKENS, -1).astype(np.float32)
    return _rms_norm(patches - patches.mean(axis=1, keepdims=True))


def _rms_norm(hidden: Array) -> Array:
    mean_square = np.square(hidden).mean(axis=-1, keepdims=True)
    normed: Array = hidden / np.sqrt(mean_square + np.float32(EPSILON))
    return normed


def _rotate(heads: Array, batch: Batch) -> Array:
    """Rotate heads, (..., rows, head_dim), by the positions of their rows."""
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    return np.concatenate(
        [first * batch.cos - second * batch.sin, first * batch.sin + second * batch.cos], axis=-1
    )


def _attend(queries: Array, keys: Array, values: Array, position: int) -> Array:
    """Causal attention of rows from `position` on: each attends to all rows up to itself."""
    scores = queries @ keys.transpose(0, 2, 1) / np.float32(queries.shape[-1] ** 0.5)
    if queries.shape[1] > 1:  # the only row of a decode is last and attends to all
        own = position + np.arange(queries.shape[1])[:, None]
        scores[:, np.arange(keys.shape[1]) > own] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended: Array = (weights / weights.sum(axis=-1, keepdims=True)) @ values
    return attended
