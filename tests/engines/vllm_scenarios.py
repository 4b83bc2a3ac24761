"""An engine's processes in the tests; `running.run` runs each function."""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from memlane import InvalidArgument, RankTaken, ReaderDied, TimedOut, inspect
from memlane.engines.vllm import register
from tests.engines.ports import free_ports
from tests.engines.scenario import fresh_processes
from tests.engines.sides import received_only_where_switched_on
from tests.support import PATIENCE, assert_in_time

fresh = fresh_processes(__name__)  # they find the engine's modules, too
BROADCAST = "vllm.distributed.device_communicators.shm_broadcast"
EXECUTOR = "vllm.v1.executor.multiproc_executor"


def queue_class() -> Any:
    """The class that vLLM's callers get in this process."""
    register()
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    return MessageQueue


def through_plugins() -> None:
    """vLLM calls its plugins; modules that have copied the name are rebound, others find it."""
    import vllm.distributed.device_communicators.shm_broadcast as broadcast
    import vllm.plugins

    original = [broadcast.MessageQueue]
    early = SimpleNamespace(copy=broadcast.MessageQueue)
    sys.modules["an_early_importer"] = early  # type: ignore[assignment]
    from vllm.v1.executor import multiproc_executor

    vllm.plugins.load_general_plugins()
    assert broadcast.MessageQueue is not original[0]
    assert early.copy is broadcast.MessageQueue is multiproc_executor.MessageQueue
    shutdown = multiproc_executor.MultiprocExecutor.shutdown
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
    assert multiproc_executor.MultiprocExecutor.shutdown is shutdown
    assert broadcast.ShmRingBuffer.__module__ == BROADCAST
    assert broadcast.Handle.__module__ == BROADCAST


def calls() -> None:
    """vLLM's signatures and attributes, and what `shutdown` does to whom."""
    MessageQueue = queue_class()
    writer = MessageQueue(1, 1, enable_shm_tensor_arena=True)
    assert writer.buffer.max_chunk_bytes == 24 * 1024 * 1024
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    assert type(reader) is MessageQueue
    assert reader.export_handle() == writer.export_handle() == writer.handle
    for end in (writer, reader):
        end.wait_until_ready()
        assert (end.shutting_down, end.tensor_arena) == (False, None)
    writer.enqueue(("execute_model", (1,), {}, 0), timeout=PATIENCE)
    assert reader.dequeue(timeout=PATIENCE, indefinite=True) == ("execute_model", (1,), {}, 0)
    with writer.acquire_write(timeout=PATIENCE) as chunk:
        chunk[0] = 7
    with reader.acquire_read(PATIENCE, True) as chunk:
        assert chunk[0] == 7
    # A writer that is shut down is silent: no close, no death.
    writer.shutdown()
    assert writer.shutting_down
    with pytest.raises(TimedOut):
        reader.dequeue(timeout=0.3)
    writer.enqueue("still there")
    threading.Timer(0.2, reader.shutdown).start()
    assert reader.dequeue() == "still there"
    with pytest.raises(RuntimeError, match="cancelled"):
        reader.dequeue(indefinite=True)
    with pytest.raises(RuntimeError, match="cancelled"):
        reader.dequeue(timeout=PATIENCE)
    writer.enqueue("late")
    assert reader.shutting_down
    assert reader.dequeue() == "late"  # what has come is delivered


def remote_places() -> None:
    """Rank -1 is whichever remote place is free; subclasses stay what they are."""

    class Named(queue_class()):  # type: ignore[misc]
        """A queue of an engine that adds to it."""

    writer = Named(3, 1)
    assert "127.0.0.1" in writer.export_handle().remote_subscribe_addr
    handle = pickle.loads(pickle.dumps(writer.export_handle()))
    assert writer.handle == handle
    local = Named.create_from_handle(writer.handle, 0)
    remote = [Named.create_from_handle(one, -1) for one in (writer.handle, handle)]
    assert {type(end) for end in (local, *remote)} == {Named}
    with pytest.raises(RankTaken, match="reader 2 cannot attach"):
        Named.create_from_handle(handle, -1)
    for end in (writer, local, *remote):
        end.wait_until_ready(PATIENCE)
    writer.enqueue("to all")
    assert [end.dequeue(PATIENCE) for end in (local, *remote)] == ["to all"] * 3
    only_local = Named(1, 1)
    with pytest.raises(InvalidArgument, match="no remote readers"):
        Named.create_from_handle(only_local.export_handle(), -1)
    for end in (*remote, local, writer, only_local):
        end.close()


