"""Steps go through a queue, and their images through a store."""

import multiprocessing

import numpy as np

from memlane import (
    Handle,
    MessageQueue,
    ShmObjectStorageHandle,
    SingleWriterShmObjectStorage,
    SingleWriterShmRingBuffer,
)

WORKERS = 2


def worker(steps_handle: Handle, images_handle: ShmObjectStorageHandle, rank: int) -> None:
    with (
        SingleWriterShmObjectStorage.create_from_handle(images_handle) as images,  # first
        MessageQueue.create_from_handle(steps_handle, rank) as steps,
    ):
        for step in steps:
            with images.view(*step["image"]) as pixels:  # in place; counts as this reader's read
                print(f"worker {rank}: {step['prompt']}, sum {pixels.sum()}")
                del pixels  # until then the image cannot be evicted


if __name__ == "__main__":
    ring = SingleWriterShmRingBuffer(16 << 20, create=True)
    with (
        SingleWriterShmObjectStorage(4 << 20, WORKERS, ring, unlink_when_complete=True) as images,
        MessageQueue(WORKERS) as steps,
    ):
        handles = (steps.export_handle(), images.handle())
        workers = [
            multiprocessing.Process(target=worker, args=(*handles, rank)) for rank in range(WORKERS)
        ]
        for process in workers:
            process.start()
        steps.wait_until_ready(timeout=30, processes=workers)
        for prompt, key in (("a cat", "cat.png"), ("a dog", "dog.png"), ("a cat again", "cat.png")):
            if images.is_cached(key):
                place = images.get_cached(key)  # one more reference: every worker reads it again
            else:
                place = images.put(key, np.full((512, 512), ord(prompt[2]), np.uint8))
            steps.enqueue({"prompt": prompt, "image": place})
    for process in workers:
        process.join()
    raise SystemExit(any(process.exitcode for process in workers))
