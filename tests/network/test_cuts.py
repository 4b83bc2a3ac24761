"""Connections reset at any byte, thousands of times, while messages of all sizes are sent.

``MEMLANE_SOAK_CUTS`` is the number of cuts (default 20).
"""

import os
import random
from dataclasses import replace

import pytest

from memlane import MessageQueue
from tests.support import PATIENCE, Aside, start, until
from tests.support.proxies import cutting
from tests.support.queues import start_reader
from tests.support.remote_queues import HERE, address_of, remote_writer

CUTS = int(os.environ.get("MEMLANE_SOAK_CUTS", "20"))
pytestmark = pytest.mark.soak(seconds=60 + CUTS)


def message(number: int) -> tuple[int, bytes]:
    """From 1 B to 8 MiB, most of them small."""
    size = int(2 ** random.Random(number).uniform(0, 23))
    return number, bytes([number % 251]) * size


def read(queue: MessageQueue) -> tuple[int, str]:
    """Returns how many came, each once and in order, and how it ended."""
    number = 0
    while True:
        try:
            got = queue.dequeue(4 * PATIENCE)
        except Exception as error:
            return number, repr(error)
        assert got == message(number), (got[0], number)
        number += 1


def test_cuts_lose_and_repeat_nothing() -> None:
    """Nothing lost, nothing twice, in order, and it goes on each time."""
    with remote_writer(remote_liveness=PATIENCE, remote_window_bytes=16 << 20) as writer:
        handle = writer.export_handle(0)
        cutter = start(cutting, address_of(handle), CUTS, CUTS)
        way = replace(handle, remote_subscribe_addr=f"tcp://{HERE}:{cutter.hear()}")
        reader = start_reader(way, 0)
        reader.begin(read)
        over = False

        def write() -> int:
            number = 0
            while not over:
                writer.enqueue(message(number), 4 * PATIENCE)
                number += 1
            return number

        writes = Aside(write)
        until(cutter.has_spoken, "it has cut enough", 60 + CUTS, 0.02)
        assert cutter.hear() == "cut enough"
        over = True
        sent = writes.result()
        closes = Aside(writer.close)
        count, error = reader.outcome()
        closes.result()
        assert (count, error[:12]) == (sent, "WriterClosed")
        reader.call("close")
        reader.leave()
        cutter.tell()
        assert cutter.result() == CUTS
