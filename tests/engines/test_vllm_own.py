"""vLLM's own tests pass on memlane's systems, except those listed in `left_out`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.engines import sources

ROOT = Path(__file__).parents[2]
FILES = (
    "distributed/test_shm_broadcast.py",
    "distributed/test_mq_connect_ip.py",
    "distributed/test_shm_storage.py",
    "distributed/test_shm_buffer.py",
    "v1/kv_offload/cpu/test_shared_offload_region.py",
    "v1/kv_offload/cpu/test_manager.py",
    "v1/kv_offload/tiering/test_factory.py",
    "v1/kv_offload/tiering/test_fs_tier.py",
    "v1/kv_offload/tiering/test_tiering_offloading.py",
)
AT_LEAST = 220


def test_vllms_own_tests(tmp_path: Path) -> None:
    """The tests of 0.33, from its source distribution, pass with the environment that switches
    memlane on."""
    for file in FILES:  # away from their package, which is called tests as well
        shutil.copy(sources.engine("0.33") / "tests" / file, tmp_path)
    own = ["--noconftest", "-c", os.devnull, "--rootdir", tmp_path, "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *own, "-p", "tests.engines.hosting", "-q", tmp_path],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "MEMLANE_VLLM": "all",
            "VLLM_HOST_IP": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0, run.stdout
    assert passed is not None
    assert int(passed[1]) >= AT_LEAST, run.stdout
