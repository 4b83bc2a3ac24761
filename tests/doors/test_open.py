"""`MessageQueue.open`: two programs, one name, no handle in between."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import memlane
from memlane import (
    Closed,
    InvalidArgument,
    InvalidType,
    MessageQueue,
    NameTaken,
    RankTaken,
    ReaderDied,
    TimedOut,
    Unsupported,
    WriterClosed,
    WriterDied,
)
from memlane.testing import kill
from tests.support import PATIENCE, Aside, Link, asleep, start, until
from tests.support.queues import refuses


def reads(link: Link, name: str, rank: int | None = None, **options: Any) -> list[object]:
    """Role: a reader that tells when it has attached, and returns all it gets until the end."""
    with MessageQueue.open(name, rank, timeout=PATIENCE, **options) as queue:
        reader = queue.statistics().rank
        link.tell(reader)
        return [reader, *queue]


def writes(link: Link, name: str, messages: int, readers: int = 1) -> None:
    """Role: a writer that serves, and sends once its readers are here; then it waits for a word."""
    with MessageQueue(readers, name=name, serve=True) as queue:
        link.tell(queue.handle.queue_id)
        queue.wait_until_ready(PATIENCE)
        for number in range(messages):
            queue.enqueue(number)
        link.hear()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_two_programs_meet_whoever_comes_first(method: str, run: Path) -> None:
    for reader_first in (True, False):
        if reader_first:
            reader = start(reads, "steps", method=method)
            until(lambda: asleep(reader.pid), "it waits")  # noqa: B023
            writer = start(writes, "steps", 3, method=method)
        else:
            writer = start(writes, "steps", 3, method=method)
            writer.hear()
            reader = start(reads, "steps", method=method)
        if reader_first:
            writer.hear()
        assert reader.hear() == 0
        assert [path.name for path in run.iterdir()] == ["steps.sock"]
        assert (run / "steps.sock").stat().st_mode & 0o777 == 0o600
        assert run.stat().st_mode & 0o777 == 0o700
        writer.tell()
        writer.result()
        assert reader.result() == [0, 0, 1, 2]


def test_it_takes_the_next_free_rank_or_the_one_asked_for() -> None:
    with MessageQueue(4, local_reader_ranks=[7, 3, 5, 9], name="steps", serve=True) as writer:
        readers = [
            MessageQueue.open("steps"),
            MessageQueue.open("steps", 5),
            MessageQueue.open("steps"),
            MessageQueue.open("steps"),
        ]
        assert [reader.statistics().rank for reader in readers] == [7, 5, 3, 9]
        writer.wait_until_ready(PATIENCE)
        pid = os.getpid()
        with refuses(RankTaken, match=rf"'steps' has no free place: reader 7 \(pid {pid}\), "):
            MessageQueue.open("steps")
        with refuses(RankTaken, match=rf"'steps' has no free place: reader 3 \(pid {pid}\)$"):
            MessageQueue.open("steps", 3)
        with refuses(InvalidArgument, match=r"'steps' has no reader 4: its ranks are \[7, 3, 5, 9"):
            MessageQueue.open("steps", 4)
        writer.enqueue("to all")
        for reader in readers:
            assert reader.dequeue(PATIENCE) == "to all"
            reader.close()


def test_a_name_that_nobody_serves(run: Path) -> None:
    with refuses(TimedOut, match=rf"timed out after 0.1 s: nobody serves 'steps' in {run}$"):
        MessageQueue.open("steps", timeout=0.1)
    with refuses(TimedOut):
        MessageQueue.open("steps", timeout=0)


def test_a_reader_in_the_place_of_one_that_has_closed() -> None:
    """It gets the next message and what follows; nobody waits for it before it is here."""
    with MessageQueue(2, max_chunks=4, name="steps", serve=True) as writer:
        first, other = MessageQueue.open("steps"), MessageQueue.open("steps")
        writer.wait_until_ready(PATIENCE)
        for number in range(3):
            writer.enqueue(number)
            assert first.dequeue(0) == other.dequeue(0) == number
        first.close()
        for lap in range(5):
            for number in range(10):  # more than the ring has chunks
                writer.enqueue(("missed", number), timeout=0)
                assert other.dequeue(0) == ("missed", number)
            with MessageQueue.open("steps", timeout=PATIENCE) as second:
                assert second.statistics().rank == 0
                for number in range(10):
                    writer.enqueue((lap, number), timeout=0)
                    assert second.dequeue(PATIENCE) == other.dequeue(0) == (lap, number)
        other.close()


def test_a_reader_in_the_place_of_one_that_has_died() -> None:
    """Its writer is told of the death first, and frees the place."""
    with MessageQueue(1, name="steps", serve=True) as writer:
        doomed = start(reads, "steps")
        assert doomed.hear() == 0
        writer.wait_until_ready(PATIENCE)
        doomed.kill()
        text = rf"reader 0 \(pid {doomed.pid}\) has died, and its server has not called release_re"
        with refuses(TimedOut, match=text):
            MessageQueue.open("steps", timeout=0.3)
        waiting = start(reads, "steps")
        until(lambda: asleep(waiting.pid), "it waits")
        with refuses(ReaderDied):
            while True:
                writer.enqueue("lost", timeout=PATIENCE)
        writer.release_reader(0)
        assert waiting.hear() == 0
        writer.enqueue("next")
        writer.close()
        assert waiting.result() == [0, "next"]


def test_a_queue_that_is_never_free_opens_places_between_its_calls() -> None:
    """The writer is in a call nearly always: it waits for the slower of its readers."""
    with MessageQueue(2, max_chunks=1, name="steps", serve=True) as writer:
        slow, leaving = MessageQueue.open("steps"), MessageQueue.open("steps")
        writer.wait_until_ready(PATIENCE)
        leaving.close()
        writer.enqueue(0)
        blocked = Aside(writer.enqueue, 1).until_blocked()
        other: Aside[MessageQueue] = Aside(
            MessageQueue.open, "steps", timeout=PATIENCE
        ).until_blocked()
        assert slow.dequeue(PATIENCE) == 0
        blocked.result()
        reader = other.result()
        assert slow.dequeue(PATIENCE) == 1
        writer.enqueue(2, PATIENCE)
        assert slow.dequeue(PATIENCE) == 2
        assert reader.dequeue(PATIENCE) == 2
        reader.close()
        slow.close()


def test_a_queue_of_the_latest_is_joined_by_name() -> None:
    with MessageQueue(2, name="frames", serve=True, mode="latest") as writer:
        for lap in range(5):
            writer.enqueue(("missed", lap))
            with MessageQueue.open("frames", 0, timeout=PATIENCE) as reader:
                if lap == 0:  # the first in its place
                    assert reader.dequeue(PATIENCE) == ("missed", 0)
                writer.enqueue(("skipped", lap))
                writer.enqueue(("latest", lap))
                assert reader.dequeue(PATIENCE) == ("latest", lap)


def test_late_readers_come_through_the_door() -> None:
    with MessageQueue(2, name="log", serve=True, late_readers=True) as writer:
        writer.enqueue("before anybody came")
        with MessageQueue.open("log") as one:
            writer.enqueue("first")
            assert one.dequeue(PATIENCE) == "first"
            with MessageQueue.open("log", 1) as two:
                writer.enqueue("second")
                assert one.dequeue(PATIENCE) == two.dequeue(PATIENCE) == "second"
        for number in range(20):
            writer.enqueue(number, timeout=0)
        with MessageQueue.open("log", timeout=PATIENCE) as three:
            writer.enqueue("third")
            assert three.dequeue(PATIENCE) == "third"


def test_a_second_server_learns_who_the_first_is() -> None:
    first = start(writes, "steps", 0)
    first.hear()
    with refuses(NameTaken, match=rf"'steps' is served by process {first.pid}; end it") as caught:
        MessageQueue(1, name="steps", serve=True)
    assert (caught.value.name, caught.value.pid) == ("steps", first.pid)
    first.stop()
    with refuses(NameTaken):  # stopped is not dead
        MessageQueue(1, name="steps", serve=True)
    with refuses(TimedOut, match=rf"\(pid {first.pid}\) does not answer: it is stopped$"):
        MessageQueue.open("steps", timeout=0.2)
    first.kill()
    with MessageQueue(1, name="steps", serve=True) as second:
        reader = MessageQueue.open("steps")
        assert reader.handle.queue_id == second.handle.queue_id
        reader.close()


def test_a_restarted_server_is_another_queue() -> None:
    """Readers of the old one are told, and find the new one by the same name."""
    first = start(writes, "steps", 1)
    old = first.hear()
    reader = MessageQueue.open("steps", timeout=PATIENCE)
    assert reader.handle.queue_id == old
    assert reader.dequeue(PATIENCE) == 0
    first.kill()
    with refuses(WriterDied):
        reader.dequeue(PATIENCE)
    reader.close()
    coming: Aside[MessageQueue] = Aside(
        MessageQueue.open, "steps", timeout=PATIENCE
    ).until_blocked()
    second = start(writes, "steps", 1)
    new = second.hear()
    with coming.result() as reader:
        assert reader.handle.queue_id == new != old
        assert reader.dequeue(PATIENCE) == 0
        second.tell()
        with refuses(WriterClosed):
            reader.dequeue(PATIENCE)
    second.result()


def test_what_a_name_may_be() -> None:
    for name in ("a", ".", "..", ".new", "a/b", "../up", "[0]", "-", 40 * "x"):
        with MessageQueue(1, name=name, serve=True) as writer, MessageQueue.open(name) as reader:
            assert reader.handle.queue_id == writer.handle.queue_id
            assert reader.name == name
    for name in ("", "a b", "a\0b", 41 * "x", "ü", "a%b"):
        with refuses(InvalidArgument):
            MessageQueue.open(name)
    for value in (None, 1, b"a"):
        with refuses(InvalidType):
            MessageQueue.open(value)  # type: ignore[arg-type]
    with refuses(InvalidArgument, match="serve=True needs a name"):
        MessageQueue(1, serve=True)
    with refuses(InvalidArgument, match="1 to 4096 readers, not 0"):
        MessageQueue(0, name="steps", serve=True)
    with refuses(Unsupported, match="readers on other hosts"):
        MessageQueue(2, 1, name="steps", serve=True)


def test_many_open_at_once() -> None:
    """Each gets a place of its own, and all that is sent."""
    count = 24
    with MessageQueue(count, name="steps", serve=True) as writer:
        readers = [start(reads, "steps") for _ in range(count)]
        assert sorted(reader.hear() for reader in readers) == list(range(count))
        writer.wait_until_ready(PATIENCE)
        writer.enqueue("to all")
        writer.close()
        for reader in readers:
            assert reader.result()[1:] == ["to all"]


def test_a_place_that_refused_a_caller_is_offered_to_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another took the place between its handle and its attaching, and has left since."""
    with MessageQueue(2, name="steps", serve=True) as writer:
        doomed = start(reads, "steps", 1)
        assert doomed.hear() == 1
        doomed.kill()  # its place is not free: the writer has not released it
        others: list[MessageQueue] = []
        attach = MessageQueue.create_from_handle

        def late(*args: Any, **options: Any) -> MessageQueue:
            if not others:
                others.append(attach(writer.export_handle(0), 0))
            return attach(*args, **options)

        monkeypatch.setattr(MessageQueue, "create_from_handle", late)
        coming: Aside[MessageQueue] = Aside(
            MessageQueue.open, "steps", timeout=PATIENCE
        ).until_blocked()
        others[0].close()
        with coming.result() as reader:
            assert reader.statistics().rank == 0


