"""The store of a group: objects that are put once, and read by the workers of a call."""

import asyncio
import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import memlane
from memlane import (
    CallTimedOut,
    Closed,
    InvalidArgument,
    InvalidType,
    ObjectGone,
    Stored,
    StoreFull,
    Ticket,
    WorkerGroup,
    WrongProcess,
)
from tests.support import PATIENCE, Link, start, until
from tests.support.queues import segments

MIB = 1 << 20


@dataclass
class Request:
    """An argument with an object inside."""

    image: Stored


class Reader:
    """A worker that reads images, and may keep some."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.kept = rank, list[Any]()

    def sums(self, image: np.ndarray, times: int = 1) -> int:
        return int(image.sum()) * times

    def kind(self, image: Any) -> tuple[type, bool]:
        return type(image), isinstance(image, np.ndarray) and image.flags.writeable

    def keeps(self, image: np.ndarray) -> None:
        self.kept.append(image)

    def drops(self) -> None:
        self.kept.clear()

    def sums_kept(self) -> int:
        return int(self.kept[0].sum())

    def opens(self, request: Request) -> int:
        return int(request.image.get().sum())

    def keeps_the_name(self, request: Request) -> None:
        self.kept.append(request.image)

    def opens_the_kept(self) -> int:
        return int(self.kept[0].get().sum())

    def waits(self, image: np.ndarray, descriptor: int) -> int:
        os.read(descriptor, 1)
        return int(image.sum())

    def raises(self, image: np.ndarray) -> None:
        raise ValueError(f"{image.shape}")

    def returns_it(self, request: Request) -> Stored:
        return request.image

    def steps(self, image: np.ndarray) -> Iterator[int]:
        while True:
            yield int(image.sum())

    def dies(self, _image: np.ndarray) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def group_of(world: int = 2, store: int = 8 * MIB, **options: Any) -> WorkerGroup[Reader]:
    return WorkerGroup(Reader, world, store=store, start_method="fork", timeout=PATIENCE, **options)


def puts(group: WorkerGroup[Reader], most: int = 10) -> None:
    """More objects than the store of a test holds."""
    for _ in range(most):
        group.store.put(object(), image())


def image(value: int = 1, nbytes: int = MIB) -> np.ndarray:
    return np.full(nbytes, value, np.uint8)


def test_an_object_is_put_once_and_read_by_all_workers() -> None:
    with group_of() as group:
        cat = group.store.put("cat", image())
        assert group.call(Reader.sums, cat) == [MIB, MIB]
        assert group.call(Reader.sums, cat, times=2) == [2 * MIB, 2 * MIB]
        assert group.call(Reader.sums, image=cat) == [MIB, MIB]
        assert group[1].call(Reader.sums, cat) == [MIB]
        assert group.store.find("cat") is cat
        assert group.store.find("dog") is None
        assert group.store.statistics().puts == 1
        assert cat.get().sum() == MIB


def test_a_worker_gets_arrays_that_cannot_be_written() -> None:
    with group_of(1) as group:
        for value, kind in [(image(), np.ndarray), (b"x" * 100, memoryview), ("text", str)]:
            assert group.call(Reader.kind, group.store.put(kind, value)) == [(kind, False)]


def test_each_worker_gets_its_item_of_a_scatter() -> None:
    with group_of(2) as group:
        items = [group.store.put(value, image(value)) for value in (1, 2)]
        assert group.scatter(Reader.sums, items).result(PATIENCE) == [MIB, 2 * MIB]


def test_an_object_inside_an_argument_is_opened_by_the_worker() -> None:
    with group_of(2) as group:
        request = Request(group.store.put("cat", image()))
        assert group.call(Reader.opens, request) == [MIB, MIB]


def test_the_oldest_objects_make_room_for_new_ones() -> None:
    with group_of(1) as group:
        for value in range(40):
            assert group.call(Reader.sums, group.store.put(value, image(value))) == [value * MIB]
        assert group.store.find(0) is None
        last = group.store.find(39)
        assert last is not None
        assert group.call(Reader.sums, last) == [39 * MIB]


@pytest.mark.parametrize("size", [MIB // 8, MIB, 2 * MIB, 3 * MIB])
def test_no_more_is_evicted_than_must_be(size: int) -> None:
    """The store is nearly full whenever it is: what was put last is found."""
    with group_of(1) as group:
        fit = 8 * MIB // (size + 100)
        for number in range(3 * fit):
            group.store.put(number, image(number % 251, size))
            last = range(max(0, number - fit + 2), number + 1)
            assert [key for key in last if group.store.find(key) is None] == []


def test_an_object_that_the_program_keeps_moves_there() -> None:
    """It does so when its room is needed, is sent with later calls, and may be put again."""
    with group_of(2) as group:
        kept = [group.store.put(("kept", value), image(value)) for value in range(10)]
        for _ in range(3):
            puts(group)
            for value, stored in enumerate(kept):
                assert group.call(Reader.sums, stored) == [value * MIB] * 2
                assert group[0].call(Reader.opens, Request(stored)) == [value * MIB]
                assert stored.get().sum() == value * MIB
        assert group.store.find(("kept", 3)) is None
        again = group.store.put(("kept", 3), image(4))
        assert group.call(Reader.sums, again) == [4 * MIB] * 2
        assert group.call(Reader.sums, kept[3]) == [3 * MIB] * 2


def test_a_put_waits_for_the_calls_that_have_the_oldest_object() -> None:
    here, there = os.pipe()
    with group_of(2) as group:
        call = group.submit(Reader.waits, group.store.put("first", image(3)), here)
        puts(group, 6)
        late = r"waits\(\) has the oldest object: worker 0 \(pid \d+, in waits\), worker 1"
        with pytest.raises(CallTimedOut, match=late):
            group.store.put("next", image(), timeout=0)
        timer = threading.Timer(0.1, os.write, [there, b"xx"])
        timer.start()
        group.store.put("next", image(), timeout=PATIENCE)
        assert call.result(PATIENCE) == [3 * MIB, 3 * MIB]
        assert group.store.find("first") is None
        timer.join()
    os.close(here)
    os.close(there)


def test_other_tasks_run_while_a_put_waits() -> None:
    here, there = os.pipe()

    async def waits(group: WorkerGroup[Reader]) -> list[int]:
        call = group.submit(Reader.waits, group.store.put("first", image(3)), here)
        puts(group, 6)
        task = asyncio.create_task(group.store.aput("next", image()))
        await asyncio.sleep(0)
        assert not task.done()
        os.write(there, b"xx")
        await asyncio.wait_for(task, PATIENCE)
        return await call

    with group_of(2) as group:
        assert asyncio.run(waits(group)) == [3 * MIB, 3 * MIB]
    os.close(here)
    os.close(there)


def test_an_array_that_a_worker_keeps_stays_until_it_is_dropped() -> None:
    with group_of(2) as group:
        group[1].call(Reader.keeps, group.store.put("first", image(5)))
        with pytest.raises(StoreFull, match=r"'first', is kept by reader \d .*holds a view"):
            puts(group)
        assert group[1].call(Reader.sums_kept) == [5 * MIB]
        group[1].call(Reader.drops)
        group.store.put("next", image())


def test_a_stream_keeps_what_it_was_given() -> None:
    with group_of(1) as group:
        stream = group.stream(Reader.steps, group.store.put("first", image(5)))
        assert next(stream) == [5 * MIB]
        with pytest.raises(StoreFull):
            puts(group)
        assert next(stream) == [5 * MIB]


def fails(group: WorkerGroup[Reader], method: Any, key: str) -> str:
    """A call that raises; returns the error's text, and keeps nothing: pytest's would."""
    try:
        group[-1].call(method, group.store.find(key))
    except Exception as error:
        return str(error)
    raise AssertionError


@pytest.mark.parametrize("awaits", [False, True])
def test_a_call_that_raises_keeps_nothing(awaits: bool) -> None:
    """Neither here nor in the worker, also without a garbage collector."""

    async def acall(group: WorkerGroup[Reader]) -> str:
        try:
            await group.acall(Reader.raises, group.store.find("first"))
        except ValueError as error:
            return str(error)
        raise AssertionError

    gc.collect()
    gc.disable()
    try:
        with group_of(2) as group:
            group.store.put("first", image())
            text = asyncio.run(acall(group)) if awaits else fails(group, Reader.raises, "first")
            assert "1048576" in text
            puts(group)
    finally:
        gc.enable()


def test_a_name_that_a_worker_keeps_is_of_no_use_once_the_object_is_evicted() -> None:
    with group_of(1) as group:
        group.call(Reader.keeps_the_name, Request(group.store.put("first", image(5))))
        assert group.call(Reader.opens_the_kept) == [5 * MIB]
        puts(group)
        with pytest.raises(ObjectGone):
            group.call(Reader.opens_the_kept)


def test_an_object_goes_to_workers_of_its_own_group_only() -> None:
    with group_of(1) as group, group_of(1) as other:
        cat = group.store.put("cat", image())
        with pytest.raises(InvalidType, match="calls of its own group only"):
            other.call(Reader.sums, cat)
        with pytest.raises(InvalidType, match="and not copied"):
            copy.copy(cat)
        with pytest.raises(InvalidType, match="calls of its own group only"):
            pickle.dumps(cat)
        with pytest.raises(InvalidType, match="a worker cannot send a Stored"):
            group.call(Reader.returns_it, Request(cat))
        assert group.call(Reader.sums, cat) == [MIB]


def test_a_call_of_another_group_meanwhile_gets_no_other_object() -> None:
    """Its workers find the store by its name, not the object by its place in theirs."""
    with group_of(1) as group, group_of(1) as other:
        other.store.put("dog", image(9))
        cat = group.store.put("cat", image())

        class CallsAnother:
            """An argument that is pickled by a call of the other group."""

            def __reduce__(self) -> tuple[Any, ...]:
                with pytest.raises(InvalidType):
                    pickle.dumps(Request(dog))
                with pytest.raises(InvalidType, match="no worker of the group that has stored"):
                    other.call(Reader.opens, Request(cat))
                return int, ()

        dog = other.store.find("dog")
        assert dog is not None
        assert group.call(Reader.sums, cat, CallsAnother()) == [0]
        assert group.call(Reader.sums, cat) == [MIB]


def test_a_call_to_some_workers_keeps_its_object_for_each() -> None:
    """The first of them has its call already while that of the second is pickled."""
    here, there = os.pipe()

    class Puts:
        def __reduce__(self) -> tuple[Any, ...]:
            if sent:
                fill = threading.Thread(target=puts, args=[group])
                fill.start()
                fill.join(0.2)
                threads.append(fill)
            sent.append(None)
            return int, (1,)

    with group_of(3) as group:
        sent: list[None] = []
        threads: list[threading.Thread] = []
        busy = group[0].submit(Reader.waits, np.zeros(1), here)
        call = group[:2].submit(Reader.sums, group.store.put("cat", image()), Puts())
        os.write(there, b"x")
        assert call.result(PATIENCE) == [MIB, MIB]
        busy.result(PATIENCE)
        for thread in threads:
            thread.join()
        assert threads
    os.close(here)
    os.close(there)


def test_a_value_that_calls_the_group_while_it_is_put_stops_nobody() -> None:
    class Calls:
        def __reduce__(self) -> tuple[Any, ...]:
            return int, (group.call(Reader.sums, cat)[0],)

    with group_of(1) as group:
        cat = group.store.put("cat", image())
        assert group.store.put("calls", Calls()).get() == MIB


def test_a_forked_child_cannot_use_the_store() -> None:
    """Whatever another thread did when it was forked."""
    pickles, forked = threading.Event(), threading.Event()

    class Slow:
        def __hash__(self) -> int:
            pickles.set()
            forked.wait(PATIENCE)
            return 1

    with group_of(1) as group:
        cat = group.store.put("cat", image())
        thread = threading.Thread(target=group.store.put, args=[Slow(), 1])
        thread.start()
        pickles.wait(PATIENCE)
        child = os.fork()
        if not child:
            code = 0
            for call in (lambda: group.store.find("cat"), lambda: group.store.put("x", 1)):
                try:
                    call()
                    code = 1
                except WrongProcess:
                    pass
            os._exit(code)
        forked.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert group.call(Reader.sums, cat) == [MIB]


def test_a_process_may_be_a_worker_of_two_groups() -> None:
    threads: list[threading.Thread] = []

    def begin(ticket: Ticket) -> None:
        threads.append(threading.Thread(target=memlane.serve, args=[ticket, Reader]))
        threads[-1].start()

    with (
        WorkerGroup[Any](None, 1, start=begin, store=4 * MIB, timeout=PATIENCE) as group,
        WorkerGroup[Any](None, 1, start=begin, store=4 * MIB, timeout=PATIENCE) as other,
    ):
        for value, each in ((1, group), (9, other)):
            assert each.call("sums", each.store.put("cat", image(value))) == [value * MIB]
        for each in (group, other):
            each.close()
        for thread in threads:
            thread.join()


def test_a_replaced_worker_reads_what_was_put_before() -> None:
    """Also what it had kept is free then."""
    with group_of(2, on_death="replace") as group:
        group[1].call(Reader.keeps, group.store.put("cat", image()))
        assert not segments()
        for _ in range(3):
            assert "killed by SIGKILL" in fails(group, Reader.dies, "cat")
            assert group.call(Reader.sums, group.store.find("cat")) == [MIB, MIB]
        puts(group)


def test_a_group_without_a_store_says_so() -> None:
    with WorkerGroup(Reader, 1, start_method="fork", timeout=PATIENCE) as group:
        with pytest.raises(InvalidArgument, match="no store: make it with store="):
            group.store  # noqa: B018
        for wrong in (0, 1 << 62, "x", 1.5):
            before = segments()
            with pytest.raises((InvalidArgument, InvalidType)) as kept:
                group_of(1, wrong)  # type: ignore[arg-type]
            assert segments() == before, kept


def test_a_key_is_put_once_and_an_object_fits() -> None:
    with group_of(1) as group:
        cat = group.store.put("cat", image())
        with pytest.raises(InvalidArgument, match="already exists"):
            group.store.put("cat", image())
        with pytest.raises(InvalidArgument, match="exceeds max object size"):
            group.store.put("large", image(1, 9 * MIB))
        with pytest.raises(InvalidType):
            group.store.find([])
        assert group.call(Reader.sums, cat) == [MIB]


def test_a_closed_group_has_no_objects() -> None:
    with group_of(1) as group:
        cat = group.store.put("cat", image())
    for call in (cat.get, lambda: group.store.find("cat"), lambda: group.store.put("dog", 1)):
        with pytest.raises(Closed):
            call()


def test_threads_share_a_store() -> None:
    with group_of(2, store=16 * MIB) as group:
        results: list[bool] = []

        def shares(name: int) -> None:
            for number in range(30):
                stored = group.store.put((name, number), image(number, 500_000))
                answer = group.call(Reader.sums, stored)
                results.append(answer == [number * 500_000] * 2)

        threads = [threading.Thread(target=shares, args=[name]) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 120


def driver(link: Link) -> None:
    """Role: a group that says its workers' pids, and does not end."""
    group = group_of(2)
    link.tell(group.pids)
    group.store.put("cat", image())
    link.tell(None)
    signal.pause()


def test_a_killed_driver_leaves_no_memory() -> None:
    peer = start(driver)
    pids = peer.hear()
    peer.hear()
    os.kill(peer.pid, signal.SIGKILL)
    until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids), "they end")
    assert not segments()


def test_workers_of_another_program_read_objects() -> None:
    """The ticket has the store as text."""
    code = (
        "import sys; from memlane import Ticket, serve; from tests.workers.test_store import "
        "Reader; serve(Ticket.from_json(sys.argv[1]), Reader)"
    )
    programs: list[subprocess.Popen[bytes]] = []

    def begin(ticket: Ticket) -> None:
        programs.append(subprocess.Popen([sys.executable, "-c", code, ticket.to_json()]))

    with WorkerGroup[Any](None, 2, start=begin, store=4 * MIB, timeout=PATIENCE) as group:
        assert group.call("sums", group.store.put("cat", image())) == [MIB, MIB]
    assert [program.wait(PATIENCE) for program in programs] == [0, 0]
