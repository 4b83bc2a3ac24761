"""M15: however many processes attach with one rank, only one succeeds.

Fails without the guard: two readers that share a flag lose messages to each other.
"""

import time

from memlane import MessageQueue, RankTaken
from tests.support import PATIENCE, Link, start
from tests.support.queues import drain, refuses, start_reader


def try_to_attach(link: Link) -> None:
    """Role: attaches at a given moment, reports whether that succeeded, reads, and repeats."""
    while (cue := link.hear()) is not None:
        handle, rank, moment = cue
        while time.monotonic() < moment:
            pass
        try:
            queue = MessageQueue.create_from_handle(handle, rank)
        except RankTaken:
            link.tell(False)
            continue
        with queue:
            link.tell(True)
            link.tell(queue.dequeue(PATIENCE))


def test_one_process_wins_the_race_for_a_rank() -> None:
    """Exactly one of three processes that attach at once succeeds, again and again."""
    runners = [start(try_to_attach) for _ in range(3)]
    for _ in range(150):
        with MessageQueue(2, 2, [6, 7], 256, 2) as writer:
            moment = time.monotonic() + 0.003
            for runner in runners:
                runner.tell((writer.export_handle(), 7, moment))
            attached = [runner.hear() for runner in runners]
            assert sorted(attached) == [False, False, True]
            writer.enqueue("for one")
            assert runners[attached.index(True)].hear() == "for one"
    for runner in runners:
        runner.tell(None)
        runner.result()


def test_the_place_of_a_dead_reader_is_not_taken() -> None:
    """A rank whose reader has died is dead, not free: its messages are not given to another."""
    with MessageQueue(1, 1, None, 256, 2) as writer:
        first = start_reader(writer.export_handle())
        writer.enqueue(1)
        first.peer.kill()
        with refuses(ValueError):
            MessageQueue.create_from_handle(writer.export_handle(), 0)


def test_a_rank_is_taken_whichever_process_has_it(method: str) -> None:
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
