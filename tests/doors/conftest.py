"""A folder of names for each test, which must be empty after it."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "run"
    monkeypatch.setenv("MEMLANE_RUN", str(folder))
    yield folder
    left = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    assert not left, f"in the folder of names: {left}"
