"""One rule for every timeout: a negative one polls like 0, numpy's numbers count, None waits for
ever, and what is no number of seconds is refused.

Every public function and method with a parameter `timeout` is here: they are found by signature.
"""

import asyncio
import inspect
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pytest
import zmq

import memlane
from memlane import (
    Gather,
    InvalidArgument,
    InvalidType,
    MessageQueue,
    TimedOut,
    WorkerGroup,
    as_completed,
    first_ready,
)
from memlane._base.deadline import seconds_of
from memlane.groups import TcpGroup, collectives_of
from memlane.offload.region import _wait_for_file_size
from memlane.testing import kill
from tests.support import PATIENCE, Aside, start
from tests.support.gathers import gather_of
from tests.support.groups import SECRET, SMALL, groups_of
from tests.support.proxies import Cable
from tests.support.queues import fill, queue_of, refuses, segments
from tests.support.regions import PAGE, half_created, new_id, region_of
from tests.support.remote_queues import remote_queue, remote_writer

Call = Callable[[Any], object]
Scene = tuple[Call, Callable[[], object] | None]
"""A call with a timeout, and what ends its wait; None if it does not wait."""
SCENES: dict[str, Callable[[], AbstractContextManager[Scene]]] = {}

REFUSED = [True, False, np.True_, "1", b"1", [1], 1j, math.nan, np.float32("nan")]
EXPIRED = [0, 0.0, -0.0, -1, -math.inf, -(10**400), np.float64(-1), np.int8(-1), np.float16(0)]
ENDLESS = [None, 1e9, 1e300, math.inf, 10**400, np.float32(1e30), np.int64(2**62)]


def scene(name: str, kind: str = "") -> Callable[[Callable[[], Iterator[Scene]]], None]:
    def add(make: Callable[[], Iterator[Scene]]) -> None:
        SCENES[f"{name} {kind}".strip()] = contextmanager(make)

    return add


@scene("MessageQueue.enqueue")
def _() -> Iterator[Scene]:
    with queue_of() as (writer, (reader,)):
        fill(writer)
        yield lambda timeout: writer.enqueue("late", timeout), reader.dequeue


@scene("MessageQueue.enqueue_many")
def _() -> Iterator[Scene]:
    with queue_of() as (writer, (reader,)):
        fill(writer)
        yield lambda timeout: writer.enqueue_many(["late"], timeout), reader.dequeue


@scene("MessageQueue.enqueue_many", "without readers")
def _() -> Iterator[Scene]:
    with queue_of(0) as (writer, _):
        yield lambda timeout: writer.enqueue_many(["late"], timeout), None


@scene("MessageQueue.enqueue_many", "to a remote reader")
def _() -> Iterator[Scene]:
    with remote_queue(remote_window=1) as (writer, (reader,)):
        fill(writer)
        yield lambda timeout: writer.enqueue_many(["late"], timeout), reader.dequeue


@scene("MessageQueue.adequeue_many")
def _() -> Iterator[Scene]:
    with queue_of() as (writer, (reader,)):
        yield (
            lambda timeout: asyncio.run(reader.adequeue_many(2, timeout)),
            lambda: writer.enqueue("there"),
        )


@scene("Gather.enqueue_many")
def _() -> Iterator[Scene]:
    with gather_of() as (reader, writers):
        fill(writers[0])
        yield lambda timeout: writers[0].enqueue_many(["late"], timeout), reader.dequeue


@scene("Gather.dequeue_many")
def _() -> Iterator[Scene]:
    with gather_of() as (reader, writers):
        yield lambda timeout: reader.dequeue_many(2, timeout), lambda: writers[1].enqueue("there")


@scene("Gather.adequeue_many")
def _() -> Iterator[Scene]:
    with gather_of() as (reader, writers):
        yield (
            lambda timeout: asyncio.run(reader.adequeue_many(2, timeout)),
            lambda: writers[1].enqueue("there"),
        )


@scene("MessageQueue.enqueue", "without readers")
def _() -> Iterator[Scene]:
    with queue_of(0) as (writer, _):
        yield lambda timeout: writer.enqueue("late", timeout), None


