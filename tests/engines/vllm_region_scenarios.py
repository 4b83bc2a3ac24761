"""vLLM's processes with the offload region; `running.run` runs each function."""

from __future__ import annotations

import gc
import importlib
import inspect
import itertools
import mmap
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memlane import testing
from memlane.engines.vllm import register
from tests.engines.scenario import fresh_processes
from tests.support import PATIENCE
from tests.support.regions import populated_pages

fresh = fresh_processes(__name__)  # they find the engine's modules, too
PAGE = mmap.PAGESIZE
OWN = "vllm.v1.kv_offload.cpu.shared_offload_region"
IMPORTERS = (  # cpu.spec is one from 0.29 on, hisparse.runtime from 0.30 on
    "hisparse.runtime",
    "kv_offload.cpu.gpu_worker",
    "kv_offload.cpu.spec",
    "kv_offload.tiering.manager",
    "kv_offload.tiering.spec",
)
# Two ranks whose cells are no whole pages, in rows with bytes that are nobody's.
CELL = PAGE + PAGE // 2
ROWS = {"num_chunks": 5, "kv_bytes_per_chunk": 4 * PAGE, "cpu_page_size": CELL}


def region_class() -> Any:
    """The class that vLLM's callers get in this process."""
    register()
    return importlib.import_module(OWN).SharedOffloadRegion


def path_of(engine: str) -> Path:
    return Path(f"/dev/shm/vllm_offload_{engine}.mmap")


@contextmanager
def engine_id() -> Iterator[str]:
    """Returns the id of an engine that leaves nothing behind."""
    engine = str(uuid.uuid4())
    yield engine
    gc.collect()
    assert list(Path("/dev/shm").glob(f"*{engine}*")) == []


class Rank:
    """A process with a region, that does what it is asked to do."""

    def __init__(self, engine: str, rank: int | None, switched: str = "region", **options: Any):
        self.pipe, there = fresh.Pipe()
        arguments = (there, switched, {**ROWS, "engine_id": engine, "rank": rank, **options})
        self.process = fresh.Process(target=_serve, args=arguments)
        self.process.start()
        there.close()

    def answer(self) -> Any:
        assert self.pipe.poll(60)
        return self.pipe.recv()

    def ask(self, what: Callable[..., Any], *arguments: Any) -> Any:
        self.pipe.send((what, arguments))
        return self.answer()

    def end(self) -> None:
        with suppress(OSError):
            self.pipe.send(None)
        self.process.join(PATIENCE)
        assert self.process.exitcode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(pipe: Any, switched: str, options: dict[str, Any]) -> None:
    os.environ["MEMLANE_VLLM"] = switched
    calls = 0
    barrier = options.pop("barrier", None)

    def wait() -> None:
        nonlocal calls
        calls += 1
        barrier.wait(PATIENCE)

    try:
        Region = region_class()
        region = Region(**options, barrier=None if barrier is None else wait)
    except Exception as error:
        pipe.send((f"{type(error).__name__}: {error}", calls))
        return
    pipe.send(("started", calls))
    while (asked := pipe.recv()) is not None:
        what, arguments = asked
        pipe.send(what(region, *arguments))
    region.cleanup()
    assert (region.fd, region.mmap_obj, region._base) == (None, None, None)


def _write(region: Any, mark: int) -> None:
    """Two tensors, that fill the rank's cell."""
    for size in (1000, CELL - 1000):
        view = region.create_next_worker_view(size)
        assert (view.shape, view.stride(), view.dtype) == (
            (region.num_chunks, size),
            (4 * PAGE, 1),
            torch.int8,
        )
        for chunk in range(region.num_chunks):
            view[chunk] = mark + chunk
        mark += 50
    with pytest.raises(AssertionError, match="exceeds worker area end"):
        region.create_next_worker_view(1)


def _expected() -> np.ndarray[Any, Any]:
    rows = np.zeros((5, 4 * PAGE), np.uint8)
    for rank in range(2):
        for chunk in range(5):
            cell = rows[chunk, rank * CELL : (rank + 1) * CELL]
            cell[:1000], cell[1000:] = 10 * rank + chunk, 10 * rank + chunk + 50
    return rows


