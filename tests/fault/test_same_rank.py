"""M15: however many come for one rank, one gets it.

Fails without the guard: two readers that share a flag lose messages to each other.
"""

from memlane import Handle, MessageQueue, RankTaken
from tests.harness import PATIENCE, Link, start
from tests.queues import drain, refuses, start_reader


def try_to_attach(link: Link, handle: Handle, rank: int) -> object:
    link.tell()
    link.hear()
    try:
        queue = MessageQueue.create_from_handle(handle, rank)
    except RankTaken:
        link.tell(False)
        return None
    with queue:
        link.tell(True)
        link.hear()
        return queue.dequeue(PATIENCE)


def test_a_race_for_one_rank() -> None:
    """Of six processes that attach at once exactly one succeeds, again and again."""
    for _ in range(5):
        with MessageQueue(2, 2, [6, 7], 256, 2) as writer:
            runners = [start(try_to_attach, writer.export_handle(), 7) for _ in range(6)]
            for runner in runners:
                runner.hear()
            for runner in runners:
                runner.tell("go")
            writer.enqueue("for one")
            attached = [runner.hear() for runner in runners]
            assert sorted(attached) == [False] * 5 + [True]
            winner = runners[attached.index(True)]
            winner.tell("all have tried")
            assert winner.result() == "for one"


def test_the_place_of_a_dead_reader_is_not_taken() -> None:
    """A rank whose reader has died is dead, not free: its messages are not given to another."""
    with MessageQueue(1, 1, None, 256, 2) as writer:
        first = start_reader(writer.export_handle())
        writer.enqueue(1)
        first.peer.kill()
        with refuses(ValueError):
            MessageQueue.create_from_handle(writer.export_handle(), 0)


def test_a_rank_in_this_and_in_another_process(method: str) -> None:
    """It does not matter in which process the first one is."""
    with MessageQueue(1, 1, None, 256, 2) as writer:
        first = start_reader(writer.export_handle(), 0, method)
        with refuses(RankTaken):
            MessageQueue.create_from_handle(writer.export_handle(), 0)
        writer.enqueue(1)
        assert first.call("dequeue") == 1
        first.call("close")
    with MessageQueue(1, 1, None, 256, 2) as writer:
        here = MessageQueue.create_from_handle(writer.export_handle(), 0)
        with refuses(RankTaken):
            start_reader(writer.export_handle(), 0, method)
        writer.enqueue(2)
        assert drain(here) == [2]
        here.close()
