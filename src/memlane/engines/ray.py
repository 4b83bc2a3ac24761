"""Queues between a Ray driver and its actors, on one node or on many.

The driver makes a `Crew` of actors, each of which finds its end in `self.memlane`:

    with Crew(actors) as crew:
        running = [actor.run.remote() for actor in actors]
        crew.send(step)           # one write into shared memory, one stream to each on another node
        answers = crew.receive()  # {rank: answer}

Between nodes the queues use TCP; their keys travel with Ray's own traffic: protect that
(`RAY_USE_TLS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from itertools import repeat
from types import SimpleNamespace
from typing import Any, NamedTuple

import ray

from memlane import Handle, MessageQueue, ReaderDied, TimedOut, WriterDied
from memlane._base.deadline import Deadline, seconds_of


class Place(NamedTuple):
    """An actor's ends: it reads `steps` from the driver and writes `answers` to it."""

    rank: int
    steps: MessageQueue
    answers: MessageQueue


class Crew(AbstractContextManager["Crew"]):
    """Actors, ranked in the given order. Those on the driver's node share its memory."""

    def __init__(
        self, actors: Sequence[Any], *, timeout: float | None = 60.0, **options: Any
    ) -> None:
        """Asks each actor for its node and attaches it. `options` are those of `MessageQueue`.

        Raises:
            ray.exceptions.RayError: an actor died, or was busy for longer than `timeout` seconds.
            TimedOut: an actor did not attach within `timeout` seconds.
        """

        within = Deadline(timeout).timeout_left()

        def ask(function: Any, *columns: Any) -> list[Any]:
            rows = zip(actors, *columns, strict=False)
            calls = [actor.__ray_call__.remote(function, *row) for actor, *row in rows]
            return list(ray.get(calls, timeout=within))

        here = ray.get_runtime_context().get_node_id()
        is_here = [node == here for node in ask(lambda _: ray.get_runtime_context().get_node_id())]
        local = [rank for rank, is_local in enumerate(is_here) if is_local]
        self._answers: dict[int, MessageQueue] = {}
        self._received: dict[int, Any] = {}
        self._broken: Exception | None = None
        with ExitStack() as opened:
            self._steps = opened.enter_context(_queue(len(is_here), local, options))
            keys = [self._steps.export_handle(rank) for rank in range(len(is_here))]
            places = ask(_attach, keys, range(len(is_here)), is_here, repeat(options))
            for rank, handle in enumerate(places):
                reader = MessageQueue.create_from_handle(handle, 0)
                self._answers[rank] = opened.enter_context(reader)
                reader.answers(self._steps)
            self._steps.wait_until_ready(timeout)
            ask(lambda actor: actor.memlane.answers.wait_until_ready(timeout))
            self._opened = opened.pop_all()

    def send(self, step: Any, timeout: float | None = None) -> None:
        """Sends to every actor. Raises as `enqueue`; on ReaderDied nothing was sent."""
        while True:
            try:
                return self._steps.enqueue(step, timeout)
            except ReaderDied as error:
                if error.rank in self._answers:
                    raise
                self._steps.release_reader(error.rank)

    def receive(self, timeout: float | None = None) -> dict[int, Any]:
        """Returns the next answer of each actor by rank; `timeout` applies to each of them.

        Raises:
            ReaderDied: an actor died; the answers of the others are kept for the next call.
            Exception: an answer cannot be decoded; the others' answers to this step are dropped.
        """
        seconds_of(timeout)  # an invalid one is not an answer's error
        for rank in self._answers:
            others = SimpleNamespace(is_set=partial(self._look_at_others, rank))
            self._take(rank, timeout, others)  # polls it every 100 ms
        received, self._received = self._received, {}
        broken, self._broken = self._broken, None
        if broken is not None:
            raise broken
        return received

    def _take(self, rank: int, timeout: float | None, cancel: Any = None) -> None:
        if rank not in self._received:
            try:
                self._received[rank] = self._answers[rank].dequeue(timeout, cancel)
            except WriterDied as error:
                raise ReaderDied(rank, error.pid) from error
            except TimedOut:
                raise
            except Exception as error:  # the answer is consumed, even if it cannot be decoded
                error.add_note(f"in the answer of actor {rank}")
                self._received[rank], self._broken = None, error

    def _look_at_others(self, awaited: int) -> bool:
        for rank in self._answers.keys() - {awaited}:
            with suppress(TimedOut):
                self._take(rank, 0)
        return False

    def go_on_without(self, rank: int) -> None:
        """Stops waiting for an actor that died; its rank cannot be used again."""
        self._answers.pop(rank).close()
        self._received.pop(rank, None)

    def close(self) -> None:
        """Closes the driver's ends. Actors read what is left, then `steps.dequeue()` raises
        WriterClosed; they close their own ends. After closing everything, raises TimedOut if an
        actor that the driver still waits for may not have got all steps."""
        try:
            self._steps.close()
        except TimedOut as error:
            if not self._answers.keys().isdisjoint(error.ranks):
                raise
        finally:
            self._opened.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _queue(readers: int, local: list[int], options: dict[str, Any]) -> MessageQueue:
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    own = addresses[ray.get_runtime_context().get_node_id()] if len(local) < readers else None
    return MessageQueue(readers, len(local), local, connect_ip=own, **options)


def _attach(actor: Any, handle: Handle, rank: int, is_local: bool, options: Any) -> Handle:
    answers = _queue(1, [0] if is_local else [], options)
    actor.memlane = Place(rank, MessageQueue.create_from_handle(handle, rank), answers)
    return answers.export_handle(0)
