"""Copies to and from a GPU, against a stand-in for CUDA's runtime that enforces its rules.

numpy arrays stand for the GPU's memory, and `Stream` and `Event` for torch's. Copies of page-locked
memory are performed when an event is waited for.
"""

import ctypes
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import CopyFailed, InvalidArgument, PairRefused, Unsupported
from memlane.offload import _runtime, cuda
from memlane.offload._arrays import Side
from tests.support.cuda import STREAM, stand_in, with_runtime
from tests.support.gpus import GPU, Current, Event, Stream, play
from tests.support.missing import package
from tests.support.queues import refuses
from tests.support.regions import PAGE, new_id, region_of

torch = package("torch")


@pytest.fixture(scope="module", params=[(13000, 13000), (12080, 12090), (12080, 12060)], ids=str)
def library(request: pytest.FixtureRequest) -> Path:
    """With each signature of batches, and with a driver that has none."""
    return stand_in(*request.param)


@pytest.fixture(scope="module")
def newest() -> Path:
    return stand_in()


def on_gpu(fake: Any, name: str, array: Any) -> Side:
    side = Side(name, array)
    memory = array
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    fake.be_gpu(memory.ctypes.data, memory.nbytes)
    side.device = GPU
    return side


def runtime_of(fake: Any) -> _runtime.Runtime:
    return _runtime.Runtime(fake._name)


PAIRS = np.array([(i, 60 + i) for i in range(20)] + [(30, 1), (40, 3), (35, 7)])


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("to_gpu", [True, False])
def test_moves_of_all_kinds_arrive_and_are_counted(library: Path, step: int, to_gpu: bool) -> None:
    """Runs, regular steps and single blocks arrive, and are counted."""

    def scene(fake: Any) -> None:
        src = np.arange(100 * 16, dtype=np.int32).reshape(100, 16)[::step]
        dst = np.zeros((100, 16), np.int32)
        source = Side("src", src) if to_gpu else on_gpu(fake, "src", src)
        target = on_gpu(fake, "dst", dst) if to_gpu else Side("dst", dst)
        runtime = runtime_of(fake)
        for stream in (0, 1, STREAM):
            dst[:] = 0
            last = "batch" if stream > 1 and has_batches(fake) else "loop"
            ways = f"2d+{last}" if step == 2 else last
            assert runtime.queue(source, target, PAIRS, stream) == (23 * 64, 4, ways)
            assert (dst[PAIRS[:, 1]] == src[PAIRS[:, 0]]).all()
        assert fake.batches_queued() == has_batches(fake)
        for pairs in (PAIRS[[0, 0]], PAIRS + 1000):
            with pytest.raises(PairRefused):
                runtime.queue(source, target, pairs, STREAM)
        assert runtime.queue(source, target, PAIRS[:0], STREAM) == (0, 0, "none")

    with_runtime(library, scene)


def has_batches(fake: Any) -> bool:
    """Returns whether both runtime and driver are of version 12.8 or later, and so have batches."""
    versions = []
    for ask in (fake.cudaRuntimeGetVersion, fake.cudaDriverGetVersion):
        version = ctypes.c_int()
        ask(ctypes.byref(version))
        versions.append(version.value)
    return min(versions) >= 12080


@pytest.mark.parametrize("call", [1, 2])
def test_a_copy_that_is_refused(library: Path, call: int) -> None:
    """CUDA's error is raised with the number of copies before it, and is cleared."""

    def scene(fake: Any) -> None:
        source = Side("src", np.ones((100, 32), np.int32)[:, :16])
        target = on_gpu(fake, "dst", np.zeros((100, 16), np.int32))
        fake.fail_at_call(call, 700)
        with pytest.raises(CopyFailed, match="it failed, error 700") as caught:
            runtime_of(fake).queue(source, target, PAIRS, STREAM)
        assert (caught.value.code, caught.value.queued) == (700, call - 1)

    with_runtime(library, scene)