def _through_views(region: Any) -> tuple[bool, Any]:
    """Returns the region as a tier sees it, as a whole."""
    view = region.create_kv_memoryview()
    assert isinstance(view, memoryview)
    assert (view.shape, view.strides, view.nbytes) == ((5, 4 * PAGE), (4 * PAGE, 1), 20 * PAGE)
    seen = bytes(view.cast("B"))
    row = view.cast("B")[8 * PAGE : 12 * PAGE]
    assert bytes(row) == region.base_tensor[8 * PAGE : 12 * PAGE].numpy().tobytes()
    row.release()
    view.release()
    with pytest.raises(ValueError, match="released"):
        view.tobytes()
    return seen == _expected().tobytes(), bytes(region.mmap_obj[:]) == seen


def _facts(region: Any) -> tuple[bool, int, bool]:
    return region._creator, os.fstat(region.fd).st_ino, os.path.exists(region.mmap_path)


def through_plugins() -> None:
    """Modules that copied the name are rebound."""
    import vllm.plugins

    original = importlib.import_module(OWN).SharedOffloadRegion
    place = Path(importlib.import_module(OWN).__file__ or "").parents[2]
    modules = [
        importlib.import_module(f"vllm.v1.{name}")
        for name in IMPORTERS
        if (place / name.replace(".", "/")).with_suffix(".py").exists()
    ]
    importers = [module for module in modules if hasattr(module, "SharedOffloadRegion")]
    assert {module.SharedOffloadRegion for module in importers} == {original}
    vllm.plugins.load_general_plugins()
    Region = region_class()
    assert {module.SharedOffloadRegion for module in importers} == {Region} != {original}
    assert Region.BLOCK_SIZE_ALIGNMENT == original.BLOCK_SIZE_ALIGNMENT == PAGE


def as_the_release_calls_it() -> None:
    """A worker and the scheduler, which pass all but `rank` by name."""
    original = importlib.import_module(OWN).SharedOffloadRegion
    engine_name, rows, _, row_bytes, *_ = inspect.signature(original).parameters
    view = "create_next_worker_view"
    view = view if hasattr(original, view) else "create_next_view"  # until 0.27
    Region = region_class()
    with engine_id() as engine:
        given = {engine_name: engine, rows: 3, row_bytes: 2 * PAGE, "cpu_page_size": PAGE}
        worker, scheduler = Region(rank=1, **given), Region(rank=None, **given)
        getattr(worker, view)(10).fill_(7)
        assert (worker.num_blocks, worker.num_chunks, worker._base.nbytes) == (3, 3, 6 * PAGE)
        seen = np.asarray(scheduler.create_kv_memoryview())
        assert seen[:, PAGE : PAGE + 11].tolist() == [[7] * 10 + [0]] * 3
        del seen
        for one in (worker, scheduler):
            one.cleanup()


def workers_and_scheduler() -> None:
    """Without a barrier: the name stays until the last has left, whoever came first."""
    with engine_id() as engine:
        ranks = [Rank(engine, rank) for rank in (0, None, 1)]
        assert [rank.answer() for rank in ranks] == [("started", 0)] * 3
        facts = [rank.ask(_facts) for rank in ranks]
        assert sorted(fact[0] for fact in facts) == [False, False, True]
        assert len({fact[1:] for fact in facts}) == 1
        assert facts[0][2]
        ranks[0].ask(_write, 0)
        ranks[2].ask(_write, 10)
        assert ranks[1].ask(_through_views) == (True, True)
        for rank in ranks:
            assert path_of(engine).exists()
            rank.end()


