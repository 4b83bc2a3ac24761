"""Trains the demo's model on memlane's manual and writes `weights.npz`: `python -m engine.train`.

Needs torch, and takes minutes of one core. The seed is fixed, so the same manual, torch and kind of
processor give the same file. The forward pass is that of `model.py`, here for whole sequences.
"""

import argparse
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention

from .model import EPSILON, WEIGHTS, ModelConfig
from .workload import SYSTEM

LENGTH, BATCH, RATE = 192, 8, 4e-3
ROOT = Path(__file__).parents[2]


def manual() -> bytes:
    """Return the prose of all Markdown files: a paragraph a line, without tables and programs."""
    paragraphs: list[str] = []
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        text = re.sub(r"^( *)```.*?^\1```", "", path.read_text(), flags=re.M | re.S)
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"<!--.*?-->", "", text))
        for block in re.split(r"\n\s*\n|\n(?=\* |\d+\. )", text.replace("**", "")):
            line = " ".join(block.split()).lstrip("*#> ")
            if len(line) > 40 and not line.startswith(("|", "(")):
                paragraphs.append(line)
    # The demo's requests begin with a sentence: some paragraphs do, too.
    paragraphs[::6] = [SYSTEM + paragraph for paragraph in paragraphs[::6]]
    return "\n".join(paragraphs).encode()


class Model:
    """The weights, and the loss of predicting each byte of a text from those before it."""

    def __init__(self, config: ModelConfig) -> None:
        """Draw the weights."""
        self.config = config
        draw = torch.Generator().manual_seed(config.seed)
        self.weights: dict[str, Tensor] = {}
        for name, (inputs, outputs) in config.shapes().items():
            scale = 1.0 if name == "embedding" else inputs**-0.5
            matrix = torch.randn(inputs, outputs, generator=draw) * scale
            self.weights[name] = matrix.requires_grad_()
        half = config.head_dim // 2
        angles = torch.arange(LENGTH)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self._cos, self._sin = angles.cos(), angles.sin()

    def loss(self, text: Tensor) -> Tensor:
        """Return the mean loss in nats over (batch, LENGTH + 1) bytes."""
        config, weights = self.config, self.weights
        rows, width = len(text), config.hidden
        hidden = weights["embedding"][text[:, :-1]]
        for layer in range(config.layers):
            normed = rms_norm(hidden, (width,), eps=EPSILON)
            qkv = (normed @ weights[f"qkv{layer}"]).view(rows, LENGTH, 3, config.heads, -1)
            queries, keys, values = qkv.permute(2, 0, 3, 1, 4)
            attended = scaled_dot_product_attention(
                self._rotate(queries), self._rotate(keys), values, is_causal=True
            )
            attended = attended.transpose(1, 2).reshape(rows, LENGTH, width)
            activated = (normed @ weights[f"up{layer}"]).relu()
            hidden = (
                hidden
                + attended @ weights[f"attention_out{layer}"]
                + activated @ weights[f"down{layer}"]
            )
        logits = rms_norm(hidden, (width,), eps=EPSILON) @ weights["embedding"].T * width**-0.5
        return cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def _rotate(self, heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, -1)
        cos, sin = self._cos, self._sin
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

    def save(self, path: Path) -> None:
        """Write each matrix as bytes, with a scale for each of its columns."""
        arrays: dict[str, Any] = {}
        for name, matrix in self.weights.items():
            values = matrix.detach().numpy()
            scales = np.abs(values).max(axis=0) / 127
            arrays[name] = np.rint(values / scales).astype(np.int8)
            arrays[f"{name}.scales"] = scales
        np.savez_compressed(path, **arrays)


def train(steps: int, path: Path) -> None:
    """Train for that many steps, and write the weights."""
    draw = torch.Generator().manual_seed(0)
    text = torch.frombuffer(bytearray(manual()), dtype=torch.uint8).long()
    model = Model(ModelConfig())
    optimizer = torch.optim.AdamW(model.weights.values(), RATE, (0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, 0.05)
    began = time.monotonic()
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=draw)
        loss = model.loss(text[starts + torch.arange(LENGTH + 1)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(model.weights.values()), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            seconds = time.monotonic() - began
            print(
                f"step {step + 1} of {steps}: {loss:.3f} nats a byte, {seconds:.0f} s", flush=True
            )
    model.save(path)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="engine.train", description=__doc__)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    train(options.steps, options.output)