def test_a_place_that_nobody_took_after_all_is_offered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MessageQueue(1, name="steps", serve=True):
        attach = MessageQueue.create_from_handle
        refusals = [RankTaken("another process attaches, and dies before it has joined")]

        def refused(*args: Any, **options: Any) -> MessageQueue:
            if refusals:
                raise refusals.pop()
            return attach(*args, **options)

        monkeypatch.setattr(MessageQueue, "create_from_handle", refused)
        MessageQueue.open("steps", timeout=5.0).close()


def test_a_forked_child_keeps_no_door(run: Path) -> None:
    """The name is free as soon as its process has died, whatever children that has left."""
    server = start(serves_and_forks)
    child = server.hear()
    try:
        server.kill()
        with refuses(TimedOut):
            MessageQueue.open("steps", timeout=0)
        with MessageQueue(1, name="steps", serve=True), MessageQueue.open("steps"):
            pass
    finally:
        kill(child)


def serves_and_forks(link: Link) -> None:
    """Role: serves, and has a child that lives on, and has closed its copy of the queue."""
    with MessageQueue(1, name="steps", serve=True) as queue:
        if os.fork() == 0:
            queue.close()
            link.tell(os.getpid())  # until then the copy holds the segment, too
            signal.pause()
        link.hear()


def test_close_ends_the_door(run: Path) -> None:
    """No thread, no socket, no descriptor is left, and who waits at the door waits for another."""
    queue = MessageQueue(1, name="steps", serve=True)
    with MessageQueue.open("steps"):
        queue.close()
        queue.close()
        assert not [each for each in threading.enumerate() if each.name == "memlane-door"]
        assert not list(run.iterdir())
        with refuses(TimedOut):
            MessageQueue.open("steps", timeout=0)
        with refuses(Closed):
            queue.enqueue(1)