def test_rows_too_far_apart_are_copied_one_by_one(newest: Path) -> None:
    """CUDA's pitches end at 2 GiB; beyond, each block is one copy."""

    def scene(fake: Any) -> None:
        memory = np.zeros((3, 1 << 31), np.int8)  # never touched as a whole
        source = Side("src", memory[:, :8])
        target = on_gpu(fake, "dst", np.ones((3, 8), np.int8))
        moved = runtime_of(fake).queue(source, target, np.array([(0, 0), (1, 1), (2, 2)]), STREAM)
        assert moved == (24, 3, "batch")
        assert not target.keeper.any()

    with_runtime(newest, scene)


def test_no_runtime_is_loaded_for_a_copy(newest: Path) -> None:
    """No runtime is loaded here, and none gets loaded."""
    if "/libcudart" in Path("/proc/self/maps").read_text():
        pytest.skip("torch has loaded CUDA's runtime")
    assert _runtime.loaded_runtime() is None
    with pytest.raises(OSError, match="dlopen"):
        _runtime.Runtime(str(newest))
    with refuses(Unsupported, match="CUDA's runtime"):
        cuda._runtime()


def test_a_runtime_that_was_removed(newest: Path, tmp_path: Path) -> None:
    """Its file is gone, though still mapped, as after an upgrade: as if there was none."""
    library = Path(shutil.copy(newest, tmp_path))

    def scene(_fake: Any) -> None:
        library.unlink()
        with region_of(new_id()) as region:
            assert region.pin() is False

    with_runtime(library, scene)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """torch's side of CUDA; the legacy default stream."""
    monkeypatch.setattr(Event, "fails", False)
    return play(monkeypatch.setattr)


def transfers(library: Path, scene: Any) -> None:
    """A scene with a page-locked region, and a cache that stands for the GPU's."""

    def whole(fake: Any) -> None:
        Event.fake = fake
        with region_of(new_id(), blocks=8) as region:
            assert region.pin()
            host = region.create_next_array(PAGE)
            cache = np.zeros((8, PAGE), np.int8)
            scene(fake, region, host, on_gpu(fake, "dst", cache))
            del host
        assert not cuda._under_way

    with_runtime(library, whole)


MIRRORED = np.array([(i, 7 - i) for i in range(8)])


def test_a_transfer_keeps_its_arrays(newest: Path, played: Stream) -> None:
    """While queued, its arrays stay alive; the current device is restored."""

    def scene(fake: Any, _region: Any, host: Any, cache: Side) -> None:
        host[:] = np.arange(8)[:, None]
        view = host[:]
        kept = weakref.ref(view)
        moved = cuda.transfer(Side("src", view), cache, MIRRORED, Stream())  # type: ignore[arg-type]
        assert Current.device == torch.device("cuda:0")
        del view
        assert (moved.done, fake.copies_waiting(), kept() is not None) == (False, 8, True)
        assert not cache.keeper.any()
        assert moved.wait() == moved.nbytes == 8 * PAGE
        assert kept() is None
        assert (cache.keeper == np.arange(8)[::-1, None]).all()

    transfers(newest, scene)


def test_who_is_told_that_it_is_done_keeps_nothing(newest: Path, played: Stream) -> None:
    """A caller that polls and never waits does not keep the arrays for ever."""

    def scene(_fake: Any, _region: Any, host: Any, cache: Side) -> None:
        view = host[:]
        kept = weakref.ref(view)
        moved = cuda.transfer(Side("src", view), cache, MIRRORED, Stream())  # type: ignore[arg-type]
        del view
        moved.event.synchronize()
        assert moved.done
        assert kept() is None
        assert not cuda._under_way

    transfers(newest, scene)


def test_what_is_done_goes_with_the_next_transfer(newest: Path, played: Stream) -> None:
    """Even if never waited for; without stream=, on the current stream of the tensor's device."""

    def scene(_fake: Any, _region: Any, host: Any, cache: Side) -> None:
        first = cuda.transfer(Side("src", host), cache, MIRRORED, None)
        first.event.synchronize()
        second = cuda.transfer(Side("src", host), cache, MIRRORED, None)
        assert cuda._under_way == {second}
        second.wait()

    transfers(newest, scene)


