"""Three ranks meet at rank 0's address, and share a queue."""

import multiprocessing
import secrets

from memlane import MessageQueue
from memlane.groups import TcpGroup

WORLD = 3


def main(rank: int, host: str, port: int, secret: str) -> None:
    with TcpGroup(host, port, rank, WORLD, secret=secret) as group:
        queue = MessageQueue.create_from_process_group(group, 1 << 20, 10, timeout=60)
    with queue:
        step = queue.broadcast_object({"tokens": 42} if rank == 0 else None)
        print(f"rank {rank}: {step}")


if __name__ == "__main__":
    secret = secrets.token_hex()  # pass it in a file or an environment variable
    with TcpGroup("127.0.0.1", 0, 0, 1, secret=secret) as probe:
        port = probe.port  # a free port, for this example; choose a fixed one for real hosts
    ranks = [
        multiprocessing.Process(target=main, args=(rank, "127.0.0.1", port, secret))
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    raise SystemExit(any(process.exitcode for process in ranks))