def mixed_handles() -> None:
    """A handle of vLLM's own queue is refused, and one of memlane's where vLLM's own runs."""
    from vllm.distributed.device_communicators.shm_broadcast import Handle

    MessageQueue = queue_class()
    with pytest.raises(TypeError, match="set MEMLANE_VLLM=queue in every process"):
        MessageQueue.create_from_handle(Handle(local_reader_ranks=[0]), 0)
    with MessageQueue(1, 1) as writer:
        sent = pickle.dumps(writer.export_handle())
        assert received_only_where_switched_on(sent, "queue") == writer.export_handle()


def declined() -> None:
    """Another version of vLLM keeps its own queue, and refuses handles of memlane's."""
    import vllm.distributed.device_communicators.shm_broadcast as broadcast

    from memlane.engines._queue import EngineHandle
    from memlane.engines.vllm._engine import VLLM

    original = [broadcast.MessageQueue]
    sent = pickle.dumps(EngineHandle(engine=VLLM))
    register()
    register()
    assert original[0] is broadcast.MessageQueue
    with pytest.raises(ValueError, match="does not replace it in this version of the engine"):
        pickle.loads(sent)


def tried() -> None:
    """A version in which a call of the queue has a new argument, and the store a new name."""
    import vllm.distributed.device_communicators.shm_broadcast as broadcast
    import vllm.distributed.device_communicators.shm_object_storage as storage
    import vllm.plugins

    from memlane.engines._queue import EngineHandle
    from memlane.engines.vllm._engine import VLLM

    def enqueue(self: Any, obj: Any, timeout: float | None = None, priority: int = 0) -> None: ...

    original = [broadcast.MessageQueue]
    original[0].enqueue = enqueue
    del storage.SingleWriterShmRingBuffer
    for _ in range(2):
        vllm.plugins.load_general_plugins()
        vllm.plugins.plugins_loaded = False
    assert broadcast.MessageQueue is original[0]
    with pytest.raises(ValueError, match="does not replace it in this version of the engine"):
        pickle.loads(pickle.dumps(EngineHandle(engine=VLLM)))


def switched() -> None:
    """A start."""
    register()


# Groups ---------------------------------------------------------------------------------------


def _rank_of_group(rank: int, size: int, port: int) -> None:
    import torch.distributed as dist
    from vllm.distributed.utils import StatelessProcessGroup

    MessageQueue = queue_class()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    world = dist.group.WORLD
    stateless = StatelessProcessGroup.create("127.0.0.1", port + 1, rank, size)
    part = dist.new_group([1, 2])
    # The writer is rank 1 of the group, which is another one in the part.
    for group, source in ((world, 1), (stateless, 1), (part, 2)):
        if group is not part or rank in (1, 2):
            end = MessageQueue.create_from_process_group(group, 1 << 20, 4, 1)
            assert end._is_writer == (rank == source)
            assert end.broadcast_object("step" if rank == source else None) == "step"
        dist.barrier()
    ends = _external_writer(MessageQueue, world, rank, size)
    dist.barrier()
    del ends
    end = _one_reader(MessageQueue, world, rank, size)
    dist.barrier()
    end.close()
    dist.destroy_process_group()


def _one_reader(MessageQueue: Any, world: Any, rank: int, size: int) -> Any:
    own, handles = MessageQueue.create_from_process_group_single_reader(world, 1 << 20, 4, 0)
    assert len(handles) == (size if rank == 0 else 0)
    # One device per node: all ranks but the reader's own are remote, though they share memory.
    assert [handle.remote_subscribe_addr is None for handle in handles[:2]] == [True, False][
        : len(handles)
    ]
    ends = [MessageQueue.create_from_handle(handles[0], 0)] if handles else []
    ends += [MessageQueue.create_from_handle(handle, -1) for handle in handles[1:]]
    for end in (own, *ends):
        end.wait_until_ready()
    own.enqueue(f"answer of {rank}")
    assert [end.dequeue(10) for end in ends] == [f"answer of {n}" for n in range(len(ends))]
    return own


