"""A process reads the blocks that another one has finished."""

import multiprocessing
import os

import numpy as np

from memlane import Handle, MessageQueue, SharedOffloadRegion

CELL, MESSAGES = 64 << 10, 20
IN_FLIGHT = 4  # numbers of finished blocks that may wait in the queue
BLOCKS = IN_FLIGHT + 2  # one is being written, and one being read


def open_region(instance_id: str, rank: int | None) -> SharedOffloadRegion:
    return SharedOffloadRegion(
        instance_id,
        total_size_bytes=BLOCKS * CELL,
        num_blocks=BLOCKS,
        rank=rank,
        num_workers=1,
        cpu_page_size=CELL,
        participants=2,  # all processes that open it, readers included
    )


def tier(instance_id: str, handle: Handle) -> None:
    """Reads the worker's blocks: to compress them, say, or to write them to a disk."""
    with (
        open_region(instance_id, rank=None) as region,  # no cells of its own: it sees everything
        MessageQueue.create_from_handle(handle, 0) as finished,
    ):
        rows = region.create_kv_memoryview()
        for number, block in finished:
            values = np.frombuffer(rows[block], np.int8)
            assert values[0] == values[-1] == number
            del values
        print(f"the last block was number {number}")


if __name__ == "__main__":
    instance_id = f"tier-{os.getpid()}"
    with MessageQueue(n_reader=1, max_chunks=IN_FLIGHT) as finished:
        process = multiprocessing.Process(target=tier, args=(instance_id, finished.export_handle()))
        process.start()
        with open_region(instance_id, rank=0) as region:
            blocks = region.create_next_array(CELL)
            finished.wait_until_ready(timeout=30, processes=[process])
            for number in range(MESSAGES):
                block = number % BLOCKS
                blocks[block] = number  # 1. write the block
                finished.enqueue((number, block))  # 2. say that it is finished
            finished.close()
            process.join()
    raise SystemExit(process.exitcode)