def barriers() -> None:
    """A process that is killed behind the barrier leaves nothing, and the others' memory stays."""
    with engine_id() as engine:
        barrier = fresh.Barrier(2)
        ranks = [Rank(engine, rank, barrier=barrier) for rank in range(2)]
        assert [rank.answer() for rank in ranks] == [("started", 1)] * 2
        (c0, first, is_there), (c1, second, _) = (rank.ask(_facts) for rank in ranks)
        assert (first, is_there, c0, c1) == (second, False, False, False)
        assert not path_of(engine).exists()
        ranks[0].ask(_write, 0)
        ranks[0].kill()
        ranks[1].ask(_write, 10)
        assert ranks[1].ask(_through_views) == (True, True)
        ranks[1].kill()


def _refuse(_total: int) -> None:
    raise OSError("not enough memory")


def failing_ranks() -> None:
    """A rank that fails comes to the barrier all the same, and has left nothing by then."""
    extra = _shards()
    for options, says in (
        ({"creator_memory_check": _refuse}, "not enough memory"),
        ({"cpu_page_size": 5 * PAGE}, "beyond"),
        ({"kv_bytes_per_chunk": PAGE + 1}, "page size"),
        ({"num_chunks": 0}, "num_chunks must be at least 1"),
    ):
        with engine_id() as engine:
            count = 2 if extra else 1
            barrier = fresh.Barrier(2)
            rank = Rank(engine, 0, barrier=barrier, **{**extra, **options})
            for number in range(count):
                barrier.wait(PATIENCE)
                assert not path_of(engine).exists(), number
            text, calls = rank.answer()
            assert calls == count
            with pytest.raises(AssertionError, match=says):
                raise AssertionError(text)
            rank.end()
    with engine_id() as engine:  # nobody comes
        barrier = fresh.Barrier(2)
        rank = Rank(engine, 0, barrier=barrier)
        while not path_of(engine).exists():
            time.sleep(0.01)
        barrier.abort()
        assert rank.answer() == ("BrokenBarrierError: ", 1)
        rank.end()


def parts() -> None:
    """Each process populates its own pages."""
    Region = region_class()
    rows = {"num_chunks": 3, "kv_bytes_per_chunk": 2 * PAGE, "cpu_page_size": PAGE}

    def pages(region: Any) -> list[int]:
        found = populated_pages(region.mmap_path)
        return [number for number, is_populated in enumerate(found) if is_populated]

    with engine_id() as engine:
        own = Region(engine, rank=1, **rows)
        (segment,) = [one for one in testing.segments() if engine in one.name]
        assert segment.name == f"{path_of(engine).name}/memlane"
        assert (segment.is_named, segment.pids) == (True, (os.getpid(),))
        assert pages(own) == [1, 3, 5]
        assert list(own.iter_worker_slot_ranges()) == [(n * PAGE, PAGE) for n in (1, 3, 5)]
        Region(engine, rank=None, **rows).cleanup()
        assert pages(own) == list(range(6))
        own.cleanup()
    with engine_id() as engine:  # a cell that begins and ends within pages
        own = Region(engine, 1, 1, 4 * PAGE, CELL)
        assert pages(own) == [1, 2]
        assert list(own.iter_worker_slot_ranges()) == [(PAGE, 2 * PAGE)]
        own.cleanup()
    with engine_id() as engine:
        own = Region(engine, rank=0, **rows, populate_shard=(1, 2))
        assert pages(own) == [3, 4, 5]
        Region(engine, rank=0, **rows, populate_shard=(3, 4)).cleanup()
        assert pages(own) == [3, 4, 5]
        Region(engine, rank=0, **rows, populate_shard=(0, 4)).cleanup()
        assert pages(own) == [0, 1, 3, 4, 5]
        own.cleanup()
    with engine_id() as engine:
        seen = []
        path = f"{path_of(engine)}/memlane"

        def barrier() -> None:
            seen.append(populated_pages(path))

        Region(engine, rank=0, **rows, barrier=barrier, populate_only_on_creator=True).cleanup()
        assert seen == [[True] * 6]
        own = Region(engine, rank=0, **rows, populate_shard=(0, 6))
        Region(engine, rank=0, **rows, barrier=barrier, populate_only_on_creator=True).cleanup()
        assert seen[1:] == [[True] + [False] * 5]
        own.cleanup()


