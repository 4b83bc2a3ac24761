"""Holders of a region, and its file: joining, leaving, generations."""

import copy
import gc
import itertools
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from memlane import Closed, LayoutMismatch
from tests.support.missing import package
from tests.support.queues import refuses
from tests.support.regions import PAGE, mapped, new_id, path_of, region_of

pytestmark = [pytest.mark.wheel, pytest.mark.unit]


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy])
def test_a_region_is_made_anew_elsewhere(send: Callable[[object], object]) -> None:
    with (
        region_of(new_id()) as region,
        refuses(TypeError, match="make one in each process, with the same instance_id"),
    ):
        send(region)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_last_holder_removes_the_name(order: tuple[int, ...]) -> None:
    """The last holder removes the name, whoever created it and whatever its rank."""
    instance = new_id()
    regions = [region_of(instance, rank) for rank in (0, 1, None)]
    for number in order:
        assert path_of(instance).exists()
        regions[number].cleanup()
        regions[number].cleanup()
    assert not path_of(instance).exists()


def test_calls_after_cleanup_raise() -> None:
    """Attributes are None or False; calls raise."""
    region = region_of(new_id())
    memory = region.mmap_obj
    region.create_next_array(1)
    region.cleanup()
    assert (region.fd, region.mmap_obj, region._base) == (None, None, None)
    assert (region.is_pinned, region._creator, region._views) == (False, False, [])
    assert memory is not None
    assert memory.closed
    for call in (region.create_kv_memoryview, region.pin, region.unpin, region.__enter__):
        with refuses(Closed):
            call()
    with refuses(Closed):
        region.create_next_array(1)
    file = region._file  # for who has asked before, and goes on in another thread
    for call in (file.rows, file.memory, file.region_map, lambda: file.address):
        with refuses(Closed):
            call()
    assert "cleaned up" in repr(region)


def test_views_outlive_cleanup() -> None:
    """R6: the memory stays mapped until they are dropped; descriptor and name go at once."""
    instance = new_id()
    region = region_of(instance)
    fd = region.fd
    assert fd is not None
    held = [
        region.create_next_array(8),
        region.create_kv_memoryview(),
        memoryview(region.mmap_obj),  # type: ignore[arg-type]
        region.create_kv_memoryview()[1],
        region.create_next_array(8).__dlpack__(),
    ]
    held[0][:] = 3
    region.cleanup()
    assert not path_of(instance).exists()
    assert not os.path.exists(f"/proc/self/fd/{fd}")
    assert held[1][1][0] == held[2][2 * PAGE] == held[3][0] == 3
    while held:
        assert instance in Path("/proc/self/maps").read_text()
        held.pop()
        gc.collect()
    assert instance not in Path("/proc/self/maps").read_text()


def test_torch_views_outlive_cleanup() -> None:
    package("torch")
    region = region_of(new_id())
    view = region.create_next_view(8)
    region.cleanup()
    view[:] = 4
    assert int(view.sum()) == 4 * 8 * 4


def test_dropping_the_last_reference_removes_the_name() -> None:
    """Many callers only do that."""
    instance = new_id()
    region = region_of(instance)
    other = region_of(instance, 1)
    del region
    gc.collect()
    assert path_of(instance).exists()
    del other
    gc.collect()
    assert not path_of(instance).exists()