@scene("MessageQueue.enqueue", "to a remote reader")
def _() -> Iterator[Scene]:
    with remote_queue(remote_window=1) as (writer, (reader,)):
        fill(writer)
        yield lambda timeout: writer.enqueue("late", timeout), reader.dequeue


@scene("MessageQueue.acquire_write")
def _() -> Iterator[Scene]:
    with queue_of() as (writer, (reader,)):
        fill(writer)
        yield lambda timeout: enter(writer.acquire_write(timeout)), reader.dequeue


@scene("MessageQueue.acquire_write", "without readers")
def _() -> Iterator[Scene]:
    with queue_of(0) as (writer, _):
        yield lambda timeout: enter(writer.acquire_write(timeout)), None


@scene("MessageQueue.acquire_write", "to a remote reader")
def _() -> Iterator[Scene]:
    with remote_queue(n_local=1) as (writer, _):
        yield lambda timeout: enter(writer.acquire_write(timeout)), None


READS: dict[str, Callable[[MessageQueue, Any], object]] = {
    "dequeue": lambda reader, timeout: reader.dequeue(timeout),
    "dequeue_many": lambda reader, timeout: reader.dequeue_many(2, timeout),
    "dequeue_view": lambda reader, timeout: enter(reader.dequeue_view(timeout)),
    "acquire_read": lambda reader, timeout: enter(reader.acquire_read(timeout)),
}
for _name, _read in READS.items():

    @scene(f"MessageQueue.{_name}")
    def _(read: Callable[[MessageQueue, Any], object] = _read) -> Iterator[Scene]:
        with queue_of() as (writer, (reader,)):
            yield lambda timeout: read(reader, timeout), lambda: writer.enqueue("there")

    if _name == "acquire_read":
        continue

    @scene(f"MessageQueue.{_name}", "of a remote reader")
    def _(read: Callable[[MessageQueue, Any], object] = _read) -> Iterator[Scene]:
        with remote_queue() as (writer, (reader,)):
            yield lambda timeout: read(reader, timeout), lambda: writer.enqueue("there")


@scene("MessageQueue.adequeue")
def _() -> Iterator[Scene]:
    with queue_of() as (writer, (reader,)):
        yield (
            lambda timeout: asyncio.run(reader.adequeue(timeout)),
            lambda: writer.enqueue("there"),
        )


@scene("MessageQueue.aenqueue")
def _() -> Iterator[Scene]:
    with queue_of() as (writer, (reader,)):
        fill(writer)
        yield lambda timeout: asyncio.run(writer.aenqueue("late", timeout)), reader.dequeue


def opening(kind: Any, name: str, awaits: bool) -> Call:
    if awaits:
        return lambda timeout: asyncio.run(kind.aopen(name, timeout=timeout)).close()
    return lambda timeout: kind.open(name, timeout=timeout).close()


def opens_a_queue(awaits: bool) -> Iterator[Scene]:
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as stack,
    ):
        patch.setenv("MEMLANE_RUN", folder)

        def serve() -> None:
            stack.enter_context(MessageQueue(1, name="steps", serve=True))

        yield opening(MessageQueue, "steps", awaits), serve


def opens_a_storage(awaits: bool) -> Iterator[Scene]:
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as stack,
    ):
        patch.setenv("MEMLANE_RUN", folder)
        ring = stack.enter_context(memlane.SingleWriterShmRingBuffer(10_000, create=True))
        kind = memlane.SingleWriterShmObjectStorage

        def serve() -> None:
            stack.enter_context(kind(1000, 1, ring, name="images", serve=True))

        yield opening(kind, "images", awaits), serve


for call, awaits in (("open", False), ("aopen", True)):
    scene(f"MessageQueue.{call}")(partial(opens_a_queue, awaits))
    scene(f"SingleWriterShmObjectStorage.{call}")(partial(opens_a_storage, awaits))


@scene("Gather.dequeue")
def _() -> Iterator[Scene]:
    with gather_of() as (reader, writers):
        yield lambda timeout: reader.dequeue(timeout), lambda: writers[1].enqueue("there")


@scene("Gather.dequeue", "without one sleep for all")
def _() -> Iterator[Scene]:
    with gather_of() as (reader, writers):
        reader._reader._sleeps = False  # type: ignore[union-attr]
        yield lambda timeout: reader.dequeue(timeout), lambda: writers[1].enqueue("there")


