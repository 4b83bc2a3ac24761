"""release_reader: the queue continues without a process that is dead or never attached."""

import os
import signal

from memlane import Gather, GatherHandle, Handle, MessageQueue, ReaderDied, WriterDied
from tests.support import PATIENCE, Link, start, until
from tests.support.queues import drain, fill, refuses, start_reader


def test_a_stopped_reader_is_not_released() -> None:
    """Stopped is not dead."""
    with MessageQueue(1, 1, None, 64, 2) as writer:
        reader = start_reader(writer.export_handle())
        reader.peer.stop()
        with refuses(ValueError):
            writer.release_reader(0)
        reader.peer.resume()
        writer.enqueue(1)
        assert reader.call("dequeue") == 1
        reader.call("close")


def test_the_others_go_on_without_a_released_reader(method: str) -> None:
    """After the release the others get everything in order, and the writer is not blocked."""
    with MessageQueue(2, 2, None, 64, 3) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        doomed = start_reader(writer.export_handle(1), 1, method)
        fill(writer)
        doomed.peer.kill()
        for _ in range(3):
            with refuses(ReaderDied) as caught:
                writer.enqueue("never", timeout=PATIENCE)
            assert (caught.value.rank, caught.value.pid) == (1, doomed.pid)
        assert drain(reader) == [0, 1, 2]
        writer.release_reader(1)
        for number in range(3, 12):
            writer.enqueue(number, timeout=0)
            assert reader.dequeue(timeout=0) == number
        reader.close()


def holds_much_between_two_queues(link: Link, plans: Handle, answers: GatherHandle) -> None:
    todo = MessageQueue.create_from_handle(plans, 0)
    much = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)  # closed between the two
    os.posix_fallocate(much, 0, 1 << 30)
    done = Gather.create_from_handle(answers, 0)
    link.tell("ready")
    link.hear()
    del todo, done


def test_a_reader_whose_death_another_queue_has_reported_is_released() -> None:
    """Also while the kernel has yet to close its files of this queue."""
    for _ in range(3):
        with MessageQueue(1, 1) as plans, Gather(1) as answers:
            doomed = start(
                holds_much_between_two_queues, plans.export_handle(0), answers.export_handle(0)
            )
            doomed.hear()
            os.kill(doomed.pid, signal.SIGKILL)
            with refuses(WriterDied):
                answers.dequeue(PATIENCE)
            answers.release_writer(0)
            plans.release_reader(0)
            plans.enqueue("goes on", timeout=0)
            doomed.join()


def test_each_death_raises_until_that_reader_is_released() -> None:
    """Each death is raised until that reader is released."""
    with MessageQueue(3, 3, None, 64, 2) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(1), 1)
        doomed = {rank: start_reader(writer.export_handle(rank), rank) for rank in (0, 2)}
        fill(writer)
        for remote in doomed.values():
            remote.peer.kill()
        released = []
        for _ in range(2):
            with refuses(ReaderDied) as caught:
                writer.enqueue("never", timeout=PATIENCE)
            assert caught.value.pid == doomed[caught.value.rank].pid
            writer.release_reader(caught.value.rank)
            released.append(caught.value.rank)
        assert sorted(released) == [0, 2]
        assert drain(reader) == [0, 1]
        writer.enqueue(2, timeout=0)
        assert drain(reader) == [2]
        reader.close()


def test_a_writer_goes_on_when_the_last_reader_is_released() -> None:
    """With all readers dead and released the writer continues alone."""
    with MessageQueue(1, 1, None, 64, 2) as writer:
        doomed = start_reader(writer.export_handle())
        fill(writer)
        doomed.peer.kill()
        until(lambda: writer.statistics().readers[0].state == "dead")
        writer.release_reader(0)
        for number in range(10):
            writer.enqueue(number, timeout=0)
