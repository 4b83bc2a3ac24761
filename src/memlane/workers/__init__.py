"""Worker processes as one object: a call runs on all of them, and its answers come back by rank.

    with WorkerGroup(Model, 4) as group:
        logits = group.call(Model.step, batch)       # a list by rank; the batch is written once
        first = group[0].call(Model.tokens)          # of one worker
        step = group.submit(Model.step, next_batch)  # several calls may be under way

Each file has one owner of state: `table`, which worker owes which answer (pure); `serving`, the
worker's side; `processes`, how workers start and end; `sending` and `answers`, the ways to and from
the workers; `store`, objects that many calls have; `awaiting` and `callbacks`, other ways to wait
for answers; `call`, `stream` and `group`, the faces. Only public names of memlane, and `_base`, are
used.
"""

from memlane.workers.call import Call, as_completed
from memlane.workers.group import WorkerGroup, Workers
from memlane.workers.serving import serve
from memlane.workers.store import Stored, WorkersStore
from memlane.workers.stream import Stream
from memlane.workers.ticket import Ticket

__all__ = [
    "Call",
    "Stored",
    "Stream",
    "Ticket",
    "WorkerGroup",
    "Workers",
    "WorkersStore",
    "as_completed",
    "serve",
]
