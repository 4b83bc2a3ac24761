"""The ticket that a worker starts with, and the forms of the messages between group and worker.

A call is `[numbers, kind, method, args, kwargs]`. `numbers` is the call's number among all that its
worker gets, from 1 on: an int if it is the same for all that get the call, else a list by rank. An
answer is `[rank, number, has_returned, value]`; answer 0 is that of the worker's start. So none
counts for another call, and each side notices a missing message by a gap in the numbers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from memlane import GatherHandle, Handle, InvalidArgument, ShmObjectStorageHandle

PLAIN, SCATTER, START, NEXT, END, LANES = range(6)
"""Kinds of messages: a call; one whose `args` are by rank; the first step of a stream, whose
`method` is its key and the method; a later step, whose `method` is the key and the step's number;
the end of a stream, by its key; the queues to single workers, by rank. The last two have no number,
and no answer."""


@dataclass
class Ticket:
    """All that a worker needs to start. Send it pickled, or as JSON text.

    Attributes:
        rank, world: of the worker, and the number of workers.
        calls, answers: handles of the queues from and to the group.
        cancels: handle of a queue with the numbers of calls to skip.
        lane: handle of the queue to this worker alone, if the group has those already.
        store: handle of the group's store, if it has one.
    """

    rank: int
    world: int
    calls: Handle
    answers: GatherHandle
    cancels: Handle
    lane: Handle | None = None
    store: ShmObjectStorageHandle | None = None

    def to_json(self) -> str:
        """The ticket as text, for workers that another program starts. Raises nothing."""
        lane = self.lane and self.lane.to_json()
        store = self.store and self.store.to_json()
        names = ("calls", "answers", "cancels")
        handles = {name: getattr(self, name).to_json() for name in names}
        return json.dumps({**vars(self), **handles, "lane": lane, "store": store})

    @staticmethod
    def from_json(text: str) -> Ticket:
        """Parses a ticket; raises InvalidArgument (a ValueError) if `text` is not one."""
        try:
            found = json.loads(text)
            rank, world, calls, answers, cancels, lane, store = (
                found[field.name] for field in fields(Ticket)
            )
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidArgument(f"this text is not a worker's ticket: {error!r}") from None
        return Ticket(
            rank,
            world,
            Handle.from_json(calls),
            GatherHandle.from_json(answers),
            Handle.from_json(cancels),
            lane if lane is None else Handle.from_json(lane),
            store if store is None else ShmObjectStorageHandle.from_json(store),
        )