def test_another_geometry_is_left_alone() -> None:
    """Refused at once, with both geometries; the live region does not notice."""
    instance = new_id()
    with region_of(instance) as region:
        region.create_next_array(1)[:] = 7
        for other in (
            {"blocks": 5},
            {"workers": 1},
            {"cell": PAGE // 2},
            {"extra": 1},
            {"blocks": 8, "workers": 1},
            {"blocks": 2, "workers": 4},
        ):
            with refuses(ValueError) as caught:
                region_of(instance, **other)  # type: ignore[arg-type]
            assert isinstance(caught.value, LayoutMismatch)
            text = str(caught.value)
            assert "4 blocks of 2 workers" in text
            assert str(os.getpid()) in text
        assert path_of(instance).exists()
        assert region.mmap_obj[0] == 7
        region_of(instance, 1).cleanup()


def test_a_later_start_is_another_generation() -> None:
    """R12: the bytes are new, and a late cleanup of the old one does not touch the new name."""
    instance = new_id()
    old = region_of(instance)
    old.create_next_array(1)[:] = 7
    path_of(instance).unlink()  # as whoever thinks that it is left over
    with region_of(instance) as new:
        assert new._creator
        assert bytes(new.mmap_obj[:]) == bytes(new.total_size_bytes)
        old.cleanup()
        assert path_of(instance).exists()
        region_of(instance, 1).cleanup()
    assert not path_of(instance).exists()


def test_the_old_file_was_moved_away() -> None:
    """R12: its inode still has a name, but another one."""
    instance, other = new_id(), new_id()
    old = region_of(instance)
    path_of(instance).rename(path_of(other))
    with region_of(instance) as new:
        assert new._creator
        old.cleanup()
        assert path_of(instance).exists()
    path_of(other).unlink()


@pytest.mark.parametrize("participants", [1, 2, 3])
def test_the_name_is_removed_once_all_have_mapped_it(participants: int) -> None:
    """The name goes as soon as that many have mapped it; a later start begins anew."""
    instance = new_id()
    regions = []
    for rank in range(participants):
        assert rank == 0 or path_of(instance).exists()
        regions.append(region_of(instance, rank, workers=3, participants=participants))
    assert not path_of(instance).exists()
    regions[0].create_next_array(1)[:] = 5
    with region_of(instance, workers=3, participants=participants) as later:
        assert later._creator
        assert later.mmap_obj[0] == 0
    for region in regions:
        assert region.mmap_obj[0] == 5
        region.cleanup()


def test_removal_by_the_last_participant_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memlane"):
        region_of(new_id(), participants=1).cleanup()
    assert [text.split()[0] for text in caplog.messages] == ["removed", "created"]


def test_one_of_the_participants_leaves_before_all_are_there() -> None:
    """Only current holders count: another can take the place of one that left."""
    instance = new_id()
    first = region_of(instance, 0, participants=3)
    region_of(instance, 1, participants=3).cleanup()
    second = region_of(instance, 1, participants=3)
    assert path_of(instance).exists()
    third = region_of(instance, None, participants=3)
    assert not path_of(instance).exists()
    for region in (first, second, third):
        region.cleanup()


@pytest.mark.parametrize("size", [0, 1, 8 * PAGE - 1, 8 * PAGE, 8 * PAGE + 1, 100 * PAGE])
def test_a_leftover_is_replaced(size: int) -> None:
    """R1: a file that no process holds is replaced, whatever its size; its bytes are not used."""
    instance = new_id()
    path_of(instance).write_bytes(b"\xee" * size)
    path_of(instance).chmod(0o600)
    with region_of(instance) as region:
        assert region._creator
        assert bytes(region.mmap_obj[:]) == bytes(8 * PAGE)
        with mapped(region.mmap_path) as memory:
            assert bytes(memory) == bytes(8 * PAGE)


def test_a_leftover_of_another_mode_is_replaced() -> None:
    """It is replaced too: it is this user's, and no process holds it."""
    instance = new_id()
    path_of(instance).write_bytes(b"x")
    path_of(instance).chmod(0o644)
    region_of(instance).cleanup()


def test_the_log_says_what_is_created_joined_and_removed(caplog: pytest.LogCaptureFixture) -> None:
    """Creating, joining and removing at INFO with path and size, populating at DEBUG."""
    instance = new_id()
    with caplog.at_level(logging.DEBUG, "memlane"):
        first = region_of(instance)
        region_of(instance, 1).cleanup()
        first.cleanup()
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    infos = [text for level, text in lines if level == "INFO"]
    assert [text.split()[0] for text in infos] == ["created", "joined", "removed"]
    assert all(str(path_of(instance)) in text for text in infos)
    assert all(f"({8 * PAGE} bytes" in text for text in infos)
    assert sum("populated" in text for level, text in lines if level == "DEBUG") == 2
