"""`memlane.testing`: its promises to tests of engines built on memlane."""

import logging
import os
import resource
import signal
import uuid

import pytest

from memlane import MessageQueue, ReaderDied, SharedOffloadRegion, ShmRingBuffer, testing
from memlane._base import processes
from memlane._base.descriptors import is_readable_within
from tests.support import PATIENCE, Aside, Link, Remote, serve, start, until
from tests.support.queues import SHM, name_in, path_of, refuses, start_reader, start_writer, sweep


def open_here() -> list[testing.Segment]:
    """Only this process's: other tests may run on the same machine."""
    return [segment for segment in testing.segments() if os.getpid() in segment.pids]


def facts_of(segment: testing.Segment) -> tuple[str, bool, tuple[int, ...]]:
    return segment.name, segment.is_named, segment.pids


def all_facts() -> list[tuple[str, bool, tuple[int, ...]]]:
    return [facts_of(segment) for segment in testing.segments()]


def test_a_local_queue_is_gone_after_its_block() -> None:
    """A whole queue in one process, with any option, gone afterwards."""
    with testing.local_queue(2, max_chunk_bytes=64, serializer="msgpack") as (writer, readers):
        writer.enqueue([1])
        assert [reader.dequeue(timeout=0) for reader in readers] == [[1], [1]]
        assert [segment.is_named for segment in open_here()] == [False]
    with refuses(RuntimeError):
        writer.enqueue([1])
    assert open_here() == []


def test_segments_are_listed_with_the_processes_that_hold_them() -> None:
    """Named until all have attached; with every process that has it open."""
    with MessageQueue(1, 1, max_chunk_bytes=64) as writer:
        (segment,) = open_here()
        assert facts_of(segment) == (path_of(writer).name, True, (os.getpid(),))
        reader = start_reader(writer.export_handle())
        writer.wait_until_ready(PATIENCE)
        (segment,) = open_here()
        assert not segment.is_named
        assert segment.pids == tuple(sorted([os.getpid(), reader.pid]))
        reader.peer.kill()


