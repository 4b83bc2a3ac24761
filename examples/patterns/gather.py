"""Four workers answer through a gather, and one of them is killed."""

import multiprocessing
import os
import signal

from memlane import Gather, GatherHandle, WriterDied


def worker(handle: GatherHandle, rank: int) -> None:
    with Gather.create_from_handle(handle, rank) as answers:
        for step in range(3):
            if (rank, step) == (2, 1):
                os.kill(os.getpid(), signal.SIGKILL)  # an accident
            answers.enqueue((rank, step, "done"))


if __name__ == "__main__":
    with Gather(n_writer=4) as answers:
        workers = [
            multiprocessing.Process(target=worker, args=(answers.export_handle(rank), rank))
            for rank in range(4)
        ]
        for process in workers:
            process.start()
        count = 0
        while True:
            try:
                for _ in answers:  # (rank, step, result); ends when all writers have closed
                    count += 1
                break
            except WriterDied as death:
                print(f"worker {death.rank} (pid {death.pid}) died; going on without it")
                answers.release_writer(death.rank)
        print(f"{count} answers")
    for process in workers:
        process.join()
