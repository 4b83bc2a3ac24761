"""Saves a tiny random vision model: `seer.py FOLDER`, run in vLLM's environment.

BLIP-2, because its image processor needs no torchvision. The weights are random and saved, because
vLLM's own dummy weights are so small that no token depends on an image.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Blip2Config, Blip2ForConditionalGeneration

WORDS = 512
PIXELS = 224  # an image in the cache takes 3 * 224 * 224 * 4 bytes
SEES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
SPEAKS = {
    "model_type": "opt",
    "hidden_size": 256,
    "ffn_dim": 512,
    "word_embed_proj_dim": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": WORDS,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "init_std": 0.3,
}


def save(folder: Path) -> None:
    torch.manual_seed(0)
    config = Blip2Config(
        text_config=SPEAKS,
        vision_config={**SEES, "image_size": PIXELS, "patch_size": 32},
        qformer_config={**SEES, "encoder_hidden_size": 64, "vocab_size": WORDS},
        num_query_tokens=8,
        image_token_index=WORDS - 1,
    )
    model = Blip2ForConditionalGeneration(config)
    with torch.no_grad():
        model.query_tokens.normal_()
    model.save_pretrained(folder)
    words = {**{f"w{i}": i for i in range(WORDS - 1)}, "<image>": WORDS - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"unk_token": "w3", "pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    processor = {"processor_class": "Blip2Processor"}
    size = {"height": PIXELS, "width": PIXELS}
    for name, content in (
        ("tokenizer_config", {"tokenizer_class": "PreTrainedTokenizerFast", **special}),
        (
            "preprocessor_config",
            {**processor, "image_processor_type": "BlipImageProcessor", "size": size},
        ),
        ("processor_config", {**processor, "num_query_tokens": 8}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))


if __name__ == "__main__":
    save(Path(sys.argv[1]))