def test_no_leaks_finds_only_what_its_block_left() -> None:
    """Earlier segments are no leak; one that is left by the block is."""
    with ShmRingBuffer(1, 64, 1), testing.no_leaks(), ShmRingBuffer(1, 64, 1):
        pass
    rings = []
    with pytest.raises(AssertionError, match=rf"named, open in {os.getpid()}"), testing.no_leaks():
        rings.append(ShmRingBuffer(1, 64, 1))
    rings.pop().close()
    with pytest.raises(ZeroDivisionError), testing.no_leaks():
        rings.append(ShmRingBuffer(1 // 0, 64, 1))


def test_a_region_that_is_left_is_a_leak() -> None:
    """Its name stays until its creator cleans up."""
    regions = []
    with pytest.raises(AssertionError, match="vllm_offload_"), testing.no_leaks():
        regions.append(SharedOffloadRegion(uuid.uuid4().hex, 4096, 1, 0, 1, 4096))
    with testing.no_leaks():
        regions.pop().cleanup()


def test_a_region_of_vllm_that_is_left_is_a_leak() -> None:
    """It is a file in a folder, which may be left alone, too."""
    folder = SHM / f"vllm_offload_{uuid.uuid4().hex}.mmap"
    text = rf"{folder.name}/memlane \(named, open in {os.getpid()}\)"
    folder.mkdir()
    with pytest.raises(AssertionError, match=text), testing.no_leaks():
        region = os.open(folder / "memlane", os.O_CREAT | os.O_RDWR, 0o600)
    assert (f"{folder.name}/memlane", True, (os.getpid(),)) in all_facts()
    (folder / "memlane").unlink()
    assert (folder.name, True, ()) in all_facts()
    folder.rmdir()
    (segment,) = open_here()
    assert facts_of(segment) == (f"{folder.name}/memlane", False, (os.getpid(),))
    with testing.no_leaks():
        os.close(region)


def checking(link: Link) -> None:
    """Role: another test, which lasts until it is told to end."""
    with testing.no_leaks():
        link.tell()
        link.hear()


def with_a_writer(writers: list[Remote]) -> int:
    writers.append(start_writer())
    return writers[0].pid


def without_a_writer(writers: list[Remote]) -> None:
    writers.pop().leave()


def test_segments_of_tests_beside_this_one_are_no_leaks() -> None:
    """Not while one of its processes has them, so tests can run in parallel."""
    other = start(checking)
    other.hear()
    child = start_writer()
    region = SharedOffloadRegion(uuid.uuid4().hex, 4096, 1, 0, 1, 4096)
    with MessageQueue(1, 1, max_chunk_bytes=64):
        named = [segment.pids for segment in testing.segments() if segment.is_named]
        assert {(child.pid,), (os.getpid(),)} <= set(named)
        other.tell()
        other.result()
    child.leave()
    region.cleanup()


def test_segments_of_children_are_leaks() -> None:
    """So are those of their children, and what is left of processes that have been killed."""
    child = Remote(start(serve, []))
    with (
        pytest.raises(AssertionError, match=r"\(named, open in \d+\)") as caught,
        testing.no_leaks(),
    ):
        pid = child.call(with_a_writer)
    assert f"open in {pid})" in str(caught.value)
    child.call(without_a_writer)
    child.leave()
    with pytest.raises(AssertionError, match="named, open in no process"), testing.no_leaks():
        start_writer().peer.kill()
    sweep()


@pytest.mark.root
def test_segments_of_other_users_are_no_leaks() -> None:
    """They come and go as they like."""
    path = SHM / f"memlane-{uuid.uuid4().hex}"
    try:
        with testing.no_leaks():
            path.touch()
            os.chown(path, 12345, 12345)
    finally:
        path.unlink()


def test_what_only_the_collector_has_not_seen_yet_is_no_leak() -> None:
    """An engine in a reference cycle is gone when its last outside reference is."""

    class Engine:
        pass

    with testing.no_leaks():
        engine = Engine()
        engine.__dict__.update(itself=engine, queue=MessageQueue(1, 1, max_chunk_bytes=64))
        del engine


def test_a_kill_can_be_seen_when_it_returns() -> None:
    """The death can be seen as soon as it returns: no wait is needed."""
    with MessageQueue(1, 1, max_chunk_bytes=64) as writer:
        reader = start_reader(writer.export_handle())
        writer.wait_until_ready(PATIENCE)
        testing.kill(reader.pid)
        assert writer.statistics().readers[0].state == "dead"
        with pytest.raises(ReaderDied):
            writer.wait_until_ready(PATIENCE)


def test_a_process_is_stopped_within_the_block() -> None:
    """Stopped within the block, running after it; a dead process is refused."""
    with MessageQueue(1, 1, max_chunk_bytes=64) as writer:
        reader = start_reader(writer.export_handle())
        writer.wait_until_ready(PATIENCE)
        for _ in range(3):
            with testing.stopped(reader.pid):
                assert writer.statistics().readers[0].state == "stopped"
            os.waitid(os.P_PID, reader.pid, os.WCONTINUED)
            assert writer.statistics().readers[0].state == "running"
        os.kill(reader.pid, signal.SIGKILL)
        with refuses(ValueError, match="has ended"), testing.stopped(reader.pid):
            pass


def wait_until_told(writer: MessageQueue, reader: MessageQueue, lines: list[str]) -> None:
    """A message that waits for its chunk until a line says so."""
    waits = Aside(writer.enqueue, 2)
    until(lambda: lines, "the stall is logged")
    reader.dequeue()
    waits.result()


def test_stopped_of_a_process_that_is_no_child() -> None:
    """Such as what multiprocessing's fork server starts, the default from CPython 3.14 on."""
    child = Remote(start(serve, []))
    pid = child.call(with_a_writer)
    with testing.stopped(pid):
        assert processes.state(pid) == "stopped"
    child.call(without_a_writer)
    with refuses(ValueError, match="has ended"), testing.stopped(pid):
        pass
    child.leave()


def test_stalls_are_the_lines_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of the block, with the interval of the block."""
    monkeypatch.delenv("MEMLANE_RINGBUFFER_WARNING_INTERVAL", raising=False)
    with testing.local_queue(1, max_chunk_bytes=64, max_chunks=1) as (writer, (reader,)):
        writer.enqueue(1)
        with testing.stalls(after=0.15) as lines:
            wait_until_told(writer, reader, lines)
        assert f"; waiting for reader 0 (pid {os.getpid()} " in lines[0]
    assert "MEMLANE_RINGBUFFER_WARNING_INTERVAL" not in os.environ


def test_stalls_are_collected_where_logging_is_off() -> None:
    """The lines are collected however quiet the engine's own logging is."""
    logger, root = logging.getLogger("memlane"), logging.getLogger()
    before = root.level
    root.setLevel(logging.CRITICAL)
    logger.disabled = True  # as logging.config does to loggers that it is not told of
    try:
        with testing.local_queue(1, max_chunk_bytes=64, max_chunks=1) as (writer, (reader,)):
            writer.enqueue(1)
            with testing.stalls(after=0.15) as lines:
                wait_until_told(writer, reader, lines)
        assert logger.disabled
        assert logger.level == logging.NOTSET
    finally:
        root.setLevel(before)
        logger.disabled = False


@pytest.mark.parametrize("after", [0, -1.0, float("nan"), "often", None])
def test_stalls_refuse_an_interval_of_nothing(after: float) -> None:
    """A line about the setting itself would be taken for one about a stall."""
    before = dict(os.environ)
    with refuses(ValueError, TypeError), testing.stalls(after):
        pass
    assert dict(os.environ) == before


def test_segments_of_other_processes_are_listed() -> None:
    """Another process's queue is seen, too, also when nobody else has it open."""
    writer = start_writer()
    with MessageQueue.create_from_handle(writer.greeting, 0):
        writer.call("wait_until_ready", 10)
    name = name_in(writer.greeting)
    assert (name, False, (writer.pid,)) in all_facts()
    writer.peer.kill()
    assert name not in [segment.name for segment in testing.segments()]


def with_many_files(_link: Link, child: int) -> bool:
    """Role: in a process whose next descriptors have numbers above 1023."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 2000), limit))
    while os.open(os.devnull, os.O_RDONLY) < 1100:
        pass
    with testing.stopped(child):
        pass
    testing.kill(child)
    return is_readable_within(os.eventfd(1), 0)


def test_a_process_with_more_files_than_select_knows_can_stop_and_kill() -> None:
    peer = start(idle)
    peer.hear()
    assert start(with_many_files, peer.pid).result()
    assert peer.join() == -signal.SIGKILL


def idle(link: Link) -> None:
    link.tell()
    link.hear()
