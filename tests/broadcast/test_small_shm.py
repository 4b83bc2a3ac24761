"""A /dev/shm of 2X takes with lending whatever one of X takes without, by any number of queues.

Fails without the guard: extents that are lent or kept warm while less than half of the file system
is free, or space that free chunks keep.
"""

import os
import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlane import MessageQueue, ShmExhausted, TimedOut
from tests.support import Link, private_shm, start, unshare_refusal
from tests.support.queues import queue_of

pytestmark = [
    pytest.mark.property,
    pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal()),
]

EXAMPLES = int(os.environ.get("MEMLANE_EXAMPLES", "5000")) // 200
SECONDS = 60 + 4 * EXAMPLES  # one takes 0.2 s on an idle machine
MIB = 1 << 20
KIB = 1 << 10

QUEUE = st.fixed_dictionaries(
    {
        "readers": st.integers(1, 2),
        "chunk": st.sampled_from([4 * KIB, MIB + 1, 3 * MIB, 8 * MIB]),
        "chunks": st.integers(3, 10),
        "kept": st.sampled_from([0, 1, 3, 10]),  # arrays that each reader keeps
        "lag": st.integers(0, 2),  # messages that the last reader is behind
    }
)
BURST = st.tuples(
    st.integers(0, 2),  # the queue, modulo their number
    st.integers(20, 110),  # percent of what all queues can send at once in the smaller file system
    st.sampled_from([True, True, True, False]),  # an array, or bytes, which are never lent
    st.integers(1, 12),  # as many messages
)


class Traffic:
    """Queues whose messages are read, and kept, as they are sent; keeps what each queue took."""

    def __init__(self, stack: ExitStack, queues: list[dict[str, Any]], *, lend: bool) -> None:
        self.lend = lend
        self.options = queues
        self.ends: list[tuple[MessageQueue, list[MessageQueue]]] = []
        self.kept: list[list[deque[tuple[int, Any]]]] = []
        self.sent = [0] * len(queues)
        for options in queues:
            self.ends.append(
                stack.enter_context(
                    queue_of(
                        options["readers"],
                        max_chunk_bytes=options["chunk"],
                        max_chunks=options["chunks"],
                    )
                )
            )
            self.kept.append([deque(maxlen=options["kept"]) for _ in range(options["readers"])])

    def step(self, which: int, size: int, is_array: bool) -> type[Exception] | None:
        """Sends a message, and reads; returns the error if it was not sent."""
        which %= len(self.ends)
        writer, readers = self.ends[which]
        value = self.sent[which] % 250
        message = np.full(size, value, np.uint8) if is_array else bytes([value]) * size
        refused = None
        try:
            writer.enqueue(message, timeout=0)
            self.sent[which] += 1
        except (ShmExhausted, TimedOut) as error:
            refused = type(error)
        for reader, kept in zip(readers, self.kept[which], strict=True):
            behind = self.options[which]["lag"] if reader is readers[-1] and refused is None else 0
            while (position := reader.statistics().messages) < self.sent[which] - behind:
                got = reader.dequeue(timeout=0, lend=self.lend)
                assert got[0] == got[-1] == position % 250
                kept.append((position % 250, got))
            assert all(got[0] == got[-1] == value for value, got in kept)
        return refused


@contextmanager
def shm_of(mebibytes: int) -> Iterator[None]:
    """Another /dev/shm over this one."""
    options = f"size={mebibytes}m,mode=1777"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", "/dev/shm"], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", "/dev/shm"], check=True)


def refusals(
    mebibytes: int, queues: list[dict[str, Any]], steps: list[Any], *, lend: bool
) -> list[type[Exception] | None]:
    with shm_of(mebibytes), ExitStack() as stack:
        traffic = Traffic(stack, queues, lend=lend)
        return [traffic.step(*step) for step in steps]


def compare(_link: Link, examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(
        half=st.sampled_from([8, 12, 16]),
        queues=st.lists(QUEUE, min_size=1, max_size=3),
        bursts=st.lists(BURST, min_size=3, max_size=8),
    )
    def twice_the_space_takes_as_much(
        half: int, queues: list[dict[str, Any]], bursts: list[tuple[int, int, bool, int]]
    ) -> None:
        share = half * MIB // sum(2 + queue["lag"] for queue in queues)
        steps = [
            (which, share * percent // 100, is_array)
            for which, percent, is_array, count in bursts
            for _ in range(count)
        ]
        without = refusals(half, queues, steps, lend=False)
        first = next((at for at, why in enumerate(without) if why), len(without))
        assert not any(refusals(2 * half, queues, steps[:first], lend=True))

    twice_the_space_takes_as_much()


@pytest.mark.soak(seconds=SECONDS)
def test_lending_refuses_nothing() -> None:
    """As long as X would take every message with copies, 2X takes them with lent arrays."""
    start(compare, EXAMPLES, method="spawn", command=private_shm("64m")).result(SECONDS)
