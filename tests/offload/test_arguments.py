"""Impossible sizes and names: a ValueError, and nothing is created."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memlane import Closed, InvalidArgument, SharedOffloadRegion
from tests.support.queues import refuses
from tests.support.regions import PAGE, new_id, path_of, region_of

pytestmark = pytest.mark.unit

GOOD: dict[str, Any] = {
    "total_size_bytes": 8 * PAGE,
    "num_blocks": 4,
    "rank": 0,
    "num_workers": 2,
    "cpu_page_size": PAGE,
}
SIZES = [
    {"rank": 2},
    {"rank": -1},
    {"num_blocks": 0},
    {"num_blocks": -4},
    {"num_blocks": 5},
    {"num_workers": 0},
    {"num_workers": -1},
    {"num_workers": 3},
    {"cpu_page_size": 0},
    {"cpu_page_size": PAGE + 1},
    {"total_size_bytes": 0},
    {"total_size_bytes": -8 * PAGE},
    {"total_size_bytes": 8 * PAGE - 1},
    {"total_size_bytes": 1 << 58},
    {"num_blocks": 1 << 40, "cpu_page_size": 1 << 40},
    {"participants": 0},
    {"participants": 2**64},
    {"threads": 0},
    {"threads": 257},
    {"pages": "2m"},
    {"timeout": float("nan")},
]


@pytest.fixture(autouse=True)
def _creates_nothing() -> Any:
    before = sorted(os.listdir("/dev/shm"))
    yield
    assert sorted(os.listdir("/dev/shm")) == before


@pytest.mark.parametrize("wrong", SIZES, ids=str)
def test_sizes_that_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    """R11: sizes that do not fit are refused."""
    with refuses(ValueError):
        SharedOffloadRegion(new_id(), **{**GOOD, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [{"rank": 0.0}, {"num_blocks": "4"}, {"num_workers": True}, {"progress": 3}, {"timeout": "1"}],
    ids=str,
)
def test_arguments_of_other_types_are_refused(wrong: dict[str, Any]) -> None:
    with refuses(TypeError):
        SharedOffloadRegion(new_id(), **{**GOOD, **wrong})


@pytest.mark.parametrize(
    "instance",
    ["a/b", "..", "../x", "a..b/", "/", "", "nul\0", "x" * 256, "\udcff\ud800"],
    ids=ascii,
)
def test_ids_that_cannot_be_in_a_file_name_are_refused(instance: str) -> None:
    """R13: ids that cannot be part of a file name are refused."""
    with refuses(ValueError):
        region_of(instance)


def test_an_id_is_as_long_as_a_file_name_can_be() -> None:
    """As long as a file's name can be."""
    instance = "x" * (255 - len("vllm_offload_.mmap"))
    region_of(instance).cleanup()
    with refuses(ValueError):
        region_of(instance + "x")


def test_an_id_of_another_type_is_refused() -> None:
    with refuses(TypeError):
        region_of(7)  # type: ignore[arg-type]


def test_a_relative_directory_is_found_again_by_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is removed even if the process has changed its directory."""
    monkeypatch.chdir("/dev")
    region = region_of(instance := new_id(), directory="shm", timeout=None)
    assert region.mmap_path == str(path_of(instance))
    monkeypatch.chdir("/")
    region.cleanup()
    with refuses(TypeError):
        region_of(new_id(), directory=3)


def test_directory_that_is_not_there() -> None:
    with refuses(OSError):
        region_of(new_id(), directory="/dev/shm/nowhere")


def test_a_directory_may_be_given_as_bytes(tmp_path: Path) -> None:
    """As os functions take it."""
    with SharedOffloadRegion("b", 4096, 1, 0, 1, 4096, directory=os.fsencode(tmp_path)) as region:
        assert Path(region.mmap_path).parent == tmp_path


@pytest.mark.parametrize("form", [os.fsencode, os.fsdecode, Path])
def test_a_directory_that_is_not_utf8(
    form: Callable[[Any], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It works in any form, for all who join; texts show it in a form that can be printed."""
    caplog.set_level(logging.DEBUG)
    directory = tmp_path / os.fsdecode(b"caf\xe9")
    directory.mkdir()
    arguments = ("b", 4096, 1, 0, 1, 4096)
    with SharedOffloadRegion(*arguments, directory=form(os.fspath(directory))) as region:
        assert Path(region.mmap_path).parent == directory
        assert os.path.exists(region.mmap_path)
        with SharedOffloadRegion(*arguments, directory=os.fsencode(directory)) as joined:
            assert joined.mmap_path == region.mmap_path
            assert not joined._creator
            assert "caf\\xe9" in repr(joined)
        with refuses(ValueError, match=r"caf\\xe9/.* is in use with"):
            SharedOffloadRegion("b", 8192, 1, 0, 1, 8192, directory=directory)
        os.chmod(region.mmap_path, 0o640)
        with refuses(PermissionError, match=r"caf\\xe9/.* does not have mode 0600"):
            SharedOffloadRegion(*arguments, directory=directory)
    with refuses(Closed, match=r"caf\\xe9"):
        region.create_kv_memoryview()
    for record in caplog.records:
        record.getMessage().encode()
    assert any("caf\\xe9" in record.getMessage() for record in caplog.records)
    directory.chmod(0)
    missing = directory / "nothing"
    with refuses(OSError, match=r"caf\\xe9"):
        SharedOffloadRegion(*arguments, directory=missing)


@pytest.mark.parametrize("directory", ["/dev/shm/a\0b", b"/dev/shm/a\0b", "/dev/shm/\ud800"])
def test_what_is_no_directory(directory: Any) -> None:
    """A name that no file can have is refused, and not cut off."""
    with refuses(InvalidArgument, match="directory cannot be the path"):
        SharedOffloadRegion("b", 4096, 1, 0, 1, 4096, directory=directory)


def test_a_directory_without_unnamed_files_is_named() -> None:
    """The error is about that file system, not about /dev/shm."""
    with refuses(OSError, match="cannot create a file in /proc") as caught:
        SharedOffloadRegion("b", 4096, 1, 0, 1, 4096, directory="/proc")
    assert "/dev/shm" not in str(caught.value)
