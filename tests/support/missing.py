"""Programs that tests need and a machine may lack, and the command that brings it.

The reason of every such skip is `needs(PART)`, so that `tests.run` can count what a part costs.
"""

from typing import Any

import pytest

BRINGS = {
    "root": "sudo make root-test",
    "hosts and cables": "apt-get install iproute2, and sudo make root-test",
    "namespaces": "sudo make runner",
    "time": "make soak",
    "redis-server": "apt-get install redis-server",
    "libibverbs1": "apt-get install libibverbs1",
    "mooncake": "pip install 'memlane[mooncake]', for CPython 3.10 to 3.13 on x86-64",
    "Prometheus": "apt-get install prometheus",
    "Chromium": "apt-get install chromium chromium-driver",
    "spin": "apt-get install spin gcc",
    "nvcc": "apt-get install nvidia-cuda-toolkit",
    "a GPU": "make gpu",
    "torch": "make test TORCH=torch",
    "ray": "pip install ray",
    "a real vLLM": "make engines",
    "other releases of vLLM": "make engines",
    "engines' sources": "make engines-sources, with a network",
    "published traces": "set MEMLANE_TRACES to a folder with those of kvcache-ai/Mooncake",
    "CPython 3.11": "make test PYTHON=python3.11",
    "ptrace": "sysctl -w kernel.yama.ptrace_scope=1",
    "io_uring": "sysctl -w kernel.io_uring_disabled=0",
    "IPv6": "sysctl -w net.ipv6.conf.lo.disable_ipv6=0",
    "locked memory": "ulimit -l unlimited",
    "4 GiB of /dev/shm": "mount -o remount,size=8G /dev/shm",
    "a kernel that seals memory": "Linux 5.1 or later",
    **dict.fromkeys(
        [
            *("fastapi", "flask", "gevent", "httpx", "moto", "obstore"),
            *("prometheus_client", "redis", "trio", "uvloop"),
        ],
        "pip install 'memlane[test]'",
    ),
}


def needs(part: str, why: str = "") -> str:
    """The reason for a skip; `why` is what the machine says about it."""
    return f"needs {part}{f' ({why})' if why else ''}: {BRINGS[part]}"


def needed(part: str, is_there: bool) -> pytest.MarkDecorator:
    """Skips a test where the part is not there."""
    return pytest.mark.skipif(not is_there, reason=needs(part))


def package(name: str) -> Any:
    """Imports an optional package, or skips."""
    return pytest.importorskip(name, reason=needs(name.partition(".")[0]))
