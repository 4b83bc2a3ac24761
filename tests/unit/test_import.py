"""What importing memlane gives, and where it refuses."""

import subprocess
import sys

import pytest

import memlane

PUBLIC = ["Handle", "MessageQueue", "ShmRingBuffer", "MemlaneError"]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name: str) -> None:
    """The documented names come from the package itself, and are announced."""
    assert hasattr(memlane, name)
    assert name in memlane.__all__
    assert name in dir(memlane)


def test_all_that_is_announced_exists() -> None:
    """Every name of __all__ can be had."""
    assert all(hasattr(memlane, name) for name in memlane.__all__)
    assert len(set(memlane.__all__)) == len(memlane.__all__)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems(platform: str) -> None:
    """Elsewhere than on Linux the import fails with one sentence that says so."""
    code = f"import sys; sys.platform = {platform!r}\ntry:\n import memlane\n"
    code += "except ImportError as error:\n print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Linux" in done.stdout
    assert len(done.stdout.splitlines()) == 1
