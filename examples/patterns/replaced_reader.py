"""A reader is killed, and another process takes its place."""

import os
import signal
from multiprocessing import Process

from memlane import Handle, MessageQueue, ReaderDied


def worker(handle: Handle, rank: int) -> None:
    with MessageQueue.create_from_handle(handle, rank) as queue:
        for kind, value in queue:
            if kind == "state":
                print(f"worker {rank}: the next step is {value}")
            elif (rank, value) == (1, 2):
                os.kill(os.getpid(), signal.SIGKILL)  # an accident
            else:
                print(f"worker {rank} runs step {value}")


def start(handle: Handle, rank: int) -> Process:
    process = Process(target=worker, args=(handle, rank))
    process.start()
    return process


def send(queue: MessageQueue, workers: dict[int, Process], step: int) -> None:
    while True:
        try:
            queue.enqueue(("step", step))
            return
        except ReaderDied as error:  # nobody got this step
            queue.release_reader(error.rank)
            # To go on without it, leave out the rest.
            handle = queue.readmit(error.rank)
            queue.enqueue(("state", step))  # what a new worker must know
            workers[error.rank] = start(handle, error.rank)
            queue.wait_until_ready(timeout=30, processes=workers.values())


if __name__ == "__main__":
    with MessageQueue(n_reader=2, max_chunks=1) as queue:
        workers = {rank: start(queue.export_handle(), rank) for rank in range(2)}
        queue.wait_until_ready(timeout=30, processes=workers.values())
        for step in range(6):
            send(queue, workers, step)
    for process in workers.values():
        process.join()
    print("exit codes:", [process.exitcode for process in workers.values()])
