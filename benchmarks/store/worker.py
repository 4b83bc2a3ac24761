"""The processes of one peer: the writer's process forks the readers and executes orders.

All times are of single calls. Outside the measured time, both ends of every array are changed
before each `put` and checked after each `get`; in the first lap, and for one object of each slice,
every byte is compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.store.channel import Channel, Peer, Setting
from benchmarks.store.payloads import check, is_stamped, stamp
from memlane.cli.bench.processes import FORK, follow, lead

Item = tuple[Any, int]  # an object's place and number


def must(is_right: bool) -> None:
    if not is_right:
        raise AssertionError("an object arrived changed")


class Reader:
    """Returns times in ns."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._own = channel.setting.payload.make()

    def open(self, rank: int, token: object) -> None:
        self.channel.open_reader(rank, token)

    def take(self, by_view: bool, items: Sequence[Item]) -> list[int]:
        """Times from requesting each object to the end of its use, without the check."""
        read = self._viewed if by_view else self._got
        return [read(place, number) for place, number in items]

    def _got(self, place: Any, number: int) -> int:
        channel = self.channel
        start = time.perf_counter_ns()
        obj = channel.get(place)
        used = time.perf_counter_ns() - start
        must(is_stamped(obj, number))
        start = time.perf_counter_ns()
        del obj
        channel.release()
        return used + time.perf_counter_ns() - start

    def _viewed(self, place: Any, number: int) -> int:
        channel = self.channel
        start = time.perf_counter_ns()
        with channel.view(place) as obj:
            used = time.perf_counter_ns() - start
            must(is_stamped(obj, number))
            start = time.perf_counter_ns()
        del obj
        channel.release()
        return used + time.perf_counter_ns() - start

    def check(self, by_view: bool, item: Item) -> None:
        """Checks every byte of an object."""
        place, number = item
        if by_view:
            with self.channel.view(place) as obj:
                check(obj, self._own, number)
        else:
            obj = self.channel.get(place)
            check(obj, self._own, number)
        del obj
        self.channel.release()

    def arrival(self, item: Item) -> int:
        """Returns when the object arrived, on the clock that all processes share; by view if
        possible."""
        place, number = item
        channel = self.channel
        if channel.has_view:
            with channel.view(place) as obj:
                there = time.monotonic_ns()
                must(is_stamped(obj, number))
        else:
            obj = channel.get(place)
            there = time.monotonic_ns()
            must(is_stamped(obj, number))
        del obj
        channel.release()
        return there

    def close(self) -> None:
        self.channel.close()


class Writer:
    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._obj = channel.setting.payload.make()
        self._number = 0

    def open(self, pipes: list[Connection]) -> None:
        def ask(order: str, *arguments: object) -> list[Any]:
            for pipe in pipes:
                pipe.send((order, arguments))
            return [pipe.recv() for pipe in pipes]

        token = self.channel.open_writer()
        own = self.channel.start_readers()
        if own is None:
            for rank, pipe in enumerate(pipes):
                pipe.send(("open", (rank, token)))
                pipe.recv()
        self._ask: Callable[..., list[Any]] = own or ask
        self._has_own_readers = own is not None

    def _put(self) -> tuple[Item, int]:
        self._number += 1
        stamp(self._obj, self._number)
        start = time.perf_counter_ns()
        place = self.channel.put(self._obj)
        used = time.perf_counter_ns() - start
        self.channel.settle()
        return (place, self._number), used

    def _forget(self, items: Sequence[Item]) -> None:
        self.channel.forget([place for place, _ in items])

    def first_lap(self) -> list[int]:
        """ns of each put while the memory is used for the first time. Checks every object."""
        times = []
        for _ in range(self.channel.setting.payload.slots):
            item, used = self._put()
            times.append(used)
            self._ask("check", self.channel.has_view, item)
            self._forget([item])
        return times

    def slice(self) -> dict[str, list[int]]:
        """ns of single puts, gets and views, over all readers."""
        items, puts = [], []
        for _ in range(self.channel.setting.payload.burst):
            item, used = self._put()
            items.append(item)
            puts.append(used)
        times = {"put": puts}
        if self.channel.has_get:
            times["get"] = list(chain(*self._ask("take", False, items)))
        if self.channel.has_view:
            times["view"] = list(chain(*self._ask("take", True, items)))
        if self.channel.can_read_again:
            self._ask("check", self.channel.has_view, items[-1])
        self._forget(items)
        return times

    def hand_over(self) -> int:
        """ns from before a put until all readers, told its place by a pipe, have the object."""
        self._number += 1
        stamp(self._obj, self._number)
        start = time.monotonic_ns()
        item = (self.channel.put(self._obj), self._number)
        arrivals = self._ask("arrival", item)
        self.channel.settle()
        self._forget([item])
        return int(max(arrivals)) - start

    def close(self) -> None:
        if not self._has_own_readers:
            self._ask("close")
        self.channel.close()


def writer_main(peer: Peer, setting: Setting, orders: Connection) -> None:
    """The body of the process that `session.Session` starts."""

    def open_peer() -> Writer:
        channel = peer.channel(setting)
        channel.prepare()
        pipes: list[Connection] = []
        for _ in range(setting.readers):
            here, there = FORK.Pipe()
            FORK.Process(target=follow, args=(Reader(channel), there, orders)).start()
            pipes.append(here)
        writer = Writer(channel)
        writer.open(pipes)
        return writer

    lead(open_peer, orders)