def canonical_views() -> None:
    """All ranks have the same bytes, from the beginning of each row."""
    Region = region_class()
    with engine_id() as engine:
        # Holders that divide the same rows differently, as readers of another size do.
        ranks = [Region(engine, 3, rank, 4 * PAGE, cell) for rank, cell in ((0, CELL), (1, PAGE))]
        for size in (7, 4 * PAGE - 7):
            one, two = (rank.create_next_canonical_view(size) for rank in ranks)
            assert one.shape == two.shape == (3, size)
            one.fill_(size % 100)
            assert torch.equal(one, two)
        with pytest.raises(AssertionError, match="exceed rows of"):
            ranks[0].create_next_canonical_view(1)
        assert ranks[1].base_tensor.view(3, 4 * PAGE)[:, :8].tolist() == [[7] * 7 + [77]] * 3
        with pytest.raises(ValueError, match="in use with"):
            Region(engine, 6, 0, 2 * PAGE, PAGE)
        for rank in ranks:
            rank.cleanup()
            rank.cleanup()
        with pytest.raises(RuntimeError, match="cleaned up"):
            _ = ranks[0].base_tensor


FOLDER_SAYS = r"IsADirectoryError: .*vllm_offload_"
FILE_SAYS = r"SegmentRefused: .*vllm_offload_.*MEMLANE_VLLM=region in every process"


def half_switched() -> None:
    """Whichever comes first has the name; the other one fails at once, and holds nobody up."""
    for first_is, second_is, says in (("region", "", FOLDER_SAYS), ("", "region", FILE_SAYS)):
        with engine_id() as engine:
            barrier = fresh.Barrier(2)
            first = Rank(engine, 0, first_is, barrier=barrier)
            while not path_of(engine).exists():
                time.sleep(0.01)
            second = Rank(engine, 1, second_is, barrier=barrier)
            text, calls = second.answer()
            assert re.match(says, text), text
            assert calls == 1
            assert first.answer() == ("started", 1)
            first.end()
            second.end()
    with engine_id() as engine:  # without a barrier
        first = Rank(engine, 0)
        assert first.answer()[0] == "started"
        second = Rank(engine, None, "")
        text, _ = second.answer()
        assert re.match(FOLDER_SAYS, text), text
        first.end()
        second.end()


def left_over() -> None:
    """The files of a killed run are replaced; those that are not memlane's are refused."""
    Region = region_class()
    with engine_id() as engine:
        killed = Rank(engine, 0)
        killed.answer()
        killed.ask(_write, 0)
        killed.kill()
        assert path_of(engine).exists()
        own = Region(engine, rank=1, **ROWS)
        assert own._creator
        assert not own.base_tensor.any()
        own.cleanup()
    for make in (Path.touch, _dangling, _folder_of_others):
        with engine_id() as engine:
            place = path_of(engine)
            make(place)
            if not place.is_dir() or os.geteuid() == 0:
                with pytest.raises(PermissionError, match=r"MEMLANE_VLLM=region|belongs to"):
                    Region(engine, rank=1, **ROWS)
            place.rmdir() if place.is_dir() else place.unlink()


def _dangling(place: Path) -> None:
    place.symlink_to("nowhere")


def _folder_of_others(place: Path) -> None:
    place.mkdir()
    if os.geteuid() == 0:
        os.chown(place, 1234, 1234)