def test_a_transfer_on_the_legacy_stream_keeps_its_order(newest: Path, played: Stream) -> None:
    """CUDA refuses batches there: they run on another stream, in the same order."""

    def scene(fake: Any, _region: Any, host: Any, cache: Side) -> None:
        for number, stream in enumerate((None, played, Stream(handle=1)), 1):
            Stream.order.clear()
            moved = cuda.transfer(Side("src", host), cache, MIRRORED, stream)  # type: ignore[arg-type]
            assert fake.batches_queued() == number
            legacy = stream.cuda_stream if stream else 0
            assert Stream.order == [(STREAM, legacy), (legacy, moved.event)]
            moved.wait()
        Stream.order.clear()
        cuda.transfer(Side("src", host), cache, MIRRORED, Stream()).wait()  # type: ignore[arg-type]
        assert not Stream.order

    transfers(newest, scene)


def test_what_is_done_goes_with_any_region(newest: Path, played: Stream) -> None:
    """Even if never waited for, and without another transfer."""

    def scene(_fake: Any, _region: Any, host: Any, cache: Side) -> None:
        cuda.transfer(Side("src", host), cache, MIRRORED, None).event.synchronize()
        with region_of(new_id()):
            pass
        assert not cuda._under_way

    transfers(newest, scene)


def test_transfers_are_queued_and_checked_in_threads(
    newest: Path, played: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread queues a transfer while another checks which are done."""

    def scene(_fake: Any, _region: Any, host: Any, cache: Side) -> None:
        first = cuda.transfer(Side("src", host), cache, MIRRORED, None)
        others: list[Any] = []

        def query(self: Event) -> bool:
            monkeypatch.setattr(Event, "query", lambda self: False)
            others.append(cuda.transfer(Side("src", host), cache, MIRRORED, None))
            return False

        monkeypatch.setattr(Event, "query", query)
        last = cuda.transfer(Side("src", host), cache, MIRRORED, None)
        for one in (first, *others, last):
            one.wait()

    transfers(newest, scene)


def test_unpinning_waits_for_transfers(newest: Path, played: Stream) -> None:
    """The GPU uses that memory; the stand-in detects an unregistration that is too early."""

    def scene(fake: Any, region: Any, host: Any, cache: Side) -> None:
        host[:] = 5
        cuda.transfer(Side("src", host), cache, MIRRORED, None)
        assert fake.copies_waiting() == 8
        region.cleanup()
        assert (cache.keeper == 5).all()

    transfers(newest, scene)


def test_a_transfer_that_fails(newest: Path, played: Stream) -> None:
    """The copies queued before are waited for, and nothing is kept."""

    def scene(fake: Any, _region: Any, host: Any, cache: Side) -> None:
        source = Side("src", host)
        stream: Any = Stream()
        with pytest.raises(PairRefused):
            cuda.transfer(source, cache, MIRRORED[[0, 0]], stream)
        assert stream.waits == 0
        fake.fail_at_call(1, 700)
        with pytest.raises(CopyFailed):
            cuda.transfer(source, cache, MIRRORED, stream)
        assert stream.waits == 1
        Event.fails = True
        with pytest.raises(RuntimeError, match="gone"):
            cuda.transfer(source, cache, MIRRORED, stream)
        assert (stream.waits, fake.copies_waiting()) == (2, 0)

    transfers(newest, scene)


def test_streams_and_devices_that_do_not_fit(newest: Path, played: Stream) -> None:
    """Refused before anything is queued."""

    def scene(_fake: Any, _region: Any, host: Any, cache: Side) -> None:
        source = Side("src", host)
        with refuses(TypeError, match="not int"):
            cuda.transfer(source, cache, MIRRORED, 5)  # type: ignore[arg-type]
        with refuses(InvalidArgument, match="cuda:0"):
            cuda.transfer(source, cache, MIRRORED, Stream(torch.device("cuda:0")))  # type: ignore[arg-type]
        with refuses(Unsupported, match="index_copy_"):
            cuda.transfer(cache, cache, MIRRORED, None)

    transfers(newest, scene)
