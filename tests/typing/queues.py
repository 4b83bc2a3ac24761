"""Type checkers' knowledge of a queue's messages. mypy and pyright read this file; nobody runs
it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_type

from memlane import Handle, MessageQueue
from memlane.testing import local_queue


@dataclass
class Step:
    """A message."""

    number: int


def writes(queue: MessageQueue[Step]) -> None:
    """Takes steps, and nothing else."""
    queue.enqueue(Step(1))
    queue.enqueue("a step")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(queue.broadcast_object(Step(2)), Step)


def reads(queue: MessageQueue[Step]) -> None:
    """Gives steps, in every way."""
    assert_type(queue.dequeue(timeout=1), Step)
    with queue.dequeue_view() as view:
        assert_type(view, Step)
    for message in queue:
        assert_type(message, Step)
    queue.get()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def opens(handle: Handle, group: object) -> None:
    """However it is opened."""
    assert_type(MessageQueue[Step](1, 1), MessageQueue[Step])
    assert_type(MessageQueue[Step].create_from_handle(handle, 0), MessageQueue[Step])
    assert_type(
        MessageQueue[Step].create_from_process_group(group, 1 << 20, 10), MessageQueue[Step]
    )
    queue: MessageQueue[Step] = MessageQueue.create_from_handle(handle, 0)
    with queue as entered:
        assert_type(entered, MessageQueue[Step])


def without_arguments(handle: Handle) -> None:
    """Anything, as before."""
    queue = MessageQueue.create_from_handle(handle, 0)
    assert_type(queue.dequeue(), Any)
    queue.enqueue({"step": 1})

    def reads(queue: MessageQueue) -> None:
        assert_type(queue.dequeue(), Any)

    reads(queue)
    with local_queue() as (writer, (reader,)):
        writer.enqueue(Step(1))
        assert_type(reader.dequeue(), Any)