@scene("Gather.adequeue")
def _() -> Iterator[Scene]:
    with gather_of() as (reader, writers):
        yield (
            lambda timeout: asyncio.run(reader.adequeue(timeout)),
            lambda: writers[1].enqueue("there"),
        )


@scene("Gather.enqueue")
def _() -> Iterator[Scene]:
    with gather_of() as (reader, writers):
        fill(writers[0])
        yield lambda timeout: writers[0].enqueue("late", timeout), reader.dequeue


@scene("Gather.aenqueue")
def _() -> Iterator[Scene]:
    with gather_of() as (reader, writers):
        fill(writers[0])
        yield lambda timeout: asyncio.run(writers[0].aenqueue("late", timeout)), reader.dequeue


@scene("Gather.wait_until_ready")
def _() -> Iterator[Scene]:
    with Gather(2) as reader, ExitStack() as stack:

        def attach() -> None:
            for rank in range(2):
                writer = Gather.create_from_handle(reader.export_handle(rank), rank)
                stack.callback(writer.close)

        yield lambda timeout: reader.wait_until_ready(timeout), attach


@scene("MessageQueue.adequeue", "from another host")
def _() -> Iterator[Scene]:
    with remote_queue() as (writer, (reader,)):
        yield (
            lambda timeout: asyncio.run(reader.adequeue(timeout)),
            lambda: writer.enqueue("there"),
        )


@scene("MessageQueue.aenqueue", "to a remote reader")
def _() -> Iterator[Scene]:
    with remote_queue(remote_window=1) as (writer, (reader,)):
        fill(writer)
        yield lambda timeout: asyncio.run(writer.aenqueue("late", timeout)), reader.dequeue


@scene("MessageQueue.aenqueue", "without readers")
def _() -> Iterator[Scene]:
    with queue_of(0) as (writer, _):
        yield lambda timeout: asyncio.run(writer.aenqueue("late", timeout)), None


@scene("first_ready")
def _() -> Iterator[Scene]:
    with queue_of() as (writer, (reader,)):
        yield lambda timeout: first_ready([reader], timeout), lambda: writer.enqueue("there")


@scene("MessageQueue.wait_until_ready")
def _() -> Iterator[Scene]:
    with MessageQueue(1, 1, None, 64, 2) as writer, ExitStack() as readers:
        yield writer.wait_until_ready, lambda: readers.enter_context(reader_of(writer))


@scene("MessageQueue.wait_until_ready", "without readers")
def _() -> Iterator[Scene]:
    with queue_of(0, ready=False) as (writer, _):
        yield writer.wait_until_ready, None


@scene("MessageQueue.wait_until_ready", "for a remote reader")
def _() -> Iterator[Scene]:
    with remote_writer() as writer, ExitStack() as readers:
        yield writer.wait_until_ready, lambda: readers.enter_context(reader_of(writer))


@scene("MessageQueue.create_from_handle")
def _() -> Iterator[Scene]:
    with MessageQueue(1, 1, None, 64, 2) as writer:
        yield lambda timeout: reader_of(writer, timeout).close(), None


@scene("MessageQueue.create_from_handle", "of a remote writer")
def _() -> Iterator[Scene]:
    with remote_writer() as writer, Cable(writer.export_handle(0)) as cable:
        cable.cut()

        def attach(timeout: Any) -> None:
            MessageQueue.create_from_handle(cable.handle, 0, timeout=timeout).close()

        yield attach, cable.mend


@scene("MessageQueue.close")
def _() -> Iterator[Scene]:
    with queue_of() as (writer, _):
        yield writer.close, None


@scene("MessageQueue.close", "of a remote writer")
def _() -> Iterator[Scene]:
    with remote_queue() as (writer, _):

        def close(timeout: Any) -> None:
            with suppress(TimedOut):  # the reader may not have confirmed it yet
                writer.close(timeout)

        yield close, None


@scene("MessageQueue.recv")
def _() -> Iterator[Scene]:
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as here,
        context.socket(zmq.PAIR) as there,
    ):
        here.bind("inproc://timeouts")
        there.connect("inproc://timeouts")
        yield lambda timeout: MessageQueue.recv(here, timeout), lambda: there.send_pyobj("there")