def bad_input() -> None:
    """Errors that name what was wrong, and leave nothing."""
    Region = region_class()
    good = {**ROWS, "rank": 0}
    with engine_id() as engine:
        for wrong, kind, says in (
            ({"engine_id": f"{engine}/x"}, ValueError, "engine_id"),
            ({"engine_id": f"..{engine}"}, ValueError, "engine_id"),
            ({"engine_id": engine * 10}, ValueError, "at most 255"),
            ({"engine_id": 7}, TypeError, "engine_id must be a string"),
            ({"num_chunks": -1}, ValueError, "num_chunks"),
            ({"num_chunks": 1.5}, TypeError, "num_chunks"),
            ({"rank": -1}, ValueError, "rank"),
            ({"rank": 2}, ValueError, "cell of rank 2"),
            ({"cpu_page_size": 0}, ValueError, "cpu_page_size"),
            ({"barrier": 7}, TypeError, "barrier must be callable"),
            ({"populate_shard": (2, 2)}, ValueError, "populate_shard"),
            ({"populate_shard": (-1, 2)}, ValueError, "populate_shard"),
            ({"populate_only_on_creator": True}, ValueError, "needs a barrier"),
            ({"num_chunks": 1 << 40}, MemoryError, "bytes"),
            ({"num_chunks": 1 << 60}, ValueError, "bytes"),
        ):
            with pytest.raises(kind, match=says):
                Region(**{"engine_id": engine, **good, **wrong})
        region = Region(engine, **{**good, "rank": None})
        for call in (region.create_next_worker_view, region.iter_worker_slot_ranges):
            with pytest.raises(AssertionError, match="without a rank"):
                list(call(*([8] if call == region.create_next_worker_view else [])))
        with pytest.raises(TypeError, match="tensor_page_size"):
            region.create_next_canonical_view("8")
        del region, call


def many_starts() -> None:
    """Folders come and go while others start in them."""
    Region = region_class()
    from memlane.engines.vllm import _folder

    make, others = _folder._make, 3

    def lose(path: str) -> None:
        nonlocal others
        make(path)
        if others:
            others -= 1
            os.rmdir(path)

    with engine_id() as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_folder, "_make", lose)
        Region(engine, rank=0, **ROWS).cleanup()
        assert others == 0
    failures: list[BaseException] = []

    def restart(engine: str, rank: int) -> None:
        try:
            for _ in range(60):
                region = Region(engine, rank=rank, **ROWS)
                assert os.path.samestat(os.stat(region.mmap_path), os.fstat(region.fd))
                region.cleanup()
        except BaseException as error:
            failures.append(error)

    with engine_id() as engine:
        threads = [threading.Thread(target=restart, args=(engine, n % 2)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


def failing_barriers() -> None:
    """The set-up's error is raised and the barrier's is logged; every barrier is joined."""
    Region, shards = region_class(), _shards()
    for error in (OSError("not enough memory"), None):
        with engine_id() as engine:
            calls = 0

            def barrier() -> None:
                nonlocal calls
                calls += 1
                raise ConnectionError(f"peers left ({calls})")

            def check(_total: int, error: Any = error) -> None:
                if error is not None:
                    raise error

            with pytest.raises(OSError, match=r"memory|peers") as caught:
                Region(
                    engine, rank=0, **ROWS, **shards, barrier=barrier, creator_memory_check=check
                )
            assert str(caught.value) == str(error or "peers left (1)")
            assert calls == (2 if shards else 1)
            assert not path_of(engine).exists()
            del caught


def interrupted() -> None:
    """At the barrier or before it: the region is gone, and no (other) barrier is entered."""
    Region, shards = region_class(), _shards()

    def interrupt(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    def end(*_: Any) -> None:
        raise SystemExit(143)

    for stop, where in itertools.product((interrupt, end), ("barrier", "creator_memory_check")):
        with engine_id() as engine:
            entered = []

            def barrier(stop: Any = stop, where: str = where, entered: Any = entered) -> None:
                entered.append(where)
                if where == "barrier":
                    stop()

            options = {where: stop, "barrier": barrier}
            with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
                Region(engine, rank=0, **ROWS, **shards, **options)
            assert len(entered) == (1 if where == "barrier" else 0)
            # While the traceback keeps the region from being collected.
            region = caught.tb.tb_next.tb_frame.f_locals["self"]
            assert where != "barrier" or region.fd is None
            assert not path_of(engine).exists()
            del caught, region


def _shards() -> dict[str, Any]:
    """Two barriers, where vLLM has them."""
    return {"populate_shard": (0, 1)} if os.environ["TEST_RELEASE"] == "0.33" else {}