def _external_writer(MessageQueue: Any, world: Any, rank: int, size: int) -> Any:
    """Rank 0's process plays the executor, too: it alone has the handle of the writer."""
    writer = MessageQueue(size, size) if rank == 0 else None
    handle = writer.export_handle() if writer is not None else None
    end = MessageQueue.create_from_process_group(world, 0, 0, 0, handle, blocking=False)
    if writer is not None:
        writer.wait_until_ready()
        writer.enqueue("step")
    end.wait_until_ready()
    assert end._is_local_reader
    assert end.dequeue(10) == "step"
    return writer, end


def groups() -> None:
    """Three ranks, one writer and many readers or the reverse, over torch's groups and vLLM's."""
    port = free_ports(2)
    ranks = [fresh.Process(target=_rank_of_group, args=(rank, 3, port)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(PATIENCE)
    assert [process.exitcode for process in ranks] == [0, 0, 0]


# Workers and who waits for them -------------------------------------------------------------


def _work(handle: Any, rank: int, connection: Any) -> None:
    MessageQueue = queue_class()
    steps = MessageQueue.create_from_handle(handle, rank)
    answers = MessageQueue(1, 1)
    connection.send(answers.export_handle())
    steps.wait_until_ready()
    answers.wait_until_ready()
    while steps.dequeue(indefinite=True) == "answer":
        answers.enqueue(rank)
    signal.pause()  # a collective that the other one never joins


class Crew:
    """Two workers, each with a queue for its answers, as vLLM's executor has them."""

    def __init__(self) -> None:
        MessageQueue = queue_class()
        self.steps = MessageQueue(2, 2)
        self.workers, self.answers = [], []
        for rank in range(2):
            here, there = fresh.Pipe()
            handle = self.steps.export_handle()
            worker = fresh.Process(target=_work, args=(handle, rank, there))
            worker.start()
            there.close()
            self.workers.append(worker)
            self.answers.append(MessageQueue.create_from_handle(here.recv(), 0))
            here.close()
        self.steps.wait_until_ready()
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        executor: Any = MultiprocExecutor.__new__(MultiprocExecutor)
        executor.rpc_broadcast_mq, executor.response_mqs = self.steps, self.answers
        executor._post_init_executor()  # the last that executors do with their queues
        seen = inspect.segments()
        work = [segment.answers_to for segment in seen]
        assert work.count(self.steps.handle.queue_id) == 2, seen  # who owes what
        self.steps.enqueue("answer")
        assert [end.dequeue(10) for end in self.answers] == [0, 1]

    def dismiss(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.join()


def awaited_worker_dies() -> None:
    """The wait for worker 0's answer ends with the error that worker 0 was killed."""
    _dies(0)


def another_worker_dies() -> None:
    """The wait for worker 0's answer ends with the error that worker 1 was killed."""
    _dies(1)


def _dies(rank: int) -> None:
    crew = Crew()
    crew.steps.enqueue("compute")
    died: list[float] = []
    victim = crew.workers[rank]

    def kill() -> None:
        died.append(time.monotonic())
        victim.kill()

    threading.Timer(0.5, kill).start()
    with pytest.raises(ReaderDied, match=rf"reader {rank} \(pid {victim.pid}\) died") as caught:
        crew.answers[0].dequeue(timeout=PATIENCE)
    assert_in_time(1, died[0])
    assert (caught.value.rank, caught.value.pid) == (rank, victim.pid)
    crew.dismiss()


def another_worker_stops() -> None:
    """The wait for worker 0's answer logs in vLLM's log that worker 1 is stopped."""
    crew = Crew()
    crew.steps.enqueue("compute")
    os.kill(crew.workers[1].pid, signal.SIGSTOP)
    with pytest.raises(TimedOut):
        crew.answers[0].dequeue(timeout=2.5)
    print("stopped:", crew.workers[1].pid)
    with pytest.raises(TimedOut):
        crew.answers[0].dequeue(timeout=1.5, indefinite=True)
    crew.dismiss()


def _outlive(connection: Any) -> None:
    with pytest.raises(EOFError):
        connection.recv()
    time.sleep(1)  # at least: somebody waits for its end


def _hang(connection: Any) -> None:
    """As in a collective: no handler of Python's runs."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    connection.send("hanging")
    while True:
        signal.pause()


def _executor(*targets: Any) -> Any:
    """Returns an executor of vLLM's class, with no more than what ends its workers; and the ends of
    their pipes."""
    register()
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.workers, pipes = [], []
    for target in targets:
        here, there = fresh.Pipe()
        worker = fresh.Process(target=target, args=(there,))
        worker.start()
        there.close()
        pipes.append(here)
        executor.workers.append(
            SimpleNamespace(proc=worker, death_writer=here, worker_response_mq=None)
        )
    return executor, pipes


def second_shutdown() -> None:
    """A call of the executor's shutdown while another thread is in it waits for its end."""
    executor, _ = _executor(_outlive)
    worker = executor.workers[0].proc
    monitor = threading.Thread(target=executor.shutdown)
    monitor.start()
    while not getattr(executor, "shutting_down", False):
        time.sleep(0.01)
    executor.shutdown()
    assert not worker.is_alive()
    monitor.join()
    executor.shutdown()


def survivor_that_hangs() -> None:
    """After another worker's death it is killed before vLLM's own patience ends."""
    executor, pipes = _executor(_hang, _hang)
    dead, survivor = (worker.proc for worker in executor.workers)
    assert [pipe.recv() for pipe in pipes] == ["hanging"] * 2
    dead.kill()
    multiprocessing.connection.wait([dead.sentinel])  # as vLLM's monitor, which calls then
    executor.shutdown()
    for worker in (dead, survivor):
        worker.join(PATIENCE)
    assert survivor.exitcode == -signal.SIGKILL


# Ray's executor ------------------------------------------------------------------------------


class _Raylets:
    """The calls that Ray's executor makes, for actors that are processes started here."""

    slow = 0.0

    def is_initialized(self) -> bool:
        return True

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> Any:
        """As Ray's: (ended, running) as soon as one has ended."""
        sentinels = {worker.sentinel: worker for worker in refs}
        ended = multiprocessing.connection.wait(list(sentinels), timeout)
        done = [sentinels[one] for one in ended if isinstance(one, int)][:num_returns]
        return done, [worker for worker in refs if worker not in done]

    def kill(self, actor: Any) -> None:
        """Takes its time, as over a network."""
        time.sleep(self.slow)
        actor.kill()
        actor.join()


def _ray_crew(slow: float) -> tuple[Any, Crew]:
    """vLLM's executor for Ray with two workers; ending one takes `slow` seconds."""
    crew = Crew()
    from vllm.v1.executor import ray_executor_v2

    ray_executor_v2.ray = raylets = _Raylets()
    raylets.slow = slow
    executor = ray_executor_v2.RayExecutorV2.__new__(ray_executor_v2.RayExecutorV2)
    executor.shutting_down, executor.shutdown_lock = False, threading.Lock()
    executor.is_failed, executor.failure_callback = False, None
    executor.rpc_broadcast_mq, executor.response_mqs = crew.steps, list(crew.answers)
    executor.ray_worker_handles = [
        ray_executor_v2.RayWorkerHandle(worker, rank, rank, "node", run_ref=worker)
        for rank, worker in enumerate(crew.workers)
    ]
    executor._post_init_executor()
    return executor, crew


def ray_worker_dies() -> None:
    """Its death is named; whoever shuts down beside the monitor waits until all have ended."""
    executor, crew = _ray_crew(slow=0.5)
    executor.start_worker_monitor()
    crew.steps.enqueue("compute")
    threading.Timer(0.3, crew.workers[1].kill).start()
    with pytest.raises(ReaderDied, match=r"reader 1 \(pid"):
        crew.answers[0].dequeue(timeout=PATIENCE)
    while not executor.shutting_down:  # the monitor hears of it from Ray
        time.sleep(0.01)
    executor.shutdown()
    assert executor.response_mqs == []
    assert not crew.workers[0].is_alive()
    crew.dismiss()


def ray_shutdown_joins_its_monitor() -> None:
    """A monitor that hears of a death meanwhile does not wait for the shutdown that joins it."""
    executor, crew = _ray_crew(slow=0.0)
    original, begun = executor._join_monitor_thread, threading.Event()

    def joining() -> None:
        begun.set()
        original()

    def monitor() -> None:
        begun.wait()
        executor.shutdown()

    executor._join_monitor_thread = joining
    executor._monitor_thread = threading.Thread(target=monitor)
    executor._monitor_thread.start()
    began = time.monotonic()
    executor.shutdown()
    assert_in_time(5, began)  # vLLM's join ends after ten
    assert not executor._monitor_thread.is_alive()
    for worker in crew.workers:
        worker.join(PATIENCE)
        assert worker.exitcode == -signal.SIGKILL