@scene("MessageQueue.create_from_process_group")
def _() -> Iterator[Scene]:
    with groups_of("tcp", 2) as groups:
        made = []

        def create(timeout: Any, rank: int = 1) -> None:
            group = groups[rank]
            queue = MessageQueue.create_from_process_group(group, *SMALL, timeout=timeout)
            made.append(queue)

        yield create, lambda: create(PATIENCE, 0)
        for queue in made:
            queue.close()


@scene("in_the_same_node_as")
def _() -> Iterator[Scene]:
    with groups_of("tcp", 2) as groups:

        def ask(timeout: Any, rank: int = 1) -> None:
            memlane.in_the_same_node_as(groups[rank], timeout=timeout)

        yield ask, lambda: ask(PATIENCE, 0)


@scene("collectives_of")
def _() -> Iterator[Scene]:
    with groups_of("tcp", 2) as groups:

        def meet(timeout: Any, rank: int = 1) -> None:
            with collectives_of(groups[rank], timeout) as call:
                call.gather(lambda: rank)

        yield meet, lambda: meet(PATIENCE, 0)


@scene("TcpGroup.broadcast_obj")
def _() -> Iterator[Scene]:
    with groups_of("tcp", 2) as groups:
        yield (
            lambda timeout: groups[1].broadcast_obj(None, 0, timeout),
            lambda: groups[0].broadcast_obj("there", 0),
        )


@scene("TcpGroup")
def _() -> Iterator[Scene]:
    where = ("127.0.0.1", 0, 0, 1)
    yield lambda timeout: TcpGroup(*where, secret=SECRET, timeout=timeout).close(), None


@scene("SharedOffloadRegion")
def _() -> Iterator[Scene]:
    instance = new_id()
    creator = start(half_created, instance)
    creator.hear()

    def create(timeout: Any) -> None:
        region_of(instance, timeout=timeout).cleanup()

    yield create, creator.kill
    with suppress(ProcessLookupError):
        creator.kill()
    region_of(instance).cleanup()


class Waits:
    """A worker that waits for a byte before it is ready, or in a call."""

    def __init__(self, _rank: int, _world: int, descriptor: int = -1) -> None:
        if descriptor >= 0:
            self.wait(descriptor)

    def wait(self, descriptor: int, _more: object = None) -> None:
        os.read(descriptor, 1)


@contextmanager
def gate() -> Iterator[tuple[int, Callable[[], object]]]:
    here, there = os.pipe()
    with open(here), open(there, "wb", buffering=0) as opening:
        yield here, lambda: opening.write(b"x")


@scene("WorkerGroup")
def _() -> Iterator[Scene]:
    with gate() as (descriptor, open_it):

        def begin(timeout: Any) -> None:
            more: Any = {"args": (descriptor,), "start_method": "fork", "timeout": timeout}
            WorkerGroup(Waits, 1, **more).close()

        yield begin, open_it


@scene("WorkerGroup.close")
def _() -> Iterator[Scene]:
    with WorkerGroup(Waits, 1, start_method="fork", timeout=PATIENCE) as group:
        yield group.close, None


@contextmanager
def waiting_call() -> Iterator[tuple[memlane.Call[None], Callable[[], object]]]:
    with (
        gate() as (descriptor, open_it),
        WorkerGroup(Waits, 1, start_method="fork", timeout=PATIENCE) as group,
    ):
        yield group.submit(Waits.wait, descriptor), open_it
        group.kill()


@scene("Call.result")
def _() -> Iterator[Scene]:
    with waiting_call() as (call, open_it):
        yield call.result, open_it


@scene("Call.outcomes")
def _() -> Iterator[Scene]:
    with waiting_call() as (call, open_it):
        yield call.outcomes, open_it


@contextmanager
def full_store() -> Iterator[tuple[memlane.WorkersStore, Callable[[], object]]]:
    """A call has its oldest object."""
    with (
        gate() as (descriptor, open_it),
        WorkerGroup(Waits, 1, start_method="fork", timeout=PATIENCE, store=10_000) as group,
    ):
        group.submit(Waits.wait, descriptor, group.store.put("first", bytes(9000)))
        yield group.store, open_it
        group.kill()


