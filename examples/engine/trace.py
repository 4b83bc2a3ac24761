"""Request traces of real services: JSON lines with the arrival and size of each request.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, ...]}

Times are in milliseconds from the start, lengths in tokens; each 512 tokens of the prompt have an
id. Where two prompts have the same id, they have the same content there and everywhere before it.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from .batching import Request

BLOCK_TOKENS = 512
"""Tokens of a prompt that one of its `hash_ids` stands for; the last one may stand for fewer."""

TOKEN_SCALES = tuple(1 << power for power in range(BLOCK_TOKENS.bit_length()))
"""These divide a block evenly, so equal ids mean equal content in the scaled prompts, too."""

NotNegative = Annotated[int, msgspec.Meta(ge=0)]


class TraceError(ValueError):
    """A file is not a trace; the message says in which line."""


class TraceLine(msgspec.Struct, frozen=True):
    """One request of the trace. Other fields are ignored."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Its arrival, in ms from the start."""
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens of the prompt."""
    output_length: NotNegative
    """Tokens of the answer."""
    hash_ids: list[NotNegative]


@dataclass(frozen=True)
class Scale:
    """The factors by which a trace is scaled down to a small model on a small machine."""

    time: float
    """Seconds of the replay for one second of the trace."""
    tokens: int
    """Tokens of the trace for one token of the replay; one of `TOKEN_SCALES`."""

    def tokens_of(self, length: int) -> int:
        """Scale a length in tokens; rounded up, and at least 1."""
        return max(1, -(-length // self.tokens))


def read_trace(path: Path) -> list[TraceLine]:
    """Read and check a whole trace; empty lines are skipped.

    Raises `TraceError` for a file that is not a trace, `OSError` for one that cannot be read.
    """
    decoder = msgspec.json.Decoder(TraceLine)
    trace: list[TraceLine] = []
    with path.open("rb") as lines:
        for number, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            try:
                line = decoder.decode(text)
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                raise TraceError(f"{path}, line {number}: {error}") from None
            if problem := _problem(line, trace[-1] if trace else None):
                raise TraceError(f"{path}, line {number}: {problem}")
            trace.append(line)
    if not trace:
        raise TraceError(f"{path} has no requests")
    return trace


def requests_of(trace: list[TraceLine], scale: Scale) -> list[Request]:
    """Return the requests for the engine. The first one arrives at once."""
    return [
        Request(
            prompt=_prompt(line, scale),
            new_tokens=scale.tokens_of(line.output_length),
            arrival=(line.timestamp - trace[0].timestamp) / 1e3 * scale.time,
            may_end_early=False,
        )
        for line in trace
    ]


def _problem(line: TraceLine, previous: TraceLine | None) -> str | None:
    if previous is not None and line.timestamp < previous.timestamp:
        return (
            f"the timestamp goes back to {line.timestamp:.0f} ms, "
            f"after {previous.timestamp:.0f} ms in the previous request"
        )
    blocks = -(-line.input_length // BLOCK_TOKENS)
    if len(line.hash_ids) != blocks:
        return (
            f"{len(line.hash_ids)} hash_ids for an input_length of {line.input_length} tokens, "
            f"which are {blocks} blocks of {BLOCK_TOKENS}"
        )
    return None


def _prompt(line: TraceLine, scale: Scale) -> bytes:
    blocks = b"".join(_block(name, BLOCK_TOKENS // scale.tokens) for name in line.hash_ids)
    return blocks[: scale.tokens_of(line.input_length)]


def _block(name: int, tokens: int) -> bytes:
    """Return that many tokens, which depend only on the id."""
    return hashlib.shake_128(str(name).encode()).digest(tokens)