@pytest.mark.parametrize("how", ["exception", "garbage"])
def test_a_queue_that_is_abandoned_serves_no_more(how: str, run: Path) -> None:
    queue: Any = MessageQueue(1, name="steps", serve=True)
    if how == "exception":
        with pytest.raises(ZeroDivisionError), queue:
            1 / 0  # noqa: B018
    else:
        del queue
    assert not list(run.iterdir())
    assert not [each for each in threading.enumerate() if each.name == "memlane-door"]


def test_a_process_that_exits_takes_its_name_along(run: Path) -> None:
    server = start(exits_without_close, method="spawn")
    assert server.join() == 0
    assert not list(run.iterdir())


def exits_without_close(_link: Link) -> None:
    memlane.kept = MessageQueue(1, name="steps", serve=True)


def test_opening_takes_milliseconds() -> None:
    took = []
    with MessageQueue(10, name="steps", serve=True):
        for _ in range(10):
            began = time.monotonic()
            MessageQueue.open("steps").close()
            took.append(time.monotonic() - began)
    assert min(took) < 0.005  # the others waited for a processor, too


def test_other_tasks_run_while_a_name_is_awaited(run: Path) -> None:
    async def opens() -> object:
        task = asyncio.create_task(MessageQueue.aopen("steps", timeout=PATIENCE))
        await asyncio.sleep(0)
        with MessageQueue(1, name="steps", serve=True) as writer, await task as reader:
            writer.enqueue("there")
            return await reader.adequeue(PATIENCE)

    assert asyncio.run(opens()) == "there"


def test_an_opening_that_is_cancelled_leaves_nothing(run: Path) -> None:
    """Neither while nobody serves the name nor at the door; the place is free."""

    async def cancelled(turns: int) -> None:
        task = asyncio.create_task(MessageQueue.aopen("steps"))
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.cancel():
            return (await task).close()
        with pytest.raises(asyncio.CancelledError):
            await task
        return None

    async def opens() -> None:
        before = len(os.listdir("/proc/self/fd"))
        await cancelled(3)
        with MessageQueue(1, name="steps", serve=True, late_readers=True):
            for turns in range(30):
                await cancelled(turns % 3)
                (await MessageQueue.aopen("steps", timeout=PATIENCE)).close()
        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(opens())