@scene("WorkersStore.put")
def _() -> Iterator[Scene]:
    with full_store() as (store, open_it):
        yield lambda timeout: store.put("next", bytes(9000), timeout), open_it


@scene("WorkersStore.aput")
def _() -> Iterator[Scene]:
    with full_store() as (store, open_it):
        yield lambda timeout: asyncio.run(store.aput("next", bytes(9000), timeout)), open_it


@scene("as_completed")
def _() -> Iterator[Scene]:
    with waiting_call() as (call, open_it):
        yield lambda timeout: next(as_completed([call], timeout)), open_it


@scene("testing.kill")
def _() -> Iterator[Scene]:
    peer = start(lambda link: link.hear())
    yield lambda timeout: kill(peer.pid, timeout), None
    peer.kill()


@scene("_wait_for_file_size")
def _() -> Iterator[Scene]:
    with tempfile.TemporaryFile() as file:
        descriptor = file.fileno()
        yield (
            lambda timeout: _wait_for_file_size(descriptor, PAGE, timeout),
            lambda: os.ftruncate(descriptor, PAGE),
        )


def reader_of(writer: MessageQueue, timeout: Any = PATIENCE) -> MessageQueue:
    return MessageQueue.create_from_handle(writer.export_handle(0), 0, timeout=timeout)


def enter(block: AbstractContextManager[Any]) -> None:
    with block:
        pass


# -------------------------------------------------------------------------------------------------


def takers() -> set[str]:
    """Everything public that takes a timeout."""
    found = set()

    def look(name: str, call: object) -> None:
        if "timeout" in inspect.signature(call).parameters:  # type: ignore[arg-type]
            found.add(name)

    for module, prefix in ((memlane, ""), (memlane.groups, ""), (memlane.testing, "testing.")):
        for name in getattr(module, "__all__", None) or vars(module):
            value = getattr(module, name)
            if name.startswith("_") or not getattr(value, "__module__", "").startswith("memlane"):
                continue
            if inspect.isfunction(value):
                look(prefix + name, value)
            if inspect.isclass(value) and not issubclass(value, BaseException):
                if value.__init__ is not object.__init__:  # type: ignore[misc]
                    look(name, value.__init__)  # type: ignore[misc]
                for method, member in inspect.getmembers(value, inspect.isroutine):
                    if not method.startswith("_") and callable(member):
                        look(f"{name}.{method}", member)
    return found


def test_every_timeout_is_here() -> None:
    """A new timeout needs a scene here."""
    here = {name.split(" ")[0] for name in SCENES} | {"WorkerGroup.check"}  # returns in the end
    assert here == takers() | {"_wait_for_file_size"}


@pytest.mark.parametrize("name", SCENES)
def test_what_is_no_number_of_seconds_is_refused(name: str) -> None:
    """A bool, text or NaN: as an error of that kind, before anything happens."""
    with SCENES[name]() as (call, _):
        before = segments()
        for timeout in REFUSED:
            kind = InvalidArgument if isinstance(timeout, float | np.float32) else InvalidType
            with refuses(kind, match="timeout must be a number of seconds or None, not"):
                call(timeout)
        assert segments() == before


@pytest.mark.parametrize("name", [name for name in SCENES if not name.startswith("testing")])
def test_a_negative_timeout_polls_like_0(name: str) -> None:
    """A call that has to wait times out at once; one that need not wait succeeds."""
    for timeout in EXPIRED:
        with SCENES[name]() as (call, release):
            if release is None:
                call(timeout)
            else:
                with refuses(TimeoutError):
                    call(timeout)


@pytest.mark.parametrize("name", SCENES)
def test_the_longest_timeouts_wait(name: str) -> None:
    """A timeout of None waits for ever, and so does one longer than any clock."""
    for timeout in ENDLESS:
        with SCENES[name]() as (call, release):
            calling = Aside(call, timeout)
            if release is not None:
                calling.until_blocked()
                release()
            calling.result()


def test_a_signaling_nan_is_refused_like_any_other() -> None:
    with refuses(InvalidArgument, match="not NaN"):
        seconds_of(Decimal("sNaN"))
